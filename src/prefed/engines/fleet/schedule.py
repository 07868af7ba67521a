"""The schedule of a run: whose uploads each round merges, from which model each started, and when.

It is a function of the seed and the fleet, and nothing that is trained has a part in it. So all of it is
known before training, and a run that resumes reads on where it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefed.core import Key
from prefed.engines.fleet.client import FleetClient, fleet_clients
from prefed.engines.fleet.config import FleetConfig

VAIN = 100_000
"""Visits in a row without a reply after which a fleet is given up."""


class FleetError(ValueError):
    """A fleet that cannot do what is asked of it."""


@dataclass(frozen=True, order=True)
class Visit:
    """A client's turn: it is asked, trains, and replies.

    Attributes:
        started_from: number of the model that it starts from; 0 is the initial one, r is what round r made.
        asked: the virtual time in seconds.
        at: the time of the reply, or of the visit's end where none comes.
    """

    client: str
    started_from: int
    asked: float
    at: float


@dataclass(frozen=True)
class ScheduledRound:
    """What is known of a round before anything is trained.

    Attributes:
        number: 1 for the first.
        at: virtual time of the merge, in seconds from the run's start.
        visits: whose uploads it merges, sorted by client; no two have the same client and the same model.
        lost: visits that ended without a reply since the round before, sorted.
        keep: number of the oldest model that an upload of a later round starts from.
    """

    number: int
    at: float
    visits: tuple[Visit, ...]
    lost: tuple[Visit, ...]
    keep: int

    def late(self, visit: Visit) -> int:
        """How many rounds old the visit's model was when its upload was merged: 0 if it was the newest."""
        return self.number - 1 - visit.started_from

    @property
    def staleness(self) -> float:
        """The mean of :meth:`late` over the uploads."""
        return sum(map(self.late, self.visits)) / len(self.visits)


def schedule(
    config: FleetConfig,
    members: Sequence[str],
    cohort: int,
    key: Key,
    work: Mapping[str, float] | None = None,
) -> Iterator[ScheduledRound]:
    """Every round of a run, without end.

    A synchronous server asks ``cohort`` of the clients that are there, or all of these if they are fewer, and
    merges when nobody works any more. A buffered server keeps ``cohort`` clients at work. It merges the first
    ``buffer`` replies and goes on (FedBuff, arXiv:2106.06639). No client is asked while it works, nor while
    its reply from the newest model waits to be merged. What happens at one moment counts in this order:
    replies, merges, new visits.

    Args:
        members: the clients that train, sorted.
        cohort: clients of a round, or at work at a time.
        key: ``Key(seed)``, of the whole run. A cohort is drawn at the key of its round.
        work: client → the work of its visits, as a multiple of the usual; 1 where left out.

    Raises:
        FleetError: there are fewer members than a merge needs replies; or no client is there ever again, or
            :data:`VAIN` visits in a row ended without a reply.
        ValueError: the trace is wrong.

    >>> fleet = FleetConfig(server="buffered", buffer=1)
    >>> rounds = schedule(fleet, ["a", "b"], 2, Key(42), work={"a": 1, "b": 2.5})
    >>> [(next(rounds).visits[0].client) for _ in range(5)]
    ['a', 'a', 'b', 'a', 'a']
    """
    if not 1 <= cohort <= len(members):
        raise FleetError(f"a cohort of {cohort} cannot be had of {len(members)} clients")
    if (config.buffer or 1) > len(members):
        raise FleetError(
            f"[fleet] buffer = {config.buffer}, but only {len(members)} clients train, and none replies "
            "twice to one model"
        )
    return _Server(config, members, cohort, key, work or {}).rounds()


