"""A client of the fleet: when it is there, and what becomes of its visits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prefed.core import Key
from prefed.engines.fleet.config import FleetConfig
from prefed.engines.fleet.trace import Window, read_trace

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
        ValueError: the trace is wrong; see :func:`~prefed.engines.fleet.trace.read_trace`.
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
