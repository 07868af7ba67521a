"""Latent tastes by name, and finished runs whose clients judge by other tastes than their own.

One way to write a taste serves the experiment file and all commands:

========================  ==========================================================================
``population``            the mean of what the clients sent, which the server publishes
``ID``                    the client of this id
``prototype:K``           the prototype of number K, from 0
``infer:N``               inferred from N training pairs of a client, drawn by the seed
``infer:FILE``            inferred from the pairs of a file, such as a new user's; nothing trains
========================  ==========================================================================
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from prefed.align import KnownTastes
from prefed.core import ClientTrainer, Download, Key, Method, State, Tensors
from prefed.core.text import did_you_mean, listed
from prefed.merge.tastes import Posterior, summarize
from prefed.methods.base.tastes import POPULATION, PROTOTYPES, Z, posteriors
from prefed.models.tastes import DECODER
from prefed.runs.build import response_encoder
from prefed.runs.loaded import EVERYBODY, LoadedRun, read_pairs
from prefed.runs.record import RunError
from prefed.runs.taste_figures import TasteFigures, measure_tastes
from prefed.train import PairTrainer
from prefed.train.metrics.tastes import resultant

Kind = Literal["population", "client", "prototype", "pairs", "file"]
Pairs = npt.NDArray[np.uint64]

OWN = "own"
"""Each client's own taste: where clients judge, a taste can be called so too."""
OPPOSED = 0.5
"""Where what the clients' tastes add up to is a smaller share than this, their mean is nobody's taste."""
_log = logging.getLogger("prefed")


def split_taste(name: str) -> tuple[Kind, str]:
    """What kind of taste a name stands for, and which one.

    Raises:
        ValueError: the number of pairs or of the prototype is none, or there is no such file.

    >>> [split_taste(name) for name in ("population", "ward-7", "prototype:1", "infer:8")]
    [('population', ''), ('client', 'ward-7'), ('prototype', '1'), ('pairs', '8')]
    """
    kind, _, rest = name.partition(":")
    if name == "population":
        return "population", ""
    if kind == "prototype":
        if not rest.isdecimal():
            raise ValueError(f"taste {name!r}: after the colon comes a prototype's number, 0 or more")
        return "prototype", rest
    if kind != "infer":
        return "client", name
    if rest.isdecimal() and int(rest):
        return "pairs", rest
    if not rest or not Path(rest).expanduser().exists():
        raise ValueError(
            f"taste {name!r}: after the colon comes a number of pairs, 1 or more, or a file of pairs that is "
            "there"
        )
    return "file", rest


def read_taste(run: LoadedRun, name: str) -> tuple[Kind, str]:
    """As :func:`split_taste`, and a warning where a client has such a name too: it is not the one meant."""
    if name == "population" or name.startswith(("prototype:", "infer:")):
        warn_of_namesake(run, name)
    return split_taste(name)


def warn_of_namesake(run: LoadedRun, name: str) -> None:
    """Warn where a client is called as a taste is that is not its own, so that no taste's name means it."""
    if name in run.trainers.clients:
        _log.warning(
            "%s: the client %r is shadowed: the taste of that name is not this client's; rename the client "
            "to ask for its taste",
            run.record.path,
            name,
        )


def needs_pairs(name: str | None) -> bool:
    """Whether a taste of that name comes from the run's own pairs.

    >>> needs_pairs("infer:8"), needs_pairs("ward-7"), needs_pairs(None)
    (True, False, False)
    """
    return name is not None and split_taste(name)[0] == "pairs"


def is_one_taste(name: str | None) -> bool:
    """Whether all clients judge alike by a taste of that name, which is not each client's own.

    >>> is_one_taste("ward-7"), is_one_taste("infer:8"), is_one_taste("own"), is_one_taste(None)
    (True, False, False, False)
    """
    return name is not None and name != OWN and not needs_pairs(name)


def check_tastes(run: LoadedRun) -> None:
    """Refuse a run whose models have no latent taste.

    Raises:
        RunError: its method has none.
    """
    if run.method.infer is None:
        raise RunError(f"{run.record.path}: the clients of {run.method.name} have no latent taste")


def known_tastes(run: LoadedRun) -> KnownTastes:
    """What the run's server was told of tastes; a client's is the posterior that it sent last.

    Raises:
        RunError: the method has no tastes.
    """
    check_tastes(run)
    population, labels = run.server.tensors[POPULATION][Z], run.server.values.get("labels", {})
    prototypes = run.server.tensors["model"].get(PROTOTYPES)
    return KnownTastes(
        population,
        {client: (own.mean, own.log_variance) for client, own in posteriors(run.server).items()},
        torch.zeros(0, len(population)) if prototypes is None else prototypes,
        cast("dict[str, int]", labels),
    )


def told_taste(run: LoadedRun, name: str, known: KnownTastes | None = None) -> torch.Tensor:
    """``[d_z]`` the taste of that name, of those that the server knows: no pair is read.

    Args:
        known: what the server was told; left out: :func:`known_tastes`.

    Raises:
        RunError: the method has no tastes; there is no such client or prototype; the client sent no
            posterior; or the taste would have to be inferred from pairs.
        ValueError: see :func:`split_taste`.
    """
    return server_taste(run, *read_taste(run, name), known)


