"""Latent tastes of a run: their names, evaluation with another taste than a client's own, and metrics.

The metrics need the pairs and private states of clients and are computed there; no message contains them.

The experiment file and all commands name a taste in the same way:

========================  ==========================================================================
``population``            the mean of the posteriors that clients sent, published by the server
``ID``                    the taste of the client with this ID
``prototype:K``           prototype number K, from 0
``infer:N``               inferred from N training pairs of a client, drawn with the seed
``infer:FILE``            inferred from the pairs in a file, e.g. of a new user, without training
========================  ==========================================================================
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from prefed.align import KnownTastes
from prefed.core import ClientTrainer, Download, Key, Method, Objective, Owner, State, Tensors, records
from prefed.core.text import did_you_mean, listed
from prefed.core.wire import decode_state
from prefed.engines import ClientStates, Job
from prefed.engines.tasks import pair_figures
from prefed.merge.posteriors import Posterior, active_units, summarize
from prefed.methods.base.tastes import POPULATION, PROTOTYPES, Z, posteriors
from prefed.models import Backbone
from prefed.models.config import DECODER, POSTERIOR
from prefed.models.tastes import trainable_share
from prefed.runs.finished_run import RunError
from prefed.runs.loaded_run import EVERYBODY, LoadedRun, read_pairs
from prefed.train.metrics.run_warnings import GAINS_FROM, SHARED_FROM
from prefed.train.metrics.tastes import Array, kl_per_dimension, latent_map, resultant, transfer
from prefed.train.pair_trainer import PairTrainerFactory

Kind = Literal["population", "client", "prototype", "pairs", "file"]
Pairs = npt.NDArray[np.uint64]

OWN = "own"
"""Name of each client's own taste, where clients are evaluated."""
OPPOSED = 0.5
"""Below this :func:`common_taste`, clients' tastes oppose each other and their mean is not meaningful."""
_log = logging.getLogger("prefed")


def split_taste(name: str) -> tuple[Kind, str]:
    """Parse the name of a taste into its kind and the client, number or file.

    Raises:
        ValueError: the number is invalid, or the file does not exist.

    >>> [split_taste(name) for name in ("population", "ward-7", "prototype:1", "infer:8")]
    [('population', ''), ('client', 'ward-7'), ('prototype', '1'), ('pairs', '8')]
    """
    kind, _, rest = name.partition(":")
    if name == "population":
        return "population", ""
    if kind == "prototype":
        if not rest.isdecimal():
            raise ValueError(f"taste {name!r}: give the number of a prototype, e.g. prototype:0")
        return "prototype", rest
    if kind != "infer":
        return "client", name
    if rest.isdecimal() and int(rest):
        return "pairs", rest
    if not rest or not Path(rest).expanduser().exists():
        raise ValueError(
            f"taste {name!r}: give a number of pairs, at least 1, or an existing file of pairs, e.g. infer:8"
        )
    return "file", rest


def read_taste(run: LoadedRun, name: str) -> tuple[Kind, str]:
    """Call :func:`split_taste`, and warn if a client has the same name as another kind of taste."""
    if name == "population" or name.startswith(("prototype:", "infer:")):
        warn_of_namesake(run, name)
    return split_taste(name)


def warn_of_namesake(run: LoadedRun, name: str) -> None:
    """Warn if a client has the reserved name of a taste, so that its own taste cannot be named."""
    if name in run.trainers.clients:
        _log.warning(
            "%s: %r is the name of a client and of a reserved taste; using the reserved taste. Rename the "
            "client to use its taste",
            run.record.path,
            name,
        )


def needs_pairs(name: str | None) -> bool:
    """Whether the taste of this name is inferred from pairs of the run.

    >>> needs_pairs("infer:8"), needs_pairs("ward-7"), needs_pairs(None)
    (True, False, False)
    """
    return name is not None and split_taste(name)[0] == "pairs"


