"""Simulated fleet with a virtual clock: when clients reply, and which uploads each round merges.

The schedule depends only on the seed and the ``[fleet]`` table, not on training. It is therefore known in
advance, and a resumed run continues it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prefed.core import Key
from prefed.engines.cohorts import ScheduledRound, Visit
from prefed.engines.config import FleetConfig
from prefed.engines.fleet_trace import Window, read_trace

_GAP = 1e-9
"""Relative gap below which two windows count as contiguous, to allow for rounding in repeated traces."""


class FleetClient:
    """A simulated client. Times passed to its methods must not decrease."""

    def __init__(self, config: FleetConfig, key: Key, windows: Iterator[Window]) -> None:
        self._config, self._key = config, key
        self._windows, self._ahead = windows, deque[Window]()
        self._visits = 0

    def present(self, now: float) -> bool:
        """Return whether the client is online."""
        return self._window(now).start <= now

    def returns(self, now: float) -> float:
        """The next time at which the client is online: ``now`` if it is online, infinity if never."""
        return max(now, self._window(now).start)

    def visit(self, now: float, work: float) -> tuple[float, bool]:
        """Simulate a visit of the client, which must be online.

        Args:
            work: work relative to the default.

        Returns:
            The end of the visit, and whether the client replies.
        """
        self._visits += 1
        generator = self._key.at("visit", self._visits).numpy()
        noise, chance, share = generator.standard_normal(), generator.random(), generator.random()
        window, sigma = self._window(now), self._config.jitter
        takes = window.network + work * window.seconds * math.exp(sigma * noise - sigma**2 / 2)
        if chance < window.dropout:
            return min(now + share * takes, self._leaves(now + takes)), False
        end = now + takes
        leaves = self._leaves(end)
        return (end, True) if end <= leaves else (leaves, False)

    def _window(self, now: float) -> Window:
        """The current window, or else the next one."""
        while self._get(0).end <= now:
            self._ahead.popleft()
        return self._get(0)

    def _leaves(self, until: float) -> float:
        """The time at which the client goes offline, or some time after ``until``."""
        place, end = 1, self._get(0).end
        while end < until and self._get(place).start <= end + _GAP * max(1.0, end):
            end = self._get(place).end
            place += 1
        return end

    def _get(self, place: int) -> Window:
        while len(self._ahead) <= place:
            self._ahead.append(next(self._windows, _NEVER))
        return self._ahead[place]


_NEVER = Window(math.inf, math.inf, 1.0, 0.0, 0.0)


def fleet_clients(config: FleetConfig, members: Sequence[str], key: Key) -> dict[str, FleetClient]:
    """The clients of a fleet, with individual speeds and random streams.

    Raises:
        ValueError: the trace is invalid; see :func:`~prefed.engines.fleet_trace.read_trace`.
    """
    keys = {client: key.at("client", client) for client in members}
    usual = {client: _usual(config, keys[client].at("speed")) for client in members}
    traced: Mapping[str, Sequence[Window]] = {client: (window,) for client, window in usual.items()}
    if config.trace is not None:
        traced = read_trace(Path(config.trace), usual, config.period)
    return {
        client: FleetClient(config, keys[client], _windows(config, traced[client], keys[client]))
        for client in members
    }


def _usual(config: FleetConfig, key: Key) -> Window:
    """The default window of a client, with its speed."""
    generator, factor, spread = key.numpy(), 1.0, config.spread or 0.0
    if config.speeds == "uniform":
        factor = generator.uniform(1 - spread, 1 + spread)
    elif config.speeds == "lognormal":
        factor = math.exp(spread * generator.standard_normal() - spread**2 / 2)
    elif config.speeds == "exponential":
        factor = generator.standard_exponential()
    return Window(0.0, math.inf, config.seconds * factor, config.network, config.dropout)


def _windows(config: FleetConfig, windows: Sequence[Window], key: Key) -> Iterator[Window]:
    """Yield the windows of a client in order of time; infinitely many if they repeat."""
    if config.online is not None and config.offline is not None:
        yield from _alternate(config.online, config.offline, windows[0], key)
        return
    yield from windows
    cycle = 1
    while config.period is not None:
        begin = cycle * config.period
        yield from (replace(w, start=begin + w.start, end=begin + w.end) for w in windows)
        cycle += 1


def _alternate(online: float, offline: float, usual: Window, key: Key) -> Iterator[Window]:
    """Alternating exponential online and offline times; the process is stationary at time 0."""
    generator = key.at("presence").numpy()
    now = 0.0 if generator.random() < online / (online + offline) else generator.exponential(offline)
    while True:
        end = now + generator.exponential(online)
        yield replace(usual, start=now, end=end)
        now = end + generator.exponential(offline)


VAIN = 100_000
"""Consecutive visits without a reply after which the simulation fails."""


class FleetError(ValueError):
    """The fleet cannot complete a round."""


def schedule(
    config: FleetConfig,
    members: Sequence[str],
    cohort: int,
    key: Key,
    work: Mapping[str, float] | None = None,
) -> Iterator[ScheduledRound]:
    """Yield the rounds of a run, without end.

    A synchronous server asks ``cohort`` clients of those that are online, or all of them if there are fewer,
    and merges when all visits have ended. A buffered server keeps ``cohort`` clients busy and merges the
    first ``buffer`` replies (FedBuff, arXiv:2106.06639). A client is not asked during a visit, nor while its
    reply from the newest model waits to be merged. Simultaneous events are processed in this order: replies,
    merges, new visits.

    Args:
        members: the training clients, sorted.
        cohort: number of clients per round, or of concurrent visits.
        key: ``Key(seed)`` of the run. A cohort is drawn at the key of its round.
        work: client → work of its visits relative to the default (default: 1).

    Raises:
        FleetError: there are fewer members than replies per merge, no client will ever be online again, or
            :data:`VAIN` consecutive visits ended without a reply.
        ValueError: the trace is invalid.

    >>> fleet = FleetConfig(server="buffered", buffer=1)
    >>> rounds = schedule(fleet, ["a", "b"], 2, Key(42), work={"a": 1, "b": 2.5})
    >>> [(next(rounds).visits[0].client) for _ in range(5)]
    ['a', 'a', 'b', 'a', 'a']
    """
    if not 1 <= cohort <= len(members):
        raise FleetError(f"a cohort of {cohort} clients: only {len(members)} clients train")
    if (config.buffer or 1) > len(members):
        raise FleetError(
            f"[fleet] buffer = {config.buffer}: only {len(members)} clients train, and each replies once per "
            "model: lower it"
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
        """Start as many visits as possible; return whether the server waits for more clients."""
        slots = self.cohort - len(self.at_work)
        if not self.buffered and self.at_work:
            return False
        there = [client for client in self._idle() if self.clients[client].present(self.now)]
        number = min(slots, len(there))
        if number:
            key = self.key.at("round", self.model + 1).at("cohort")
            # The first draw of a round is the same as without a fleet.
            key = key.at("again", self.draws) if self.draws else key
            self.draws += 1
            drawn = key.numpy().choice(len(there), number, replace=False)
            for client in (there[index] for index in sorted(drawn)):
                start = self.model - self._delay(client)
                end, replies = self.clients[client].visit(self.now, self.work.get(client, 1.0))
                heapq.heappush(self.at_work, (end, Visit(client, start, self.now, end), replies))
        return number < slots and (self.buffered or not number)

    def _idle(self) -> list[str]:
        """The clients that are neither busy nor have replied to the newest model, sorted."""
        busy = {visit.client for _, visit, _ in self.at_work}
        busy |= {visit.client for visit in self.replies if visit.started_from == self.model}
        return [client for client in self.clients if client not in busy]

    def _delay(self, client: str) -> int:
        """Age in rounds of the model that the client gets."""
        if not self.config.max_delay:
            return 0
        key = self.key.at("round", self.model + 1).at("delay").at("client", client)
        return min(self.model, int(key.numpy().integers(self.config.max_delay + 1)))

    def _pass_time(self, wanting: bool) -> None:
        """Advance to the next event; with ``wanting`` also to the return of a client."""
        end = self.at_work[0][0] if self.at_work else float("inf")
        if wanting:
            end = min([end, *(self.clients[client].returns(self.now) for client in self._idle())])
        if end == float("inf"):
            raise FleetError(
                f"round {self.model + 1}: no client is online after {self.now:g} s, when the server has "
                f"{len(self.replies)} replies: extend the trace, or set [fleet] period"
            )
        self.now = end
        while self.at_work and self.at_work[0][0] == end:
            _, visit, replies = heapq.heappop(self.at_work)
            (self.replies if replies else self.lost).append(visit)
            self.vain = 0 if replies else self.vain + 1
        if self.vain >= VAIN:
            raise FleetError(
                f"round {self.model + 1}: {self.vain:,} consecutive visits ended without a reply, the last "
                f"one of {self.lost[-1].client!r}: lower [fleet] seconds, network or dropout, or keep "
                "clients online for longer"
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
