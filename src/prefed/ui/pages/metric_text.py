"""Definitions of metrics, and shares of pairs formatted with 95% intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefed.runs.finished_run import RunRecord
from prefed.train.metrics import TABLE, TEXT_METRICS, mean_interval, words_of
from prefed.ui.pages.tables import Facts

WORST_TENTH = ("worst tenth", "mean over the lowest tenth of the clients (at least one client).")


def meanings(run: RunRecord) -> Facts:
    """Definitions of the metrics on a run's page."""
    facts = [(figure.label, f"{figure.meaning}.") for figure in run.figures.values()]
    further = [name for name in run.own_figures if name in TABLE]
    further += [row.name for row in TEXT_METRICS if "text" in run.summary]
    facts += [(label, f"{meaning}.") for label, meaning in (words_of(name, run.summary) for name in further)]
    facts += [
        (
            "95% interval",
            "Wilson interval for a client; for a mean, Wilson intervals combined over the clients. It covers "
            "variation from resampling pairs of the same clients.",
        ),
        WORST_TENTH,
        ("Jain index", "(Σx)² / (n Σx²): 1 if all clients are equal, 1/n if one client has everything."),
    ]
    return facts


Interval = tuple[float, float]


def share(value: float, interval: Interval | None = None) -> str:
    """Format a share with its interval; a wide interval drops the decimal.

    >>> share(5 / 12, (0.193, 0.68)), share(0.7125, (0.7084, 0.7164)), share(0.25)
    ('42% (19% to 68%)', '71.2% (70.8% to 71.6%)', '25.0%')
    """
    if interval is None:
        return f"{value:.1%}"
    low, high = interval
    digits = 0 if high - low >= 0.02 else 1
    return f"{value:.{digits}%} ({low:.{digits}%} to {high:.{digits}%})"


def interval_of(run: RunRecord, client: str, value: float) -> Interval | None:
    """The interval of a client's share; ``None`` if its number of pairs is unknown."""
    pairs = run.pairs(client)
    return mean_interval({client: value}, {client: pairs}) if pairs else None


def interval_of_mean(run: RunRecord, figure: Mapping[str, Any]) -> Interval | None:
    """The interval of a mean over clients, see :func:`prefed.train.metrics.mean_interval`.

    ``None`` if a number of pairs is unknown, or the mean includes clients that are not listed.
    """
    pairs = {client: run.pairs(client) for client in figure["per_client"]}
    known = {client: count for client, count in pairs.items() if count}
    if "mean_alone" in figure or len(known) < len(pairs):
        return None
    return mean_interval(figure["per_client"], known)


def pairs_of(run: RunRecord, figure: Mapping[str, Any]) -> int | None:
    """The number of pairs behind a metric; ``None`` if unknown."""
    pairs = [run.pairs(client) for client in figure["per_client"]]
    known = [count for count in pairs if count is not None]
    return sum(known) if len(known) == len(pairs) and "mean_alone" not in figure else None
