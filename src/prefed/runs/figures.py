"""The figures of a run that every client has, with their labels and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefed.metrics import FederatedMetric

__all__ = ["REWARDED", "USUAL", "Figure", "figures_of"]

USUAL = (
    "baseline_accuracy",
    "shared_accuracy",
    "preference_accuracy",
    "reward_accuracy",
    "normalized_accuracy",
    "combined_accuracy",
    "explicit_accuracy",
    "agreement",
)
"""Usual figures, in the order in which they are shown. Other figures follow in the run's own order."""

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
    values = {name: value for name, value in summary.items() if _per_client(value)}
    personal = "shared_accuracy" in values
    order = [name for name in USUAL if name in values] + [name for name in values if name not in USUAL]
    return {name: Figure(name, *_words(name, personal), values[name]) for name in order}


def _per_client(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("per_client"), Mapping)


def _words(name: str, personal: bool) -> tuple[str, str]:
    """The label and the meaning of a figure."""
    likelier = "share of pairs whose chosen response the model finds likelier than the rejected one"
    known = {
        "baseline_accuracy": ("before", f"{likelier}, by the untouched model"),
        "shared_accuracy": (
            "shared model",
            f"{likelier}, by the shared model without the client's own parts",
        ),
        "preference_accuracy": (
            ("own model", f"{likelier}, by the client's own model") if personal else ("after", likelier)
        ),
        "reward_accuracy": (
            "reward",
            "share of pairs whose chosen response gained more likelihood over the untouched model",
        ),
        "normalized_accuracy": ("per token", f"{likelier}, token for token"),
        "combined_accuracy": (
            "combined",
            "share of pairs whose chosen response is favoured by both margins together, the model's own and "
            "the reward head's, weighed as in the loss",
        ),
        "explicit_accuracy": (
            "reward head",
            "share of pairs whose chosen response the reward head scores higher",
        ),
        "agreement": (
            "agreement",
            "share of pairs on which the reward head favours the response that gained more likelihood",
        ),
    }
    plain = name.replace("_", " ")
    return known.get(name, (plain.removesuffix(" accuracy"), plain))
