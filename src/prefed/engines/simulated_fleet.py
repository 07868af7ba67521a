"""A fleet of clients on a virtual clock: when each replies, and whose uploads a round merges.

The schedule is a function of the seed and the ``[fleet]`` table, and of nothing that is trained. So all of
it is known before training, and a resumed run continues where it was.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from prefed.core import Key
from prefed.core.strict_settings import StrictModel
from prefed.engines.fleet_trace import Window, read_trace


class FleetConfig(StrictModel):
    """A simulated fleet. By default all clients are equally fast and always there, and none is late.

    Raises:
        ValueError: two of the keys cannot serve together; the error says why.
    """

    server: Literal["synchronous", "buffered"] = Field(
        "synchronous",
        description="synchronous waits for the whole cohort; buffered keeps as many clients at work as a "
        "cohort has, and merges when enough replies are in",
    )
    max_delay: int = Field(
        0,
        ge=0,
        description="synchronous: a client starts from a model that is 0 to so many rounds old, drawn for "
        "each client and round",
    )
    buffer: int | None = Field(
        None, ge=1, description="buffered: replies that a merge needs; left out: as many as a cohort has"
    )
    seconds: float = Field(1.0, gt=0, description="mean time that a client takes for a visit")
    speeds: Literal["equal", "uniform", "lognormal", "exponential"] = Field(
        "equal", description="how clients' own times lie around that mean"
    )
    spread: float | None = Field(
        None,
        gt=0,
        description="of uniform: half of its width, as a share of the mean; of lognormal: sigma",
    )
    jitter: float = Field(0.0, ge=0, description="sigma of a lognormal factor of mean 1 on each visit's time")
    network: float = Field(0.0, ge=0, description="seconds for the messages of a visit, both ways")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that a visit ends without a reply, at any moment of it"
    )
    online: float | None = Field(
        None, gt=0, description="mean seconds that a client is there at a time; left out: always"
    )
    offline: float | None = Field(None, gt=0, description="mean seconds that it is away in between")
    trace: str | None = Field(
        None,
        description="a CSV or JSON lines file with times when each client is there, and its speed then",
    )
    period: float | None = Field(None, gt=0, description="seconds after which the trace starts again")

    @model_validator(mode="after")
    def _coherent(self) -> FleetConfig:
        if self.server == "buffered" and self.max_delay:
            raise ValueError("with a buffered server delays follow from the speeds: leave out max_delay")
        if self.server == "synchronous" and self.buffer is not None:
            raise ValueError("buffer belongs to the buffered server; a synchronous one waits for its cohort")
        if (self.speeds in ("uniform", "lognormal")) != (self.spread is not None):
            raise ValueError("spread belongs to speeds 'uniform' and 'lognormal', which need it")
        if self.speeds == "uniform" and self.spread is not None and self.spread >= 1:
            raise ValueError("spread of uniform speeds is below 1: no visit takes no time")
        if (self.online is None) != (self.offline is None):
            raise ValueError("online and offline go together: give both or none")
        if self.trace is not None and self.online is not None:
            raise ValueError("the trace says when clients are there: leave out online and offline")
        if self.period is not None and self.trace is None:
            raise ValueError("period belongs to a trace")
        return self


_GAP = 1e-9
"""Windows that are less apart, relative to the time, are one: cycles of a trace end by rounded sums."""


class FleetClient:
    """One client, on a clock that never goes back."""

    def __init__(self, config: FleetConfig, key: Key, windows: Iterator[Window]) -> None:
        self._config, self._key = config, key
        self._windows, self._ahead = windows, deque[Window]()
        self._visits = 0

    def present(self, now: float) -> bool:
        """Whether the client is there."""
        return self._window(now).start <= now

    def returns(self, now: float) -> float:
        """The time from which the client is there: ``now`` if it is, infinity if it never will be."""
        return max(now, self._window(now).start)

    def visit(self, now: float, work: float) -> tuple[float, bool]:
        """Ask the client to train; it is there.

        Args:
            work: the visit's work, as a multiple of the usual.

        Returns:
            When the visit ends, and whether it ends with a reply.
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
        """The window of ``now``, or the next one."""
        while self._get(0).end <= now:
            self._ahead.popleft()
        return self._get(0)

    def _leaves(self, until: float) -> float:
        """When the client goes away, or a later time than ``until``; windows that touch are one."""
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
    """The clients of a fleet, each with its own speed and its own randomness.

    Raises:
        ValueError: the trace is wrong; see :func:`~prefed.engines.fleet_trace.read_trace`.
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
    """What counts for a client at all times unless a trace says otherwise."""
    generator, factor, spread = key.numpy(), 1.0, config.spread or 0.0
    if config.speeds == "uniform":
        factor = generator.uniform(1 - spread, 1 + spread)
    elif config.speeds == "lognormal":
        factor = math.exp(spread * generator.standard_normal() - spread**2 / 2)
    elif config.speeds == "exponential":
        factor = generator.standard_exponential()
    return Window(0.0, math.inf, config.seconds * factor, config.network, config.dropout)


def _windows(config: FleetConfig, windows: Sequence[Window], key: Key) -> Iterator[Window]:
    """All windows of a client in the order of time; infinitely many where they repeat."""
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
    """Exponential times of presence and absence; at time 0 the process has run for ever."""
    generator = key.at("presence").numpy()
    now = 0.0 if generator.random() < online / (online + offline) else generator.exponential(offline)
    while True:
        end = now + generator.exponential(online)
        yield replace(usual, start=now, end=end)
        now = end + generator.exponential(offline)


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
    ``buffer`` replies and continues (FedBuff, arXiv:2106.06639). No client is asked while it works, nor while
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
