"""The privacy guarantee of an experiment, computed before it is run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from prefed.config import ConfigError, Experiment
from prefed.core import Key
from prefed.engines.job import draw_cohort
from prefed.privacy import Guarantee, guarantee_of


@dataclass(frozen=True)
class Plan:
    """The privacy guarantee of a planned run.

    Attributes:
        guarantee: of one release.
        releases: number of releases by the client that takes part most often.
        delta: δ of ``[privacy]``.
    """

    guarantee: Guarantee
    releases: int
    delta: float

    def epsilon(self) -> float | None:
        """ε after the last round; ``None`` without noise."""
        return self.guarantee.epsilon(self.releases, self.delta)

    def noise_for(self, epsilon: float) -> float:
        """Return the smallest ``noise_multiplier`` with which the run spends at most ``epsilon``."""
        return self.guarantee.noise_for(epsilon, self.releases, self.delta)


def plan(experiment: Experiment, clients: int | None = None) -> Plan:
    """Compute the privacy guarantee of ``experiment``.

    Args:
        clients: number of clients that train; defaults to that of the partition.

    Raises:
        ConfigError: the experiment has no ``kind`` or no ``delta``, its number of clients is unknown, or a
            simulated fleet decides how often they take part.
    """
    privacy = experiment.privacy
    if privacy.kind is None or privacy.delta is None:
        raise ConfigError("[privacy] has no kind or no delta: set both to get a guarantee")
    if experiment.fleet is not None:
        raise ConfigError(
            "[fleet] decides how often clients take part: run the experiment, and see ε in its summary.json"
        )
    if clients is None:
        unseen = experiment.evaluate.unseen
        known = getattr(experiment.data.partition, "clients", None)
        if not isinstance(known, int):
            raise ConfigError("the number of clients depends on the data: set it with --clients")
        clients = known - (unseen if isinstance(unseen, int) else len(unseen))
    cohort = experiment.cohort.of(clients) or clients
    if not 0 < cohort <= clients:
        raise ConfigError(
            f"[cohort] size = {cohort}, but {clients} clients train: lower the size, or change --clients"
        )
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
