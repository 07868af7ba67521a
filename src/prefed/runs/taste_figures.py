"""What clients of a run have as latent tastes, and whether these tastes say anything.

All of it is read on the clients' side: their pairs and their private states. Nothing of it is in a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch

from prefed.core import Key, Objective, Owner, State, Tensors
from prefed.core.wire import decode_state
from prefed.engines import ClientStates, Job
from prefed.engines.evaluation import pair_figures
from prefed.merge.tastes import active_units, summarize
from prefed.methods.base.tastes import POPULATION, Z
from prefed.methods.base.tastes import posteriors as kept_posteriors
from prefed.models import Backbone
from prefed.models.tastes import POSTERIOR, PROTOTYPES, trainable_share
from prefed.train.metrics.tastes import Array, kl_per_dimension, latent_map, transfer
from prefed.train.pair_trainer import PairTrainerFactory

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
        most: so many clients at most, drawn by the run's seed; ``None`` for all.

    Returns:
        ``None`` where no client has pairs enough.
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
    posteriors, population = [], []
    for client in clients:
        published = method.publish(server, client)
        models[client] = job.client_model(client, private(client), published, job.rounds)
        trainer = job.trainer(client, job.rounds, "predict")
        posteriors.append(summarize(*trainer.posteriors(models[client], goal)))
        population.append(published.tensors[POPULATION][Z])

    def accuracy(client: str, z: torch.Tensor) -> float:
        scores = job.trainers.score(client, models[client].replace({Z: z}), cast(Any, split))
        return pair_figures(job, scores)["preference_accuracy"]

    own = models[clients[0]]
    prototypes = own[PROTOTYPES].double().numpy() if PROTOTYPES in own else np.zeros((0, len(own[Z])))
    labels = cast("Mapping[str, int]", server.values.get("labels", {}))
    known = kept_posteriors(server)
    return TasteFigures(
        clients=tuple(clients),
        means=np.stack([posterior.mean.double().numpy() for posterior in posteriors]),
        log_variances=np.stack([posterior.log_variance.double().numpy() for posterior in posteriors]),
        accuracies=np.array([[accuracy(client, p.mean) for p in posteriors] for client in clients]),
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
        ``None`` where no client has pairs enough.
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
