"""A finished run whose clients judge by other tastes than their own, and what its tastes are."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from prefed.core import ClientTrainer, Download, Method, State, Tensors
from prefed.methods.base.tastes import Z
from prefed.runs.loaded import LoadedRun
from prefed.runs.record import RunError
from prefed.runs.taste_figures import TasteFigures, measure_tastes
from prefed.runs.taste_names import check_apart, check_tastes, split_taste, taste_of_file, told_taste


def at_taste(run: LoadedRun, taste: str, judged: str | None = None) -> LoadedRun:
    """``run`` with clients that judge by another taste than their own.

    Args:
        run: loaded with its data.
        taste: ``"own"``, or a name of :mod:`prefed.runs.taste_names`. A client's taste is what its training
            pairs tell; ``infer:8`` is for each client what 8 of its own training pairs tell, drawn by the
            seed.
        judged: the file of the pairs to be judged; ``None`` for the run's own.

    Raises:
        RunError: the method has no tastes; there is no such client or prototype; or a file that tells the
            taste has pairs that are judged.
        ValueError: the number of pairs is none.
        DataError: the file of pairs cannot be used.
    """
    check_tastes(run)
    if taste == "own":
        return run
    method = run.method
    infer, predict = method.infer, method.predict
    assert infer is not None
    kind, which = split_taste(taste)
    if kind == "pairs":
        changed = replace(
            method, predict=lambda trainer, private, published: infer(trainer, published, int(which))
        )
        return _judging(run, changed)
    if kind == "client":
        z = run.model(run.check(which))[Z]
    elif kind == "file":
        posterior, told = taste_of_file(run, which)
        check_apart(run, told, judged)
        z = posterior.mean
    else:
        z = told_taste(run, taste)

    def other(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        return predict(trainer, private, published).replace({Z: z})

    return _judging(run, replace(method, predict=other))


def _judging(run: LoadedRun, method: Method) -> LoadedRun:
    return replace(run, job=replace(run.job, method=method))


def read_tastes(run: LoadedRun, split: Literal["train", "validation", "test"] = "test") -> TasteFigures:
    """Infer every client's taste from its training pairs, and judge all clients' pairs of ``split`` with it.

    Clients with fewer pairs than ``[privacy] minimum_pairs``, in either split, are left out.

    Args:
        run: loaded with its data.

    Raises:
        RunError: the run's method has no tastes, or no client can be evaluated.
    """
    check_tastes(run)
    goal = run.experiment.method.settings.goal()
    tastes = measure_tastes(run.job, run.backbone, goal, run.server, run.private_state, split)
    if tastes is None:
        raise RunError(f"{run.record.path}: no client has pairs enough to train on and in the {split} split")
    return tastes
