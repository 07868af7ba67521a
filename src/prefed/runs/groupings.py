"""Clusters of clients over the rounds of a run, and how its selectors agree with each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

Clusters: TypeAlias = Sequence[Sequence[str]]
"""The clients of each cluster; a cluster has the number of its selector, from 0."""


@dataclass(frozen=True)
class Grouping:
    """How clients are grouped from a round on.

    Attributes:
        round: the round before whose training they were grouped.
        clusters: each cluster's clients.
        moved: the clients whose cluster changed.
        losses: each selector's mean validation loss in nats; empty if no client reported its own.
    """

    round: int
    clusters: Clusters
    moved: Sequence[str]
    losses: Sequence[float]


def groupings_of(rounds: Iterable[Mapping[str, Any]]) -> tuple[Grouping, ...]:
    """The groupings that the records of ``rounds.jsonl`` tell of, in their order."""
    return tuple(
        Grouping(record["round"], record["clusters"], record["moved"], record["selector_losses"])
        for record in rounds
        # A method may have a figure of this name that is another thing.
        if isinstance(record.get("clusters"), list)
    )


@dataclass(frozen=True)
class Agreement:
    """How one selector, or the vote of all, agrees with clients: shares of their pairs, means over clients.

    Attributes:
        name: the selector's, or :data:`VOTE`.
        clients: how many its cluster has; ``None`` without clusters.
        mean: over all clients.
        worst: the lowest client's.
        members: over the clients of its own cluster; ``None`` where none has a figure of its own.
        others: over the other clients; likewise.
        newcomers: over the clients that never took part; ``None`` where there are none.
    """

    name: str
    mean: float
    worst: float
    clients: int | None = None
    members: float | None = None
    others: float | None = None
    newcomers: float | None = None


VOTE = "vote of all"


def selector_figures(figures: Iterable[str]) -> list[str]:
    """Those names that are accuracies of single selectors, in the selectors' order.

    >>> selector_figures(["margin", "selector_10_accuracy", "selector_2_accuracy"])
    ['selector_2_accuracy', 'selector_10_accuracy']
    """
    numbers = {int(m[1]): name for name in figures if (m := re.fullmatch(r"selector_(\d+)_accuracy", name))}
    return [numbers[u] for u in sorted(numbers)]


def agreements(figures: Mapping[str, Any], clusters: Clusters = ()) -> list[Agreement]:
    """The agreement of each selector, then that of the vote; empty where there are not several selectors.

    A cluster's mean is over those of its clients that have enough pairs for a figure of their own.

    Args:
        figures: as ``summary.json`` has them.
        clusters: after the last grouping; empty before the first.

    >>> def over(**clients):
    ...     return {"mean": fmean(clients.values()), "worst": min(clients.values()), "per_client": clients}
    >>> figures = {"selector_0_accuracy": over(a=1.0, b=0.5), "selector_1_accuracy": over(a=0.0, b=0.75)}
    >>> first, second, vote = agreements(figures | {"majority_accuracy": over(a=0.5, b=0.5)}, [["a"], ["b"]])
    >>> first.mean, first.members, first.others, second.members, vote.mean
    (0.75, 1.0, 0.5, 0.75, 0.5)
    """
    rows = []
    for u, name in enumerate(selector_figures(figures)):
        own = set(clusters[u]) if clusters else None
        each = figures[name]["per_client"].items()
        rows.append(
            Agreement(
                f"selector-{u}",
                **_over_all(figures, name),
                clients=None if own is None else len(own),
                members=None if own is None else _mean(value for client, value in each if client in own),
                others=None if own is None else _mean(value for client, value in each if client not in own),
            )
        )
    return [*rows, Agreement(VOTE, **_over_all(figures, "majority_accuracy"))] if rows else []


def _over_all(figures: Mapping[str, Any], name: str) -> dict[str, Any]:
    newcomers = figures.get("unseen_selectors", {}).get(name, {})
    return {
        "mean": figures[name]["mean"],
        "worst": figures[name]["worst"],
        "newcomers": newcomers.get("mean"),
    }


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None
