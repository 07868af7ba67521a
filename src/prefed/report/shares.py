"""Shares of pairs with their standard errors, as a page writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefed.metrics import mean_error, standard_error
from prefed.runs.record import RunRecord


def share(value: float, error: float | None = None) -> str:
    """A share with no more digits than its standard error leaves it.

    >>> share(5 / 12, 0.142), share(0.7125, 0.004), share(0.25)
    ('42% ± 14', '71.2% ± 0.4', '25.0%')
    """
    if error is None:
        return f"{value:.1%}"
    digits = 0 if 100 * error >= 1 else 1
    return f"{100 * value:.{digits}f}% ± {100 * error:.{digits}f}"


def error_of(run: RunRecord, client: str, value: float) -> float | None:
    """The standard error of one client's share; ``None`` where the number of its pairs is not known."""
    pairs = run.pairs(client)
    return standard_error(value, pairs) if pairs else None


def error_of_mean(run: RunRecord, figure: Mapping[str, Any]) -> float | None:
    """The standard error of a mean over clients, see :func:`prefed.metrics.mean_error`.

    ``None`` where the numbers of pairs are not known, or the mean is also over clients that are not listed.
    """
    pairs = {client: run.pairs(client) for client in figure["per_client"]}
    known = {client: count for client, count in pairs.items() if count}
    if "mean_alone" in figure or len(known) < len(pairs):
        return None
    return mean_error(figure["per_client"], known)


def pairs_of(run: RunRecord, figure: Mapping[str, Any]) -> int | None:
    """How many pairs a figure is about; ``None`` where that is not known."""
    pairs = [run.pairs(client) for client in figure["per_client"]]
    known = [count for count in pairs if count is not None]
    return sum(known) if len(known) == len(pairs) and "mean_alone" not in figure else None
