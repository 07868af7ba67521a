"""What a model card says of a model that the server aligned. No client is named, and no text quoted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prefed.core.text import pluralize
from prefed.runs.align import stored_settings
from prefed.runs.record import RunError, RunRecord, alignment_of
from prefed.train.metrics import mean_interval

SETTINGS = (
    *("objective", "beta", "optimizer", "lr", "clip", "batch_size", "epochs", "held_out"),
    *(
        "completions",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "tastes",
        "generations",
        "regenerate",
    ),
)
"""The keys of ``[align]`` that a card tells. Others may name a client or a path."""
AGREEMENT = "agreement"
MEANING = "share of held-out pairs of completions that the model orders as their labels do"


@dataclass(frozen=True)
class AlignedModel:
    """An alignment that is done.

    Attributes:
        summary: what ``align/summary.json`` holds.
        table: the ``[align]`` table that it was done with.
    """

    summary: Mapping[str, Any]
    table: Mapping[str, Any]

    @staticmethod
    def of(run: RunRecord) -> AlignedModel:
        """That of a run.

        Raises:
            RunError: the run has none, or its files are damaged.
        """
        outcome, table = alignment_of(run.path), stored_settings(run)
        if outcome is None or table is None:
            raise RunError(
                f"{run.path}/align: the alignment is not done; go on: prefed align {run.path} --resume"
            )
        return AlignedModel(outcome.summary, table)

    @property
    def what(self) -> str:
        """Who aligned it."""
        judged = str(self.table.get("labels", "")).startswith("judge:")
        labeller = "the labels of a judge" if judged else "the clients' selectors"
        return f"The server's own model, aligned with {labeller}"

    @property
    def settings(self) -> Iterator[tuple[str, Any]]:
        """The settings that may be told."""
        return ((f"align.{name}", self.table[name]) for name in SETTINGS if name in self.table)

    @property
    def data(self) -> str:
        """What it was trained on, in a sentence."""
        labels, train = self.summary["labels"], self.summary["train"]
        prompts = pluralize(self.summary["prompts"]["kept"], "prompt", "prompts")
        return (
            f"The server's model answered {prompts} of the server's own, which no client holds. Labels were "
            f"given to {labels['labelled']:,} pairs of answers; {train['pairs']:,} were trained on."
        )

    @property
    def agreement(self) -> float | None:
        """The share of held-out pairs that it orders as their labels; ``None`` without such pairs."""
        train = self.summary["train"]
        share: float | None = train["epochs"][train["kept"] - 1]["agreement"]
        return share

    @property
    def figures(self) -> list[tuple[str, str, str, str]]:
        """The agreement, with its 95% interval."""
        if self.agreement is None:
            return []
        low, high = mean_interval({AGREEMENT: self.agreement}, {AGREEMENT: self.summary["train"]["held_out"]})
        return [(AGREEMENT, f"{self.agreement:.1%}", f"{low:.1%} to {high:.1%}", MEANING)]

    @property
    def note(self) -> str:
        """On what it was measured."""
        train = self.summary["train"]
        pairs = pluralize(train["held_out"], "pair", "pairs")
        return (
            f"Measured on {pairs} of completions of prompts that were not trained on, after epoch "
            f"{train['kept']} of {len(train['epochs'])}, which was kept for it. No pair of a client is among "
            "them. The interval is Wilson's, and takes the pairs as independent."
        )
