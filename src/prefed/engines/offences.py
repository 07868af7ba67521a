"""Offences: clients with too many bad uploads are set aside, so the server no longer asks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from prefed.core import Plain
from prefed.engines.cohorts import ASIDE, OFFENCES, ScheduledRound, Visit
from prefed.engines.job import Job


def set_aside(record: Mapping[str, Any] | None) -> frozenset[str]:
    """The clients that are set aside after the round of this record."""
    return frozenset((record or {}).get(ASIDE, ()))


def visits_without(job: Job, plan: ScheduledRound, aside: frozenset[str]) -> tuple[Visit, ...]:
    """The visits of a round without those of clients that are set aside.

    Replacements are drawn if cohorts have a fixed size and neither a fleet's clock nor privacy accounting
    depends on the original draw.
    """
    visits = [visit for visit in plan.visits if visit.client not in aside]
    missing = len(plan.visits) - len(visits)
    if missing and job.fleet is None and job.cohort.sampling == "fixed" and job.privacy.kind is None:
        drawn = {visit.client for visit in visits}
        others = [client for client in job.members if client not in aside | drawn]
        key = job.round(plan.number).key.at("cohort").at("instead")
        chosen = key.numpy().choice(len(others), min(missing, len(others)), replace=False)
        visits += [Visit(others[index], plan.number - 1, 0.0, 0.0) for index in chosen]
    return tuple(sorted(visits))


def offences_after(most: int, record: Mapping[str, Any] | None, bad: Sequence[str]) -> dict[str, Plain]:
    """The fields of a round's record about bad uploads.

    Args:
        most: number of bad uploads after which a client is set aside.
        record: record of the previous round.
        bad: the client of each bad upload of this round.
    """
    counts = Counter((record or {}).get(OFFENCES, {})) + Counter(bad)
    aside = sorted(client for client, count in counts.items() if count >= most)
    return {OFFENCES: dict(sorted(counts.items())), ASIDE: list[Plain](aside)}
