"""A finished run whose clients judge by other tastes than their own, and what its tastes are."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from prefed.core import ClientTrainer, Download, Method, State, Tensors
from prefed.methods.base.tastes import Z
from prefed.runs.loaded import LoadedRun
from prefed.runs.new_pairs import read_pairs
from prefed.runs.record import RunError
from prefed.runs.taste_figures import TasteFigures, measure_tastes
from prefed.runs.taste_names import (
    OWN,
    Pairs,
    check_tastes,
    needs_pairs,
    no_taste,
    read_taste,
    server_taste,
    taste_of_file,
    warn_of_namesake,
)


def at_taste(
    run: LoadedRun,
    taste: str,
    judged: str | None = None,
    split: Literal["train", "validation", "test"] = "test",
) -> LoadedRun:
    """``run`` with clients that judge by this taste, those that never took part too.

    Args:
        run: loaded with its data.
        taste: ``"own"``, or a name of :mod:`prefed.runs.taste_names`. A client's taste is what its training
            pairs tell, or at the hub of a federation what it told last; ``infer:8`` is for each client what 8
            of its own training pairs tell, drawn by the seed.
        judged: the file of the pairs to be judged; ``None`` for the run's own.
        split: of the run's own pairs, those to be judged.

    Raises:
        RunError: the method has no tastes; there is no such client or prototype; a file that tells the
            taste has pairs that are judged; or the taste comes from pairs that are at a federation's sites.
        ValueError: the number of pairs is none.
        DataError: the file of pairs cannot be used.
    """
    check_tastes(run)
    if run.record.sites and (taste == OWN or needs_pairs(taste)):
        raise RunError(
            f"{run.record.path}: taste {taste!r} comes from pairs that are at the run's sites; here "
            "population, a client's id, prototype:K and infer:FILE judge"
        )
    if taste == OWN:
        warn_of_namesake(run, taste)
        return replace(run, taste=taste)
    method = run.method
    infer, predict = method.infer, method.predict
    assert infer is not None
    kind, which = read_taste(run, taste)
    if kind == "pairs":
        changed = replace(
            method, predict=lambda trainer, private, published: infer(trainer, published, int(which))
        )
        return _judging(run, taste, changed)
    if kind == "client":
        if which not in run.trainers.clients:
            more = (OWN, "prototype:K", "infer:N", "infer:FILE")
            raise RunError(f"{run.record.path}: {no_taste(which, run.clients, *more)}")
        # A hub has what the client told last, and not the pairs that tell it.
        z = server_taste(run, kind, which) if run.record.sites else run.model(which)[Z]
    elif kind == "file":
        posterior, told = taste_of_file(run, which)
        check_apart(run, told, judged, split)
        z = posterior.mean
    else:
        z = server_taste(run, kind, which)

    def other(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        return predict(trainer, private, published).replace({Z: z})

    return _judging(run, taste, replace(method, predict=other))


def _judging(run: LoadedRun, taste: str, method: Method) -> LoadedRun:
    return replace(run, job=replace(run.job, method=method), taste=taste)


def check_apart(
    run: LoadedRun, told: Pairs, judged: str | None, split: Literal["train", "validation", "test"]
) -> None:
    """Refuse to judge pairs that tell the taste with which they are judged: they hold their own answer.

    Args:
        told: the hashes of the pairs that told a taste, as :attr:`prefed.data.TokenSet.pairs` has them.
        judged: the file of the pairs to be judged; ``None`` for the clients' held-out pairs.
        split: ``"train"`` for their training pairs too.

    Raises:
        RunError: a pair is in both.
    """
    if judged is None:
        clients = run.trainers.dataset.clients.values()
        train = [own.train for own in clients if split == "train"]
        rows = np.concatenate([*train, *(rows for own in clients for rows in (own.validation, own.test))])
        count = int(np.isin(told, run.trainers.dataset.tokens.pairs[rows]).sum())
    else:
        with tempfile.TemporaryDirectory(prefix="prefed-judged-") as folder:
            pairs = read_pairs(run, judged, Path(folder), everyone=True).tokens.pairs
            count = int(np.isin(told, pairs).sum())
    if count:
        raise RunError(
            f"{count:,} of the {len(told):,} pairs that tell the taste are among those that it judges: they "
            "hold their own answer; take them out of one of the two"
        )


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
