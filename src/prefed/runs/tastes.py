"""Latent tastes of a run: their names, clients that judge by other tastes than their own, and metrics.

The metrics are computed on the clients' side, from their pairs and private states; no message contains them.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from prefed.align import KnownTastes
from prefed.core import ClientTrainer, Download, Key, Method, Objective, Owner, State, Tensors
from prefed.core.text import did_you_mean, listed
from prefed.core.wire import decode_state
from prefed.engines import ClientStates, Job
from prefed.engines.evaluation import pair_figures
from prefed.merge.tastes import Posterior, active_units, summarize
from prefed.methods.base.tastes import POPULATION, PROTOTYPES, Z, posteriors
from prefed.models import Backbone
from prefed.models.tastes import DECODER, POSTERIOR, trainable_share
from prefed.runs.build import response_encoder
from prefed.runs.loaded_run import EVERYBODY, LoadedRun, read_pairs
from prefed.runs.record import RunError
from prefed.train import PairTrainer
from prefed.train.metrics.tastes import Array, kl_per_dimension, latent_map, resultant, transfer
from prefed.train.pair_trainer import PairTrainerFactory

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


COLLAPSED_BELOW = 0.02
"""Tastes have collapsed where accuracy with own z is less than this above that with another's."""
MOST = 40
"""Clients whose tastes are told of a finished run at most: each one's pairs are judged with each one's z."""


@dataclass(frozen=True)
class TasteFigures:
    """The tastes of n clients, in the order of ``clients``, in d dimensions.

    Attributes:
        means: ``[n, d]`` μ̄, from training pairs.
        log_variances: ``[n, d]`` log σ̄².
        accuracies: ``[n, n]`` preference accuracy; row i has client i's pairs, column j client j's μ̄.
        population: ``[n]`` accuracy of each client's pairs with the taste that the server publishes.
        told: client → accuracy of its pairs with the μ̄ that the server has of it, for those that told one. It
            is of the last round's model or an earlier one. Alignments and ``--taste ID`` of policies take it.
        labels: client → its prototype; empty where there are none.
        prototypes: ``[M, d]``, or ``[0, d]``.
        trust: client → how much it trusts each other one of ``clients`` whose posterior is in its prior, 1 in
            sum over them; empty where there is no mixture.
        trainable_share: numbers that train over those of the frozen model.
        met: share of judged pairs that are among the training pairs of another one of ``clients``, whose z
            knows their label.
    """

    clients: tuple[str, ...]
    means: Array
    log_variances: Array
    accuracies: Array
    population: Array
    told: dict[str, float]
    labels: dict[str, int]
    prototypes: Array
    trust: dict[str, dict[str, float]]
    trainable_share: float
    met: float

    def plain(self) -> dict[str, Any]:
        """As JSON has it: the figures that tell whether z says anything, and a map of the μ̄ on a plane.

        ``collapsed`` is whether accuracy with own z is less than :data:`COLLAPSED_BELOW` above another's.
        A pull to prototypes makes units active without meaning: ``active_units`` alone proves nothing.
        """
        over = transfer(self.accuracies)
        plane, marks = latent_map(self.means, self.prototypes)
        return {
            "clients": list(self.clients),
            "own": over.own,
            "another": over.another,
            "population": float(self.population.mean()),
            "told": float(np.mean([*self.told.values()])) if self.told else None,
            "collapsed": over.another is not None and over.own - over.another < COLLAPSED_BELOW,
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
    """Infer clients' tastes from their training pairs, and judge all their pairs of ``split`` with each.

    Clients with fewer pairs than ``[privacy] minimum_pairs``, in either split, are left out.

    Args:
        job: of a method with tastes, after its last round.
        backbone: the model of the job's trainers.
        goal: the objective that the clients trained on.
        server: the server's state.
        private: client → its private state.
        most: at most this many clients, drawn by the run's seed; ``None`` for all.

    Returns:
        ``None`` where no client has enough pairs.
    """
    method, tells, sizes = job.method, job.privacy.may_report, job.trainers.clients
    clients = [
        client
        for client in job.evaluation_clients
        if client in job.weights and tells(sizes[client].train) and tells(getattr(sizes[client], split))
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
        told={client: accuracy(client, known[client].mean) for client in clients if client in known},
        labels={client: labels[client] for client in clients if client in labels},
        prototypes=prototypes,
        trust=_trust(job, server, private, clients),
        trainable_share=_share(job, backbone),
        met=_met(job, clients, split),
    )


def measured_tastes(job: Job, goal: Objective, server: State, states: ClientStates) -> dict[str, Any] | None:
    """The content of ``tastes.json``, rounded: see ``plain`` of :class:`TasteFigures`.

    Args:
        job: of a method with tastes, after its last round.
        states: clients' private states.

    Returns:
        ``None`` where no client has enough pairs.
    """
    backbone = cast(PairTrainerFactory, job.trainers).backbone

    def private(client: str) -> State:
        state = states.read(client)
        return job.method.init_client(job.trainers.initial, client) if state is None else decode_state(state)

    tastes = measure_tastes(job, backbone, goal, server, private, job.split, MOST)
    return None if tastes is None else _rounded(tastes.plain())


def _rounded(value: Any) -> Any:
    """Three digits of every number in ``value``: with all of them a map's point is a posterior's."""
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
    """The share of the pairs of ``split`` that another one of ``clients`` trains on."""
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
    """Client → how much it trusts each other one of ``clients``, from its private state."""
    trust: dict[str, dict[str, float]] = {}
    for client in clients if job.method.trust is not None else ():
        assert job.method.trust is not None
        weights = job.method.trust(private(client), server, client)
        others = {name: weights[name] for name in clients if name in weights}
        if total := sum(others.values()):
            trust[client] = {name: weight / total for name, weight in others.items()}
    return trust
