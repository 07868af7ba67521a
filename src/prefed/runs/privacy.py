"""The privacy guarantee of an experiment, computed before it is run."""

from __future__ import annotations

from collections import Counter

from prefed.config import ConfigError, Experiment
from prefed.core import Key
from prefed.engines.job import draw_cohort
from prefed.privacy import Guarantee, guarantee_of


def plan(experiment: Experiment, clients: int | None = None) -> tuple[Guarantee, int]:
    """Return the guarantee of a release, and the number of releases of the client that takes part most often.

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
    return promised, _most_visits(experiment, clients, cohort, promised)


def _most_visits(experiment: Experiment, clients: int, cohort: int, promised: Guarantee) -> int:
    if promised.sampling != "none" or cohort == clients:
        return experiment.rounds
    seed, sampling = Key(experiment.seed), experiment.cohort.sampling
    visits: Counter[int] = Counter()
    for number in range(1, experiment.rounds + 1):
        visits.update(draw_cohort(seed.at("round", number), clients, cohort, sampling))
    return max(visits.values(), default=0)
