"""A finished run whose clients judge by other tastes than their own, and what its tastes are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch

from prefed.core import ClientTrainer, Download, Method, State, Tensors
from prefed.methods.base.tastes import Z
from prefed.runs.loaded import LoadedRun
from prefed.runs.record import RunError
from prefed.runs.taste_figures import Tastes, measure_tastes


def at_taste(run: LoadedRun, taste: str) -> LoadedRun:
    """``run`` with clients that judge by another taste than their own.

    Args:
        run: loaded with its data.
        taste: ``"own"``; ``"population"``, what the server publishes; ``"infer:8"``, what the first 8 of a
            client's training pairs tell; or the id of a client, for that client's.

    Raises:
        RunError: the method has no tastes, or no client has that id.
        ValueError: the number of pairs is none.
    """
    method = run.method
    infer, predict = method.infer, method.predict
    if infer is None:
        raise RunError(f"{run.record.path}: the clients of {method.name} have no latent taste")
    if taste == "own":
        return run

    def judging(z: Callable[[Download], torch.Tensor]) -> Method:
        def other(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
            return predict(trainer, private, published).replace({Z: z(published)})

        return replace(method, predict=other)

    if taste == "population":
        changed = judging(lambda published: published.tensors["taste"][Z])
    elif taste.startswith("infer:"):
        count = taste.removeprefix("infer:")
        if not count.isdecimal() or not int(count):
            raise ValueError(f"--taste {taste}: after the colon comes a number of pairs, 1 or more")
        changed = replace(
            method, predict=lambda trainer, private, published: infer(trainer, published, int(count))
        )
    else:
        z = run.model(run.check(taste))[Z]
        changed = judging(lambda published: z)
    return replace(run, job=replace(run.job, method=changed))


def read_tastes(run: LoadedRun, split: Literal["train", "validation", "test"] = "test") -> Tastes:
    """Infer every client's taste from its training pairs, and judge all clients' pairs of ``split`` with it.

    Clients with fewer pairs than ``[privacy] minimum_pairs``, in either split, are left out.

    Args:
        run: loaded with its data.

    Raises:
        RunError: the run's method has no tastes, or no client can be evaluated.
    """
    if run.method.infer is None:
        raise RunError(f"{run.record.path}: the clients of {run.method.name} have no latent taste")
    goal = run.experiment.method.settings.goal()
    tastes = measure_tastes(run.job, run.backbone, goal, run.server, run.private_state, split)
    if tastes is None:
        raise RunError(f"{run.record.path}: no client has pairs enough to train on and in the {split} split")
    return tastes
