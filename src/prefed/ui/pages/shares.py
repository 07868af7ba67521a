"""Shares of pairs with their 95% intervals, as a page writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefed.runs.record import RunRecord
from prefed.train.metrics import mean_interval

Interval = tuple[float, float]


def share(value: float, interval: Interval | None = None) -> str:
    """A share with its interval, and with no more digits than that leaves it.

    >>> share(5 / 12, (0.193, 0.68)), share(0.7125, (0.7084, 0.7164)), share(0.25)
    ('42% (19% to 68%)', '71.2% (70.8% to 71.6%)', '25.0%')
    """
    if interval is None:
        return f"{value:.1%}"
    low, high = interval
    digits = 0 if high - low >= 0.02 else 1
    return f"{value:.{digits}%} ({low:.{digits}%} to {high:.{digits}%})"


def interval_of(run: RunRecord, client: str, value: float) -> Interval | None:
    """The interval of one client's share; ``None`` where the number of its pairs is not known."""
    pairs = run.pairs(client)
    return mean_interval({client: value}, {client: pairs}) if pairs else None


def interval_of_mean(run: RunRecord, figure: Mapping[str, Any]) -> Interval | None:
    """The interval of a mean over clients, see :func:`prefed.train.metrics.mean_interval`.

    ``None`` where the numbers of pairs are not known, or the mean is also over clients that are not listed.
    """
    pairs = {client: run.pairs(client) for client in figure["per_client"]}
    known = {client: count for client, count in pairs.items() if count}
    if "mean_alone" in figure or len(known) < len(pairs):
        return None
    return mean_interval(figure["per_client"], known)


def pairs_of(run: RunRecord, figure: Mapping[str, Any]) -> int | None:
    """How many pairs a figure is about; ``None`` where that is not known."""
    pairs = [run.pairs(client) for client in figure["per_client"]]
    known = [count for count in pairs if count is not None]
    return sum(known) if len(known) == len(pairs) and "mean_alone" not in figure else None
