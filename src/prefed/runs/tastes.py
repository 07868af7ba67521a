"""What a finished run's clients have as tastes, and whether these tastes say anything.

All of it is read on the clients' side: their pairs and their private states. Nothing of it is in a message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from prefed.core import ClientTrainer, Download, Method, Owner, State, Tensors
from prefed.engines.evaluation import pair_figures
from prefed.merge.posteriors import summarize
from prefed.methods.base.tastes import Z
from prefed.metrics.latent import Array, active_units, kl_per_dimension, latent_map, transfer
from prefed.models.variational import POSTERIOR, PROTOTYPES, trainable_share
from prefed.runs.loaded import LoadedRun
from prefed.runs.record import RunError
from prefed.runs.taste_names import check_apart, check_tastes, split_taste, taste_of_file, told_taste

NO_TASTE = 0.02
"""Where accuracy with own z is not this much above that with another's, z says nothing of its client."""


@dataclass(frozen=True)
class Tastes:
    """The tastes of n clients, in the order of ``clients``, in d dimensions.

    Attributes:
        means: ``[n, d]`` μ̄, from training pairs.
        log_variances: ``[n, d]`` log σ̄².
        accuracies: ``[n, n]`` preference accuracy; row i has client i's pairs, column j client j's μ̄.
        population: ``[n]`` accuracy of each client's pairs with the taste that the server publishes.
        labels: client → its prototype; empty where there are none.
        prototypes: ``[M, d]``, or ``[0, d]``.
        trust: client → how much it trusts each other client, 1 in sum; empty where there is no mixture.
        trainable_share: numbers that train over those of the frozen model.
    """

    clients: tuple[str, ...]
    means: Array
    log_variances: Array
    accuracies: Array
    population: Array
    labels: dict[str, int]
    prototypes: Array
    trust: dict[str, dict[str, float]]
    trainable_share: float

    def plain(self) -> dict[str, Any]:
        """As JSON has it: the figures that tell whether z says anything, and a map of the μ̄ on a plane.

        ``collapsed`` is whether accuracy with own z is less than :data:`NO_TASTE` above that with another's.
        A pull to prototypes makes units active without meaning: ``active_units`` alone proves nothing.
        """
        over = transfer(self.accuracies)
        plane, marks = latent_map(self.means, self.prototypes)
        return {
            "clients": list(self.clients),
            "own": over.own,
            "another": over.another,
            "population": float(self.population.mean()),
            "collapsed": over.another is not None and over.own - over.another < NO_TASTE,
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
        }


def at_taste(run: LoadedRun, taste: str, judged: str | None = None) -> LoadedRun:
    """``run`` with clients that judge by another taste than their own.

    Args:
        run: loaded with its data.
        taste: ``"own"``, or a name of :mod:`prefed.runs.taste_names`. A client's taste is what its training
            pairs tell; ``infer:8`` is for each client what the first 8 of its own training pairs tell.
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


def read_tastes(run: LoadedRun, split: Literal["train", "validation", "test"] = "test") -> Tastes:
    """Infer every client's taste from its training pairs, and judge all clients' pairs of ``split`` with it.

    Clients with fewer pairs than ``[privacy] minimum_pairs``, in either split, are left out.

    Args:
        run: loaded with its data.

    Raises:
        RunError: the run's method has no tastes, or no client can be evaluated.
    """
    method, job, last = run.method, run.job, run.reader.commit.round
    check_tastes(run)
    tells, sizes = job.privacy.may_report, run.trainers.clients
    clients = [
        client
        for client in job.evaluation_clients
        if client in job.weights and tells(sizes[client].train) and tells(getattr(sizes[client], split))
    ]
    if not clients:
        raise RunError(f"{run.record.path}: no client has pairs enough to train on and in the {split} split")
    goal = run.experiment.method.settings.goal()
    models: dict[str, Tensors] = {}
    posteriors, population = [], []
    for client in clients:
        published = method.publish(run.server, client)
        models[client] = job.client_model(client, run.private_state(client), published, last)
        trainer = job.trainer(client, last, "predict")
        posteriors.append(summarize(*trainer.posteriors(models[client], goal)))
        population.append(published.tensors["taste"][Z])

    def accuracy(client: str, z: torch.Tensor) -> float:
        scores = run.trainers.score(client, models[client].replace({Z: z}), split)
        return pair_figures(job, scores)["preference_accuracy"]

    own = models[clients[0]]
    prototypes = own[PROTOTYPES].double().numpy() if PROTOTYPES in own else np.zeros((0, len(own[Z])))
    labels = run.server.values.get("labels", {})
    assert isinstance(labels, dict)
    return Tastes(
        clients=tuple(clients),
        means=np.stack([posterior.mean.double().numpy() for posterior in posteriors]),
        log_variances=np.stack([posterior.log_variance.double().numpy() for posterior in posteriors]),
        accuracies=np.array([[accuracy(client, p.mean) for p in posteriors] for client in clients]),
        population=np.array([accuracy(client, z) for client, z in zip(clients, population, strict=True)]),
        labels={client: int(str(label)) for client, label in labels.items()},
        prototypes=prototypes,
        trust=_trust(run, clients),
        trainable_share=_share(run),
    )


def _share(run: LoadedRun) -> float:
    layout = run.backbone.layout
    entries = (layout[name] for name in run.method.ownership.names(Owner.SHARED, Owner.PERSONAL))
    weights = run.backbone.causal.named_parameters()
    frozen = sum(weight.numel() for name, weight in weights if ".lora_" not in name)
    return trainable_share((entry for entry in entries if entry.part != POSTERIOR), frozen)


def _trust(run: LoadedRun, clients: list[str]) -> dict[str, dict[str, float]]:
    """Client → how much it trusts each of the others, from its private state."""
    trust: dict[str, dict[str, float]] = {}
    for client in clients if run.method.trust is not None else ():
        assert run.method.trust is not None
        weights = dict(zip(run.job.members, run.method.trust(run.private_state(client)), strict=False))
        others = {name: weight for name, weight in weights.items() if name != client}
        if total := sum(others.values()):
            trust[client] = {name: weight / total for name, weight in others.items()}
    return trust
