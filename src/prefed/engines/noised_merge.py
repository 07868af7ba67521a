"""The merge of ``[privacy] kind = "central"``: a method sees the uploads' noised mean, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from prefed.core import Exchange, Round, State, Upload
from prefed.engines.aggregation import Aggregation, aggregate
from prefed.engines.job import Job
from prefed.engines.validation import expected_groups
from prefed.privacy import noised_mean


def merge_noised(
    job: Job, server: State, uploads: Sequence[Upload], exchange: Exchange, now: Round
) -> Aggregation:
    """Merge as many copies of the uploads' noised mean as a cohort has clients.

    So whatever the method and ``[merge]`` do, and whatever they report, is made of that mean. The noise is
    there too where no upload is: otherwise a model without noise would tell that nobody answered.
    """
    first = job.members[0]
    layouts = expected_groups(first, exchange, job.method.ownership, job.trainers.initial.layout, now)
    if not layouts:
        return aggregate(server, uploads, exchange, now)
    cohort = job.cohort_size if exchange.to == "cohort" else len(job.members)
    key = None if job.privacy.draws == "system" else now.key.at("exchange", exchange.name).at("noise")
    download = exchange.send(server, first, now)
    mean = noised_mean(uploads, download, exchange, layouts, cohort, job.privacy, key)
    copies = [Upload(client, 1.0, mean, {}, now.number) for client in job.members[:cohort]]
    merged = aggregate(server, copies, exchange, now)
    return Aggregation(merged.server, uploads if merged.uploads else (), (), merged.reason)
