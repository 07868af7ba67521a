"""A run's metrics with their labels and meanings, profiles over model blocks, and agreement of selectors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefed.core.records import FederatedMetric, metrics_of_clients
from prefed.train.metrics import TABLE, words_of


@dataclass(frozen=True)
class Figure:
    """A metric with a value for every evaluated client.

    Attributes:
        name: its key in ``summary.json``.
        label: heading of its column or curve.
        meaning: one sentence.
        values: after the last round.
    """

    name: str
    label: str
    meaning: str
    values: FederatedMetric


def figures_of(summary: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the per-client metrics of a summary by name, in display order."""
    values = metrics_of_clients(summary)
    order = [name for name in TABLE if name in values] + [name for name in values if name not in TABLE]
    return {name: Figure(name, *words_of(name, summary), values[name]) for name in order}


MEANINGS: Mapping[str, tuple[str, str]] = {
    "gate": (
        "gates",
        "weight of a client's own LoRA, added to the shared one, per block: 0 uses only the shared model, "
        "1 the full personal LoRA",
    ),
    "weight": (
        "weights of the shared model",
        "share of the shared model that a client adopts, per block: 1 is all of it, 0 none",
    ),
}
"""Profile → its heading and its meaning. Other profiles have their name as both."""


@dataclass(frozen=True)
class Profile:
    """A value per model block from the private states of clients: shows which layers they personalise.

    Attributes:
        name: its key in ``summary.json``.
        label: heading of its plot or table.
        meaning: one sentence.
        clients: those that took part, sorted.
        blocks: numbers of the blocks, ascending.
        values: ``[clients, blocks]``, NaN where a client has no value.
    """

    name: str
    label: str
    meaning: str
    clients: tuple[str, ...]
    blocks: tuple[int, ...]
    values: npt.NDArray[np.float64]

    @cached_property
    def means(self) -> npt.NDArray[np.float64]:
        """``[blocks]``, the mean over the clients that have a value."""
        means: npt.NDArray[np.float64] = np.nanmean(self.values, axis=0)
        return means

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return float(np.nanmin(self.values)), float(np.nanmax(self.values))

    @property
    def ends(self) -> str:
        """The means of the first and the last block, as text."""
        first, last = self.blocks[0], self.blocks[-1]
        if first == last:
            return f"{self.means[0]:.2f} in block {first}"
        return f"{self.means[0]:.2f} in block {first}, {self.means[-1]:.2f} in block {last}"


def profiles_of(summary: Mapping[str, Any]) -> dict[str, Profile]:
    """Return the profiles in a ``summary.json`` by name.

    >>> personal = {"gate": {"bob": {"0": 0.5, "1": 0.25}, "ann": {"0": 0.75, "1": 0.5}}}
    >>> gates = profiles_of({"personal": personal})["gate"]
    >>> gates.clients, gates.values[0].tolist(), gates.ends
    (('ann', 'bob'), [0.75, 0.5], '0.62 in block 0, 0.38 in block 1')
    """
    profiles = {}
    for name, by_client in summary.get("personal", {}).items():
        clients = tuple(sorted(client for client, values in by_client.items() if values))
        blocks = sorted({int(block) for client in clients for block in by_client[client]})
        if not blocks:
            continue
        rows = [[by_client[client].get(str(block), np.nan) for block in blocks] for client in clients]
        label, meaning = MEANINGS.get(name, (name.replace("_", " "), name.replace("_", " ")))
        profiles[name] = Profile(
            name, label, meaning, clients, tuple(blocks), np.array(rows, dtype=np.float64)
        )
    return profiles


Clusters: TypeAlias = Sequence[Sequence[str]]
"""The clients of each cluster; cluster k belongs to selector k, from 0."""


@dataclass(frozen=True)
class Grouping:
    """The clusters of clients, from one round on.

    Attributes:
        round: the first round that trained with these clusters.
        moved: the clients whose cluster changed.
        losses: the mean validation loss of each selector in nats; empty if no client reported losses.
    """

    round: int
    clusters: Clusters
    moved: Sequence[str]
    losses: Sequence[float]


def groupings_of(rounds: Iterable[Mapping[str, Any]]) -> tuple[Grouping, ...]:
    """Return the groupings in the records of ``rounds.jsonl``, in their order."""
    return tuple(
        Grouping(record["round"], record["clusters"], record["moved"], record["selector_losses"])
        for record in rounds
        # A method may log a number under the same name.
        if isinstance(record.get("clusters"), list)
    )


@dataclass(frozen=True)
class Agreement:
    """Accuracy of one selector, or of their majority, on the pairs of clients.

    Attributes:
        name: the name of the selector, or :data:`VOTE`.
        mean: over all clients.
        worst: of the client with the lowest accuracy.
        clients: size of the selector's cluster; ``None`` without clusters.
        members: mean over the clients of its own cluster; ``None`` if none of them is listed separately.
        others: mean over the other clients, likewise.
        newcomers: mean over the clients that never took part; ``None`` if there are none.
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
    """Return the names that are accuracies of single selectors, in the order of the selectors.

    >>> selector_figures(["margin", "selector_10_accuracy", "selector_2_accuracy"])
    ['selector_2_accuracy', 'selector_10_accuracy']
    """
    numbers = {int(m[1]): name for name in figures if (m := re.fullmatch(r"selector_(\d+)_accuracy", name))}
    return [numbers[u] for u in sorted(numbers)]


def agreements(figures: Mapping[str, Any], clusters: Clusters = ()) -> list[Agreement]:
    """Return the agreement of each selector, then of their majority; empty with fewer than two selectors.

    The mean of a cluster covers those of its clients that have enough pairs to be listed separately.

    Args:
        figures: the content of ``summary.json``.
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
