"""The privacy guarantee of an experiment, and what it costs under each trust model, before it is run."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from prefed.config import ConfigError, Experiment
from prefed.config.align import CLIENTS
from prefed.core import Key
from prefed.engines.cohorts import draw_cohort
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
    return promised, _most_releases(experiment, clients, cohort, promised)


def _most_releases(experiment: Experiment, clients: int, cohort: int, promised: Guarantee) -> int:
    # Metrics have noise under distributed alone.
    measured = 0 if promised.colluders is None else evaluations(experiment)
    return _most_visits(experiment, clients, cohort, promised) + measured


def evaluations(experiment: Experiment) -> int:
    """The number of rounds that end with an evaluation."""
    rounds = experiment.rounds
    return sum(experiment.evaluate.due(number, rounds) for number in range(1, rounds + 1))


def _most_visits(experiment: Experiment, clients: int, cohort: int, promised: Guarantee) -> int:
    if promised.sampling != "none" or cohort == clients:
        return experiment.rounds
    seed, sampling = Key(experiment.seed), experiment.cohort.sampling
    visits: Counter[int] = Counter()
    for number in range(1, experiment.rounds + 1):
        visits.update(draw_cohort(seed.at("round", number), clients, cohort, sampling))
    return max(visits.values(), default=0)


def metrics_note(experiment: Experiment, promised: Guarantee) -> str:
    """Whether epsilon covers clients' metrics, and what their noise is.

    Args:
        promised: from :func:`plan`.
    """
    if promised.colluders is None:
        return "not covered: each client sends its own, without noise"
    sites = experiment.privacy.sites or promised.clients
    price = _price(sites, promised.colluders) * math.sqrt(3) / 2 / promised.clients
    return (
        f"covered: {evaluations(experiment)} of the releases are means over all clients; with three metrics, "
        f"the noise on each is {promised.noise_multiplier * price:.2g}"
    )


def with_votes(experiment: Experiment, promised: Guarantee, releases: int) -> tuple[int, float | None]:
    """The generations that clients label in ``[align]``, and ε with a sum of votes for each.

    Args:
        promised, releases: from :func:`plan`.

    Raises:
        AccountantError: see :meth:`~prefed.privacy.Guarantee.epsilon`.
    """
    align, delta = experiment.align, experiment.privacy.delta
    assert delta is not None
    votes = (align.generations or 1) if align is not None and align.labels == CLIENTS else 0
    return votes, promised.epsilon(releases, delta, votes)


def _price(sites: int, colluders: int) -> float:
    """How many times the noise of a trusted server all sites together add, so that it suffices without
    the shares of colluders.
    """
    return math.sqrt(sites / (sites - colluders))


class TrustModel(NamedTuple):
    """What one ``[privacy] kind`` costs at an ε.

    Attributes:
        trusted: who sees single updates without noise, apart from the client's own machine.
        noise: standard deviation of the noise on each number of the mean.
        bytes_up: bytes that the server receives in a round for each number of an upload.
    """

    kind: str
    trusted: str
    epsilon: float | None
    noise_multiplier: float
    noise: float
    bytes_up: int


def trust_models(experiment: Experiment, promised: Guarantee, epsilon: float) -> list[TrustModel]:
    """The four trust models at the same ε, with the clip and the cohort of the experiment.

    Args:
        promised: from :func:`plan`.

    Raises:
        AccountantError: see :meth:`~prefed.privacy.Guarantee.noise_for`.
    """
    privacy, clients, cohort = experiment.privacy, promised.clients, promised.cohort
    sites = privacy.sites or clients
    colluders = privacy.colluding(sites)
    assert privacy.delta is not None
    clip = privacy.clip or 0.0
    models = [TrustModel("none", "the hub", None, 0.0, 0.0, 4 * cohort)]
    for kind, trusted, uploads, price in (
        ("central", "the hub", cohort, 1 / cohort),
        ("distributed", f"the site; {colluders} of {sites} may collude", sites, 0.0),
        ("local", "nobody", cohort, 1 / math.sqrt(cohort)),
    ):
        fields = {"kind": kind, "secret_cohorts": privacy.secret_cohorts if kind == "central" else None}
        own = guarantee_of(privacy.model_copy(update=fields), clients, cohort, experiment.cohort.sampling)
        count = _most_releases(experiment, clients, cohort, own)
        noise = own.noise_for(epsilon, count, privacy.delta)
        price = price or _price(sites, colluders) / cohort
        models.append(TrustModel(kind, trusted, epsilon, noise, noise * clip * price, 4 * uploads))
    return models
