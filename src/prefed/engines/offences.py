"""Clients that send bad uploads again and again: how often, and who is set aside for it.

All of this is in the record of the last round, so a run that was stopped goes on with it. An upload that does
not come, or that the client's own side withholds, is no offence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from prefed.core import Plain
from prefed.engines.fleet import ScheduledRound, Visit
from prefed.engines.job import Job

OFFENCES, ASIDE = "offences", "set_aside"
"""Keys of a round's record: client → its bad uploads so far; the clients that are asked no more."""


def set_aside(record: Mapping[str, Any] | None) -> frozenset[str]:
    """Whom the server does not ask after the round of this record."""
    return frozenset((record or {}).get(ASIDE, ()))


def visits_without(job: Job, plan: ScheduledRound, aside: frozenset[str]) -> tuple[Visit, ...]:
    """The visits of a round, without those of clients that are set aside.

    Others are drawn in their place, where neither a fleet's clock nor an accountant has reckoned with those
    that were drawn, and where the size of a cohort is no matter of chance.
    """
    visits = [visit for visit in plan.visits if visit.client not in aside]
    missing = len(plan.visits) - len(visits)
    if missing and job.fleet is None and job.sampling == "fixed" and job.privacy.kind is None:
        drawn = {visit.client for visit in visits}
        others = [client for client in job.members if client not in aside | drawn]
        key = job.round(plan.number).key.at("cohort").at("instead")
        chosen = key.numpy().choice(len(others), min(missing, len(others)), replace=False)
        visits += [Visit(others[index], plan.number - 1, 0.0, 0.0) for index in chosen]
    return tuple(sorted(visits))


def offences_after(job: Job, record: Mapping[str, Any] | None, bad: Sequence[str]) -> dict[str, Plain]:
    """What a round's record says of offences; nothing where a run does not count them.

    Args:
        record: of the round before.
        bad: the client of each bad upload of this round.
    """
    if job.offences is None:
        return {}
    counts = Counter((record or {}).get(OFFENCES, {})) + Counter(bad)
    aside = sorted(client for client, count in counts.items() if count >= job.offences)
    return {OFFENCES: dict(sorted(counts.items())), ASIDE: list[Plain](aside)}
