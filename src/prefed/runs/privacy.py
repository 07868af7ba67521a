"""What an experiment will spend of its clients' privacy, before it is run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from prefed.config import ConfigError, Experiment
from prefed.core import Key
from prefed.engines.job import draw_cohort
from prefed.privacy import Guarantee, guarantee_of


@dataclass(frozen=True)
class Plan:
    """What a run promises.

    Attributes:
        guarantee: of one release.
        releases: how often the client that takes part most will give something away.
        delta: δ of ``[privacy]``.
    """

    guarantee: Guarantee
    releases: int
    delta: float

    def epsilon(self) -> float | None:
        """ε after the last round; ``None`` without noise."""
        return self.guarantee.epsilon(self.releases, self.delta)

    def noise_for(self, epsilon: float) -> float:
        """The least ``noise_multiplier`` with which the run costs at most ``epsilon``."""
        return self.guarantee.noise_for(epsilon, self.releases, self.delta)


def plan(experiment: Experiment, clients: int | None = None) -> Plan:
    """What ``experiment`` promises with so many clients that train.

    Args:
        clients: left out where the partition says how many there are.

    Raises:
        ConfigError: the experiment has no ``kind`` or no ``delta``, its number of clients is not known, or a
            fleet's clock decides how often they take part.
    """
    privacy = experiment.privacy
    if privacy.kind is None or privacy.delta is None:
        raise ConfigError("[privacy] has no kind, or no delta: without them nothing is promised")
    if experiment.fleet is not None:
        raise ConfigError("[fleet]: its clock decides who takes part how often; summary.json tells it")
    if clients is None:
        unseen = experiment.evaluate.unseen
        known = getattr(experiment.data.partition, "clients", None)
        if not isinstance(known, int):
            raise ConfigError("the data decide how many clients there are: say it with --clients")
        clients = known - (unseen if isinstance(unseen, int) else len(unseen))
    cohort = experiment.cohort.of(clients) or clients
    if not 0 < cohort <= clients:
        raise ConfigError(f"[cohort] size = {cohort} of {clients} clients that train: see --clients")
    promised = guarantee_of(privacy, clients, cohort, experiment.cohort.sampling)
    return Plan(promised, _most_visits(experiment, clients, cohort, promised), privacy.delta)


def _most_visits(experiment: Experiment, clients: int, cohort: int, promised: Guarantee) -> int:
    if promised.sampling != "none" or cohort == clients:
        return experiment.rounds
    seed, sampling = Key(experiment.seed), experiment.cohort.sampling
    visits: Counter[int] = Counter()
    for number in range(1, experiment.rounds + 1):
        visits.update(draw_cohort(seed.at("round", number), clients, cohort, sampling))
    return max(visits.values(), default=0)
