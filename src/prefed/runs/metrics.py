"""The metrics of a run with their labels and meanings, and how selectors and their clusters agree."""

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

USUAL = (
    "baseline_accuracy",
    "shared_accuracy",
    "preference_accuracy",
    "reward_accuracy",
    "normalized_accuracy",
    "combined_accuracy",
    "explicit_accuracy",
    "agreement",
    "majority_accuracy",
)
"""Usual figures, in the order in which they are shown. Other figures follow in the run's own order."""

CHOICE_WORDS: Mapping[str, tuple[str, str]] = {
    "baseline_accuracy": ("before", "the untouched model"),
    "preference_accuracy": (
        "preference accuracy",
        "the client's selector, which is that of its cluster where there are some",
    ),
    "reward_accuracy": ("reward accuracy", "that selector too: its score is its only reward"),
    "majority_accuracy": ("majority accuracy", "more selectors than not"),
}
"""Figures of selectors: their labels, and whose scores they are about."""
TASTE_WORDS: Mapping[str, tuple[str, str]] = {
    **CHOICE_WORDS,
    "shared_accuracy": ("shared model", "the selector with the population's taste"),
    "preference_accuracy": ("own model", "the selector with the client's own taste"),
}
"""The same of a selector with a latent taste."""

REWARD_MEANING = (
    "share of pairs on which training raised the log-probability of the chosen response by more than that of "
    "the rejected one, both compared with the untouched model"
)
REWARDED = ("combined_accuracy", "explicit_accuracy", "agreement")
"""Figures that only models with an explicit reward head have."""


@dataclass(frozen=True)
class Figure:
    """A figure that every evaluated client has.

    Attributes:
        name: as in ``summary.json``.
        label: heading of its column or curve.
        meaning: one sentence.
        values: of all clients, after the last round.
    """

    name: str
    label: str
    meaning: str
    values: FederatedMetric


def figures_of(summary: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures in a summary that every client has, by name, in the order in which they are shown."""
    values = metrics_of_clients(summary)
    personal, choice = "shared_accuracy" in values, "choice_loss" in summary
    kind = "taste" if personal and choice else "personal" if personal else "choice" if choice else ""
    order = [name for name in USUAL if name in values] + [name for name in values if name not in USUAL]
    return {name: Figure(name, *_words(name, kind), values[name]) for name in order}


def _words(name: str, kind: str) -> tuple[str, str]:
    """The label and the meaning of a figure.

    Args:
        kind: ``"personal"`` of a method with models of clients' own, ``"choice"`` of one with selectors,
            ``"taste"`` of one with a selector that has a latent taste.
    """
    probable = "share of pairs whose chosen response the model assigns a higher probability"
    scored = "share of pairs whose chosen response scores higher than the rejected one, by {}"
    if kind == "choice" and (number := re.fullmatch(r"selector_(\d+)_accuracy", name)):
        return f"selector {number[1]}", scored.format(f"selector {number[1]} alone")
    words = {"choice": CHOICE_WORDS, "taste": TASTE_WORDS}.get(kind, {})
    if name in words:
        label, by = words[name]
        return label, scored.format(by)
    known = {
        "baseline_accuracy": ("before", f"{probable}, by the untouched model"),
        "shared_accuracy": (
            "shared model",
            f"{probable}, by the shared model without the client's own parts",
        ),
        "preference_accuracy": (
            ("own model", f"{probable}, by the client's own model")
            if kind == "personal"
            else ("preference accuracy", probable)
        ),
        "reward_accuracy": (
            "reward accuracy",
            REWARD_MEANING,
        ),
        "normalized_accuracy": ("normalised accuracy", f"{probable}, per token"),
        "combined_accuracy": (
            "combined accuracy",
            "share of pairs whose chosen response has the higher sum of both margins, the model's own and "
            "the reward head's, weighted as in the loss",
        ),
        "explicit_accuracy": (
            "explicit accuracy",
            "share of pairs whose chosen response the reward head scores higher",
        ),
        "agreement": (
            "agreement",
            "share of pairs on which the reward head favours the response that gained more log-probability",
        ),
    }
    plain = name.replace("_", " ")
    return known.get(name, (plain.removesuffix(" accuracy"), plain))


MEANINGS: Mapping[str, tuple[str, str]] = {
    "gate": (
        "gates",
        "how much of its own LoRA a client lets in beside the shared one, block by block: "
        "0 is the shared model alone, 1 all of its own",
    ),
    "weight": (
        "weights of the shared model",
        "how much of the shared model a client takes in, block by block: 1 is all of it, 0 none",
    ),
}
"""Figure → its heading and its meaning. Other figures have their name as heading and meaning."""


@dataclass(frozen=True)
class Profile:
    """One figure of every block from private states, for the clients that took part.

    It shows which layers each client personalises.

    Attributes:
        name: as in ``summary.json``.
        label: heading of its plot or table.
        meaning: one sentence.
        clients: sorted.
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
        """``[blocks]`` mean over the clients that have a value."""
        means: npt.NDArray[np.float64] = np.nanmean(self.values, axis=0)
        return means

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return float(np.nanmin(self.values)), float(np.nanmax(self.values))

    @property
    def ends(self) -> str:
        """The means of the first and the last block, in words."""
        first, last = self.blocks[0], self.blocks[-1]
        if first == last:
            return f"{self.means[0]:.2f} in block {first}"
        return f"{self.means[0]:.2f} in block {first}, {self.means[-1]:.2f} in block {last}"


def profiles_of(summary: Mapping[str, Any]) -> dict[str, Profile]:
    """The profiles in a ``summary.json``, by name.

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
