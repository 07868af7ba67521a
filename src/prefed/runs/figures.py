"""The figures of a run, with their labels and meanings: of every client, and of each block of its model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
