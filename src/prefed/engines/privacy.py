"""Differential privacy in engines: the merge with noise, the number of releases and their ε."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from prefed.core import Exchange, Key, Layout, Plain, Round, State, Upload
from prefed.engines.aggregation import Aggregation, aggregate
from prefed.engines.job import Job
from prefed.engines.validation import expected_groups, summed_metrics
from prefed.privacy import (
    Grid,
    Guarantee,
    VoteSum,
    flat_steps,
    guarantee_of,
    mean_of_sum,
    noised_mean,
    source_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def guarantee(job: Job) -> Guarantee:
    """The guarantee of one release of the job."""
    # If all clients take part in a step, no draw of a cohort hides them.
    drawn = all(exchange.to == "cohort" for exchange in job.method.exchanges)
    cohort = job.cohort_size if drawn else len(job.seats)
    return guarantee_of(job.privacy, len(job.seats), cohort, job.cohort.sampling)


def most_releases(job: Job, number: int, starts: Mapping[int, int]) -> int:
    """The maximum number of releases of a client in the rounds up to ``number``, which determines ε.

    Under ``distributed`` the metrics of an evaluation are a release as well.

    The schedule is fixed before the run, so this number does not depend on clients' data. A client counts
    even if it does not answer. With secret cohorts a round is a release of all clients.

    Args:
        starts: round → number of starts, each of which draws new noise (default: 1).
    """
    counts: Counter[str] = Counter()
    everybody = job.graph is not None or guarantee(job).sampling != "none"
    for plan in islice(job.schedule(0), number):
        visits = [visit.client for visit in plan.visits]
        for exchange in job.method.exchanges:
            if exchange.due(plan.number):
                asked = job.members if everybody or exchange.to != "cohort" else visits
                for client in asked:
                    counts[client] += starts.get(plan.number, 1)
        if job.privacy.kind == "distributed" and job.evaluates(plan.number):
            for client in job.evaluation_clients:
                counts[client] += starts.get(plan.number, 1)
    return max(counts.values(), default=0)


def spent(job: Job, number: int, starts: Mapping[int, int]) -> float | None:
    """ε after round ``number`` at ``[privacy] delta``; ``None`` without noise.

    Raises:
        AccountantError: ``dp-accounting`` is not installed.
    """
    if not job.privacy.noise:
        return None
    assert job.privacy.delta is not None
    return guarantee(job).epsilon(most_releases(job, number, starts), job.privacy.delta)


def privacy_record(job: Job, number: int, starts: Mapping[int, int]) -> dict[str, Plain]:
    """The entry ``privacy`` of ``summary.json`` after round ``number``."""
    privacy = job.privacy
    promised = guarantee(job)
    return {
        "kind": privacy.kind,
        "clip": privacy.clip,
        "noise_multiplier": privacy.noise_multiplier,
        "epsilon": spent(job, number, starts),
        "delta": privacy.delta,
        "adjacency": promised.adjacency,
        "bound": promised.bound,
        "releases": most_releases(job, number, starts),
        "draws": privacy.draws or "seed",
        **({} if promised.colluders is None else {"colluders": promised.colluders}),
    }


def merge_noised(
    job: Job,
    server: State,
    uploads: Sequence[Upload],
    exchange: Exchange,
    now: Round,
    total: NDArray[np.float64] | None = None,
) -> Aggregation:
    """Merge copies of the noised mean of the uploads, one for each client of a cohort.

    The method, ``[merge]`` and all metrics thus depend only on this mean. Noise is added even without
    uploads, because a model without noise would reveal that no client answered.

    Args:
        total: under ``distributed`` the sum of the uploads with its noise, from :func:`simulated_sum` or from
            sites; ``None`` under ``central``.
    """
    layouts = shared_groups(job, exchange, now)
    if not layouts:
        return aggregate(server, uploads, exchange, now)
    cohort = job.cohort_size if exchange.to == "cohort" else len(job.members)
    download = exchange.send(server, job.members[0], now)
    if total is None:
        key = _noise_key(job, exchange.name, now)
        mean = noised_mean(uploads, download, exchange, layouts, cohort, job.privacy, key)
    else:
        mean = mean_of_sum(total, download, exchange, layouts, cohort)
    copies = [Upload(client, 1.0, mean, {}, now.number) for client in job.members[:cohort]]
    merged = aggregate(server, copies, exchange, now)
    return replace(merged, uploads=uploads if merged.uploads else (), dropped=())


def shared_groups(job: Job, exchange: Exchange, now: Round) -> Mapping[str, Layout]:
    """Group → layout of every client's upload in an exchange, which the kinds with a mean require."""
    model = job.trainers.initial.layout
    return expected_groups(job.members[0], exchange, job.method.ownership, model, now)


def simulated_sum(job: Job, uploads: Sequence[Upload], exchange: Exchange, now: Round) -> NDArray[np.float64]:
    """What a federation's sites would send together: all clipped steps, and each site's noise.

    Sums are of whole numbers, so they do not depend on which clients a site has.

    Args:
        uploads: from :func:`~prefed.privacy.clipped_steps`.
    """
    size = sum(layout.size for layout in shared_groups(job, exchange, now).values())
    grid, key = job.grid(simulated_sites(job)), _noise_key(job, exchange.name, now)
    return _noised_sum(map(flat_steps, uploads), size, grid, key)


def simulated_means(
    job: Job, answers: Mapping[str, Mapping[str, float]], clients: int, now: Round
) -> tuple[dict[str, float], float]:
    """The means of metrics that a federation's hub would get, and the standard deviation of their noise.

    Args:
        answers: client → its metrics.
        clients: number of clients that were asked.
    """
    metrics, sites = summed_metrics(job), simulated_sites(job)
    grid, key = metrics.grid(job.privacy, sites, len(job.members)), _noise_key(job, "", now)
    total = _noised_sum(map(metrics.steps, answers.values()), metrics.size, grid, key)
    return metrics.means(total, clients), grid.deviation / clients


def simulated_votes(job: Job, votes: NDArray[np.floating], key: Key | None) -> NDArray[np.int64]:
    """The sum of clients' votes that a federation's hub would get.

    Args:
        votes: ``[M, n]``.
        key: of the noise, used for no other votes; ``None`` for the operating system's secure numbers.
    """
    summed, sites = VoteSum(votes.shape[1]), simulated_sites(job)
    grid = summed.grid(job.privacy, sites, len(job.members))
    return summed.votes(_noised_sum(map(summed.steps, votes), summed.size, grid, key and key.at("noise")))


def simulated_sites(job: Job) -> int:
    """The number of sites of a simulation."""
    return job.privacy.sites or len(job.members)


def _noised_sum(
    steps: Iterable[NDArray[np.float64]], size: int, grid: Grid, key: Key | None
) -> NDArray[np.float64]:
    total = np.zeros(size, np.int64)
    for each in steps:
        total += grid.words(each)
    for site in range(grid.sites):
        total += grid.noise(size, source_of(key and key.at("site", site)))
    return grid.numbers(total)


def _noise_key(job: Job, exchange: str, now: Round) -> Key | None:
    return None if job.privacy.draws == "system" else now.key.at("exchange", exchange).at("noise")