def server_taste(
    run: LoadedRun, kind: Kind, which: str, known: KnownTastes | None = None, *, pairs: bool = False
) -> torch.Tensor:
    """``[d_z]`` a taste that the server knows, by its kind and which one; see :func:`told_taste`.

    Args:
        pairs: the caller can infer a taste from pairs too. A refusal then says how.

    Raises:
        RunError: as :func:`told_taste`.
    """
    known = known_tastes(run) if known is None else known
    where = run.record.path
    if kind == "population":
        return known.population
    if kind == "client":
        if which not in run.trainers.clients:
            more = ("prototype:K", *(("infer:FILE", "infer:N with --client ID") if pairs else ()))
            raise RunError(f"{where}: {no_taste(which, known.posteriors, *more)}")
        if which not in known.posteriors:
            instead = _clients_with_tastes(known.posteriors)
            if pairs:
                instead = f"infer a taste from pairs: infer:FILE, or infer:8 with --client {which!r}"
            raise RunError(
                f"{where}: client {which!r} told nothing of its taste: it never took part, or has fewer "
                f"pairs than [privacy] minimum_pairs; {instead}"
            )
        return known.posteriors[which][0]
    if kind == "prototype":
        if int(which) >= len(known.prototypes):
            count = len(known.prototypes)
            there = f"{count} prototypes, numbered from 0" if count else "no prototypes"
            raise RunError(f"{where} has {there}: there is no taste 'prototype:{which}'")
        return known.prototypes[int(which)]
    raise RunError(
        f"{where}: the server has no pairs to infer 'infer:{which}' from; name a taste that it was told"
    )


def no_taste(name: str, clients: Collection[str], *more: str) -> str:
    """Say that no client has a name, which is no other taste either, and which ones there are.

    Args:
        clients: those whose tastes can be named.
        more: further tastes that can.

    >>> no_taste("ward7", ["ward-7", "clinic"], "infer:FILE")
    "no client is called 'ward7'; did you mean 'ward-7'? A taste is a client's id, population, infer:FILE"
    """
    tastes = ["population", *more]
    hint = did_you_mean(name, [*clients, *tastes], most=3) or f"; {_clients_with_tastes(clients)}."
    return f"no client is called {name!r}{hint} A taste is a client's id, {', '.join(tastes)}"


def _clients_with_tastes(clients: Collection[str]) -> str:
    names = sorted(clients)
    shown = listed(names)
    return f"the clients with a taste are {shown}" if names else "no client told a taste"


def any_taste(
    run: LoadedRun, name: str, client: str | None = None, known: KnownTastes | None = None
) -> torch.Tensor:
    """``[d_z]`` the taste of that name, told or inferred from pairs.

    Args:
        run: loaded with its data for ``infer:N``.
        client: whose pairs ``infer:N`` takes.
        known: as :func:`told_taste` takes it.

    Raises:
        ValueError: ``infer:N`` without a client, or a client with another taste.
        RunError, DataError: as :func:`told_taste` and :func:`taste_of_file`.
    """
    kind, which = read_taste(run, name)
    if (kind == "pairs") != (client is not None):
        raise ValueError(
            f"taste {name!r}: whose pairs? name a client, --client ID"
            if client is None
            else f"--client {client!r} belongs to infer:N, whose pairs it names; taste {name!r} takes none"
        )
    if kind == "file":
        return taste_of_file(run, which)[0].mean
    if client is None:
        return server_taste(run, kind, which, known, pairs=True)
    check_tastes(run)
    infer = run.method.infer
    assert infer is not None
    trainer = run.job.trainer(run.check(client), run.reader.commit.round, "predict")
    return infer(trainer, run.published(client), int(which))[Z]


def taste_of_file(run: LoadedRun, file: str) -> tuple[Posterior, Pairs]:
    """The posterior after the pairs of a file, as after those of a client, and the hashes of these pairs.

    The pairs are read by the run's ``[data]`` settings, and are all taken to be one person's.

    Raises:
        RunError: the method has no tastes.
        DataError: the file cannot be used.
    """
    check_tastes(run)
    experiment = run.experiment
    with tempfile.TemporaryDirectory(prefix="prefed-taste-") as folder:
        new = read_pairs(run, file, Path(folder), everyone=True)
        trainer = PairTrainer(
            run.backbone,
            new.tokens,
            max_tokens=experiment.engine.max_tokens,
            fast=experiment.model.fast,
            responses=response_encoder(experiment, run.backbone),
        )
        goal, key = experiment.method.settings.goal(), Key(experiment.seed).at("contexts").at("file")
        found = trainer.posteriors(run.published_model, goal, new.rows[EVERYBODY], key)
        pairs = np.array(new.tokens.pairs)
    return summarize(*found), pairs


def common_taste(run: LoadedRun) -> float:
    """How far the clients' tastes agree, as the server can tell: 1 where they do, 0 where they cancel.

    A reward is w(z)·e with w affine. So the population's reward is the mean of the clients', and it has
    :func:`~prefed.train.metrics.tastes.resultant` of the w(μ̄) as its share of what it were if all pointed
    one way. It is 1 where the method has no tastes or the server knows none.
    """
    if run.method.infer is None or run.experiment.model.variational.decoder != "conditioned":
        return 1.0
    means = [mean for mean, _ in known_tastes(run).posteriors.values()]
    if not means:
        return 1.0
    model = run.server.tensors["model"]
    return resultant(F.linear(torch.stack(means), *(model[name] for name in DECODER)).numpy())


def at_taste(
    run: LoadedRun,
    taste: str,
    judged: str | None = None,
    split: Literal["train", "validation", "test"] = "test",
) -> LoadedRun:
    """``run`` with clients that judge by this taste, those that never took part too.

    Args:
        run: loaded with its data.
        taste: ``"own"``, or a name of :mod:`prefed.runs.tastes`. A client's taste is what its training
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