def is_one_taste(name: str | None) -> bool:
    """Whether all clients use the same taste under this name.

    >>> is_one_taste("ward-7"), is_one_taste("infer:8"), is_one_taste("own"), is_one_taste(None)
    (True, False, False, False)
    """
    return name is not None and name != OWN and not needs_pairs(name)


def check_tastes(run: LoadedRun) -> None:
    """Check that the method of a run has latent tastes.

    Raises:
        RunError: it has none.
    """
    if not run.method.tastes:
        raise RunError(f"{run.record.path}: method {run.method.name} has no latent tastes")


def known_tastes(run: LoadedRun) -> KnownTastes:
    """Return the tastes that the server of a run knows; for a client, the posterior that it sent last.

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


def published_taste(run: LoadedRun, name: str) -> torch.Tensor:
    """Return the taste of this name, ``[d_z]``, from what the server knows; reads no pair.

    Raises:
        RunError: the method has no tastes, there is no such client or prototype, the client sent no
            posterior, or the taste can only be inferred from pairs.
        ValueError: as :func:`split_taste`.
    """
    return server_taste(run, *read_taste(run, name))


def server_taste(
    run: LoadedRun, kind: Kind, which: str, known: KnownTastes | None = None, *, pairs: bool = False
) -> torch.Tensor:
    """As :func:`published_taste`, for a name that is parsed already.

    Args:
        known: defaults to :func:`known_tastes`.
        pairs: the caller can also infer a taste from pairs; error messages then suggest it.
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
                f"{where}: client {which!r} sent no taste: it never took part, or has fewer pairs than "
                f"[privacy] minimum_pairs; {instead}"
            )
        return known.posteriors[which][0]
    if kind == "prototype":
        if int(which) >= len(known.prototypes):
            count = len(known.prototypes)
            there = f"{count} prototypes, numbered from 0" if count else "no prototypes"
            raise RunError(f"{where}: no taste 'prototype:{which}': the run has {there}")
        return known.prototypes[int(which)]
    raise RunError(
        f"{where}: the server has no pairs for 'infer:{which}'; name population, a client or a prototype"
    )


def no_taste(name: str, clients: Collection[str], *more: str) -> str:
    """Format the error for an unknown taste.

    Args:
        clients: those whose tastes can be named.
        more: other valid names besides ``population``.

    >>> no_taste("ward7", ["ward-7", "clinic"], "infer:FILE")
    "no taste is called 'ward7'; did you mean 'ward-7'? A taste is the ID of a client, population, infer:FILE"
    """
    tastes = ["population", *more]
    hint = did_you_mean(name, [*clients, *tastes], most=3) or f"; {_clients_with_tastes(clients)}."
    return f"no taste is called {name!r}{hint} A taste is the ID of a client, {', '.join(tastes)}"


def _clients_with_tastes(clients: Collection[str]) -> str:
    return f"clients with a taste: {listed(sorted(clients))}" if clients else "no client sent a taste"