class _Server:
    """The event loop behind :func:`schedule`."""

    def __init__(
        self, config: FleetConfig, members: Sequence[str], cohort: int, key: Key, work: Mapping[str, float]
    ) -> None:
        self.config, self.cohort, self.key, self.work = config, cohort, key, work
        self.clients: Mapping[str, FleetClient] = fleet_clients(config, members, key.at("fleet"))
        self.buffered = config.server == "buffered"
        self.now, self.model, self.draws = 0.0, 0, 0
        self.at_work: list[tuple[float, Visit, bool]] = []
        self.replies: list[Visit] = []
        self.lost: list[Visit] = []
        self.vain = 0

    def rounds(self) -> Iterator[ScheduledRound]:
        while True:
            wanting = self._ask()
            self._pass_time(wanting)
            while self._due():
                yield self._merge()

    def _ask(self) -> bool:
        """Ask as many clients as may be; whether fewer were there than the server would ask."""
        slots = self.cohort - len(self.at_work)
        if not self.buffered and self.at_work:
            return False
        there = [client for client in self._idle() if self.clients[client].present(self.now)]
        number = min(slots, len(there))
        if number:
            key = self.key.at("round", self.model + 1).at("cohort")
            # The first draw of a round is that of a run without a fleet.
            key = key.at("again", self.draws) if self.draws else key
            self.draws += 1
            drawn = key.numpy().choice(len(there), number, replace=False)
            for client in (there[index] for index in sorted(drawn)):
                start = self.model - self._delay(client)
                end, replies = self.clients[client].visit(self.now, self.work.get(client, 1.0))
                heapq.heappush(self.at_work, (end, Visit(client, start, self.now, end), replies))
        return number < slots and (self.buffered or not number)

    def _idle(self) -> list[str]:
        """Who neither works nor has replied to the newest model, sorted."""
        busy = {visit.client for _, visit, _ in self.at_work}
        busy |= {visit.client for visit in self.replies if visit.started_from == self.model}
        return [client for client in self.clients if client not in busy]

    def _delay(self, client: str) -> int:
        """How many rounds old the model is that the client gets."""
        if not self.config.max_delay:
            return 0
        key = self.key.at("round", self.model + 1).at("delay").at("client", client)
        return min(self.model, int(key.numpy().integers(self.config.max_delay + 1)))

    def _pass_time(self, wanting: bool) -> None:
        """Go on to the next moment at which something happens; ``wanting``: a client's return counts too."""
        end = self.at_work[0][0] if self.at_work else float("inf")
        if wanting:
            end = min([end, *(self.clients[client].returns(self.now) for client in self._idle())])
        if end == float("inf"):
            raise FleetError(
                f"round {self.model + 1}: no client is there any more after {self.now:g} s, and the server "
                f"has {len(self.replies)} replies; extend the trace, or give it a period"
            )
        self.now = end
        while self.at_work and self.at_work[0][0] == end:
            _, visit, replies = heapq.heappop(self.at_work)
            (self.replies if replies else self.lost).append(visit)
            self.vain = 0 if replies else self.vain + 1
        if self.vain >= VAIN:
            raise FleetError(
                f"round {self.model + 1}: {self.vain:,} visits in a row ended without a reply, the last of "
                f"{self.lost[-1].client!r}: clients drop out too often, or go away before a visit ends; "
                "lower [fleet] seconds, network or dropout, or have clients there for longer"
            )

    def _due(self) -> bool:
        if self.buffered:
            return len(self.replies) >= (self.config.buffer or self.cohort)
        return bool(self.replies) and not self.at_work

    def _merge(self) -> ScheduledRound:
        number = (self.config.buffer or self.cohort) if self.buffered else len(self.replies)
        merged, self.replies = self.replies[:number], self.replies[number:]
        lost, self.lost, self.draws = self.lost, [], 0
        self.model += 1
        waiting = [*self.replies, *(visit for _, visit, replies in self.at_work if replies)]
        keep = min([self.model - self.config.max_delay, *(visit.started_from for visit in waiting)])
        return ScheduledRound(self.model, self.now, tuple(sorted(merged)), tuple(sorted(lost)), max(0, keep))
