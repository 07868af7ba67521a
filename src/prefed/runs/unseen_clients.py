"""Clients that do not train: those held back to evaluate newcomers, and those that the data exclude."""

from __future__ import annotations

from prefed.config import ConfigError, Experiment
from prefed.core import Key
from prefed.data import FederatedDataset


def unseen_clients(experiment: Experiment, dataset: FederatedDataset) -> tuple[str, ...]:
    """Return the clients that never train: those named in the settings, or a number drawn with the seed."""
    unseen, names = experiment.evaluate.unseen, sorted(dataset.clients)
    if not isinstance(unseen, int):
        return tuple(sorted({*unseen} - {*experiment.data.exclude}))
    if unseen >= len(names):
        raise ConfigError(f"[evaluate] unseen = {unseen}, but there are only {len(names)} clients; lower it")
    draw = Key(experiment.seed).at("unseen").numpy().choice(len(names), unseen, replace=False)
    return tuple(names[index] for index in sorted(draw))


def absent_clients(experiment: Experiment, dataset: FederatedDataset) -> tuple[str, ...]:
    """Return the excluded clients that would train; a number of unseen clients is drawn without them."""
    unseen = experiment.evaluate.unseen
    others = {*dataset.clients, *(() if isinstance(unseen, int) else unseen)}
    return tuple(sorted({*experiment.data.exclude} - others))
