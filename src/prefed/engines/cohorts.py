"""The clients of a round: a random cohort, or the visits that a simulated fleet has scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefed.core import Key

OFFENCES, ASIDE = "offences", "set_aside"
"""Keys of a round's record: client → its number of bad uploads; the clients that are set aside."""


def draw_cohort(key: Key, clients: int, size: int, sampling: Literal["fixed", "poisson"]) -> list[int]:
    """Draw the indices of a cohort, in ascending order.

    Args:
        clients: number of clients to draw from.
        size: size of the cohort; with ``"poisson"`` its expectation.

    >>> draw_cohort(Key(1), 9, 9, "poisson") == draw_cohort(Key(1), 9, 9, "fixed") == [*range(9)]
    True
    """
    generator = key.at("cohort").numpy()
    if sampling == "poisson":
        return [index for index, coin in enumerate(generator.random(clients)) if coin * clients < size]
    return sorted(generator.choice(clients, size, replace=False).tolist())


@dataclass(frozen=True, order=True)
class Visit:
    """A visit of a client.

    Attributes:
        started_from: the round whose model it starts from; 0: the initial model.
        asked: start of the visit, in virtual seconds.
        at: end of the visit, in virtual seconds.
    """

    client: str
    started_from: int
    asked: float
    at: float


@dataclass(frozen=True)
class ScheduledRound:
    """The schedule of a round.

    Attributes:
        number: number of the round, from 1.
        at: time of the merge, in virtual seconds since the start of the run.
        visits: visits whose uploads are merged, sorted by client; each client and model occurs at most once.
        lost: visits that ended without a reply since the previous round, sorted.
        keep: round of the oldest model that a later upload starts from.
    """

    number: int
    at: float
    visits: tuple[Visit, ...]
    lost: tuple[Visit, ...]
    keep: int

    def late(self, visit: Visit) -> int:
        """Age in rounds of the visit's model at the merge; 0 for the newest."""
        return self.number - 1 - visit.started_from

    @property
    def staleness(self) -> float:
        """The mean of :meth:`late` over the uploads; 0 without any."""
        return sum(map(self.late, self.visits)) / max(1, len(self.visits))