def any_taste(
    run: LoadedRun, name: str, client: str | None = None, known: KnownTastes | None = None
) -> torch.Tensor:
    """Return the taste of this name, ``[d_z]``: one that the server knows, or one inferred from pairs.

    Args:
        run: loaded with its data for ``infer:N``.
        client: owner of the pairs of ``infer:N``.
        known: as for :func:`server_taste`.

    Raises:
        ValueError: ``infer:N`` without a client, or another taste with a client.
        RunError, DataError: as :func:`published_taste` and :func:`taste_of_file`.
    """
    kind, which = read_taste(run, name)
    if (kind == "pairs") != (client is not None):
        raise ValueError(
            f"taste {name!r} needs a client, whose pairs are used: add --client ID"
            if client is None
            else f"--client {client!r} can only be used with --taste infer:N, not with {name!r}; leave it out"
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
    """Infer a posterior from the pairs in a file; also return the hashes of these pairs.

    The pairs are read with the ``[data]`` settings of the run and attributed to one person.

    Raises:
        RunError: the method has no tastes.
        DataError: the file cannot be used.
    """
    check_tastes(run)
    experiment = run.experiment
    with tempfile.TemporaryDirectory(prefix="prefed-taste-") as folder:
        new = read_pairs(run, file, Path(folder), everyone=True)
        trainer = run.pair_trainer(new.tokens)
        goal, key = experiment.method.settings.goal(), Key(experiment.seed).at("contexts").at("file")
        found = trainer.scorer.posteriors(run.published_model, goal, new.rows[EVERYBODY], key)
        pairs = np.array(new.tokens.pairs)
    return summarize(*found), pairs


def common_taste(run: LoadedRun) -> float:
    """Measure how far the tastes known to the server agree: 1 if they are equal, 0 if they cancel out.

    A reward is w(z)·e with w affine, so the reward of the population is the mean of the clients' rewards. The
    measure is the :func:`~prefed.train.metrics.tastes.resultant` of the w(μ̄). It is 1 if the method has no
    tastes or the server knows none.
    """
    if not run.method.tastes or run.experiment.model.variational.decoder != "conditioned":
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
    """Return ``run`` with all clients, including those that never took part, predicting with this taste.

    Args:
        run: loaded with its data.
        taste: ``"own"``, or a name as in the table above. The taste of a client is inferred from its
            training pairs; at the hub of a federation it is the one that the client sent last. ``infer:8``
            uses 8 training pairs of each client, drawn with the seed.
        judged: the file of the evaluated pairs; ``None`` for those of the run.
        split: the evaluated split of the run's own pairs.

    Raises:
        RunError: the method has no tastes, there is no such client or prototype, a file for ``infer:FILE``
            has evaluated pairs, or the taste needs pairs that are stored at the sites of a federation.
        ValueError: as :func:`split_taste`.
        DataError: the file of pairs cannot be used.
    """
    check_tastes(run)
    if run.record.sites and (taste == OWN or needs_pairs(taste)):
        raise RunError(
            f"{run.record.path}: taste {taste!r} needs pairs that are stored at the sites of the run; use "
            "population, the ID of a client, prototype:K or infer:FILE"
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
        # A hub has the posterior that the client sent last, but not its pairs.
        z = server_taste(run, kind, which) if run.record.sites else run.model(which)[Z]
    elif kind == "file":
        posterior, used = taste_of_file(run, which)
        check_apart(run, used, judged, split)
        z = posterior.mean
    else:
        z = server_taste(run, kind, which)

    def other(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        return predict(trainer, private, published).replace({Z: z})

    return _judging(run, taste, replace(method, predict=other))


def _judging(run: LoadedRun, taste: str, method: Method) -> LoadedRun:
    return replace(run, job=replace(run.job, method=method), taste=taste)


def check_apart(
    run: LoadedRun, used: Pairs, judged: str | None, split: Literal["train", "validation", "test"]
) -> None:
    """Check that no evaluated pair was used to infer the taste, which would leak its label.

    Args:
        used: hashes of the pairs that the taste was inferred from, as in :attr:`prefed.data.TokenSet.pairs`.
        judged: the file of the evaluated pairs; ``None`` for the held-out pairs of the clients.
        split: ``"train"`` includes their training pairs.

    Raises:
        RunError: a pair is in both.
    """
    if judged is None:
        clients = run.trainers.dataset.clients.values()
        train = [own.train for own in clients if split == "train"]
        rows = np.concatenate([*train, *(rows for own in clients for rows in (own.validation, own.test))])
        count = int(np.isin(used, run.trainers.dataset.tokens.pairs[rows]).sum())
    else:
        with tempfile.TemporaryDirectory(prefix="prefed-judged-") as folder:
            pairs = read_pairs(run, judged, Path(folder), everyone=True).tokens.pairs
            count = int(np.isin(used, pairs).sum())
    if count:
        raise RunError(
            f"{count:,} of the {len(used):,} pairs that the taste is inferred from are also evaluated, which "
            "leaks their labels; remove them from one of the two sets"
        )


def read_tastes(run: LoadedRun, split: Literal["train", "validation", "test"] = "test") -> TasteFigures:
    """Call :func:`measure_tastes` on a finished run that was loaded with its data.

    Raises:
        RunError: the method has no tastes, or no client has enough pairs.
    """
    check_tastes(run)
    goal = run.experiment.method.settings.goal()
    tastes = measure_tastes(run.job, run.backbone, goal, run.server, run.private_state, split)
    if tastes is None:
        raise RunError(
            f"{run.record.path}: no client has enough pairs in the training and the {split} split (at least "
            "[privacy] minimum_pairs in each)"
        )
    return tastes


MOST = 40
"""Most clients in ``tastes.json``; the cost grows with the square, since all pairs are scored with each z."""


@dataclass(frozen=True)
class TasteFigures:
    """The tastes of n clients, in the order of ``clients``, in d dimensions.

    Attributes:
        means: ``[n, d]``, μ̄ from training pairs.
        log_variances: ``[n, d]``, log σ̄².
        accuracies: ``[n, n]``, preference accuracy on the pairs of client i (row) with the μ̄ of client j
            (column).
        population: ``[n]``, accuracy on the pairs of each client with the taste of the population.
        sent: client → accuracy on its pairs with the μ̄ that it sent last, which may come from an earlier
            round's model. Alignments and ``--taste ID`` of policies use this μ̄.
        labels: client → its prototype; empty without prototypes.
        prototypes: ``[M, d]``, or ``[0, d]``.
        trust: client → weight of each other one of ``clients`` in its prior, with sum 1; empty without a
            mixture prior.
        trainable_share: number of trainable parameters over that of the frozen model.
        met: share of evaluated pairs that are also training pairs of another one of ``clients``, so that its
            z depends on their label.
    """

    clients: tuple[str, ...]
    means: Array
    log_variances: Array
    accuracies: Array
    population: Array
    sent: dict[str, float]
    labels: dict[str, int]
    prototypes: Array
    trust: dict[str, dict[str, float]]
    trainable_share: float
    met: float

    def plain(self) -> records.Tastes:
        """Convert to JSON values: metrics on whether z is informative, and a map of the μ̄ on a plane.

        ``collapsed``: own z gains less than :data:`GAINS_FROM` over other z, and its accuracy is below
        :data:`SHARED_FROM`. A high ``active_units`` is not evidence by itself: the
        pull towards prototypes also activates units.
        """
        over = transfer(self.accuracies)
        plane, marks = latent_map(self.means, self.prototypes)
        return {
            "clients": list(self.clients),
            "own": over.own,
            "another": over.another,
            "population": float(self.population.mean()),
            "sent": float(np.mean([*self.sent.values()])) if self.sent else None,
            "collapsed": over.another is not None
            and over.own - over.another < GAINS_FROM
            and over.own < SHARED_FROM,
            "accuracies": self.accuracies.tolist(),
            "active_units": active_units(self.means),
            "kl_per_dimension": kl_per_dimension(self.means, self.log_variances).tolist(),
            "map": {
                "clients": plane.points.tolist(),
                "prototypes": marks.tolist(),
                "shares": list(plane.shares),
            },
            "prototypes": self.labels,
            "trust": self.trust,
            "trainable_share": self.trainable_share,
            "met": self.met,
        }


def measure_tastes(
    job: Job,
    backbone: Backbone,
    goal: Objective,
    server: State,
    private: Callable[[str], State],
    split: Literal["train", "validation", "test"],
    most: int | None = None,
) -> TasteFigures | None:
    """Infer the taste of each client from its training pairs, and evaluate all pairs of ``split`` with each.

    Clients with fewer pairs than ``[privacy] minimum_pairs``, in either split, are left out.

    Args:
        job: a job after its last round, whose method has tastes.
        backbone: the model of the job's trainers.
        goal: the objective that the clients trained on.
        private: client → its private state.
        most: at most this many clients, drawn with the seed; ``None`` for all.

    Returns:
        ``None`` if no client has enough pairs.
    """
    method, may_report, sizes = job.method, job.privacy.may_report, job.trainers.clients
    clients = [
        client
        for client in job.evaluation_clients
        if client in job.weights
        and may_report(sizes[client].train)
        and may_report(getattr(sizes[client], split))
    ]
    if not clients:
        return None
    if most is not None and len(clients) > most:
        drawn = Key(job.seed).at("tastes").numpy().choice(len(clients), most, replace=False)
        clients = [clients[index] for index in sorted(drawn)]
    models: dict[str, Tensors] = {}
    inferred, population = [], []
    for client in clients:
        published = method.publish(server, client)
        models[client] = job.client_model(client, private(client), published, job.rounds)
        trainer = job.trainer(client, job.rounds, "predict")
        inferred.append(summarize(*trainer.posteriors(models[client], goal)))
        population.append(published.tensors[POPULATION][Z])

    def accuracy(client: str, z: torch.Tensor) -> float:
        scores = job.trainers.score(client, models[client].replace({Z: z}), cast(Any, split))
        return pair_figures(job, scores)["preference_accuracy"]

    own = models[clients[0]]
    prototypes = own[PROTOTYPES].double().numpy() if PROTOTYPES in own else np.zeros((0, len(own[Z])))
    labels = cast("Mapping[str, int]", server.values.get("labels", {}))
    known = posteriors(server)
    return TasteFigures(
        clients=tuple(clients),
        means=np.stack([posterior.mean.double().numpy() for posterior in inferred]),
        log_variances=np.stack([posterior.log_variance.double().numpy() for posterior in inferred]),
        accuracies=np.array([[accuracy(client, p.mean) for p in inferred] for client in clients]),
        population=np.array([accuracy(client, z) for client, z in zip(clients, population, strict=True)]),
        sent={client: accuracy(client, known[client].mean) for client in clients if client in known},
        labels={client: labels[client] for client in clients if client in labels},
        prototypes=prototypes,
        trust=_trust(job, server, private, clients),
        trainable_share=_share(job, backbone),
        met=_met(job, clients, split),
    )


def measured_tastes(job: Job, goal: Objective, server: State, states: ClientStates) -> dict[str, Any] | None:
    """Return the content of ``tastes.json``, rounded; see :func:`measure_tastes`."""
    backbone = cast(PairTrainerFactory, job.trainers).backbone

    def private(client: str) -> State:
        state = states.read(client)
        return job.method.init_client(job.trainers.initial, client) if state is None else decode_state(state)

    tastes = measure_tastes(job, backbone, goal, server, private, job.evaluate.split, MOST)
    return None if tastes is None else _rounded(tastes.plain())


def _rounded(value: Any) -> Any:
    """Round numbers to three digits: at full precision, the points of the map reveal posteriors."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _share(job: Job, backbone: Backbone) -> float:
    owned = (backbone.layout[name] for name in job.method.ownership.names(Owner.SHARED, Owner.PERSONAL))
    weights = backbone.causal.named_parameters()
    frozen = sum(weight.numel() for name, weight in weights if ".lora_" not in name)
    return trainable_share((entry for entry in owned if entry.part != POSTERIOR), frozen)


def _met(job: Job, clients: Sequence[str], split: str) -> float:
    """Share of the pairs of ``split`` that another one of ``clients`` trains on."""
    dataset = cast(PairTrainerFactory, job.trainers).dataset
    pairs, owned = dataset.tokens.pairs, {client: dataset.clients[client] for client in clients}
    train = {client: pairs[data.train] for client, data in owned.items()}
    met = []
    for client, data in owned.items():
        others = np.concatenate([pairs[:0], *(train[other] for other in clients if other != client)])
        met.append(np.isin(pairs[getattr(data, split)], others))
    return float(np.concatenate(met).mean())


def _trust(
    job: Job, server: State, private: Callable[[str], State], clients: Sequence[str]
) -> dict[str, dict[str, float]]:
    trust: dict[str, dict[str, float]] = {}
    if job.method.trust is None:
        return trust
    for client in clients:
        weights = job.method.trust(private(client), server, client)
        others = {name: weights[name] for name in clients if name in weights}
        if total := sum(others.values()):
            trust[client] = {name: weight / total for name, weight in others.items()}
    return trust
