"""The ``[stop]`` table: which round of a run is the best, and when a run stops before its last."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prefed.core.strict import StrictModel
from prefed.methods import MethodKind, TrainingSettings


class StopConfig(StrictModel):
    """The best round of a run is kept beside the last, and a run that gets no better stops.

    Both are judged on clients' validation pairs, never on test pairs.
    """

    patience: int | None = Field(
        None,
        ge=1,
        description="stop after so many evaluations in a row that are no better; left out: run to the last "
        "round, and keep the best",
    )
    metric: Literal[
        "preference_accuracy", "reward_accuracy", "combined_accuracy", "majority_accuracy", "loss"
    ] = Field(
        "preference_accuracy",
        description="the figure that judges: an accuracy, or the evaluated loss, of which less is better",
    )
    over: Literal["mean", "worst"] = Field("mean", description="of all clients, or of the worst one")
    delta: float = Field(
        0.0, ge=0, description="how much better than the best a round must be to count as better"
    )

    def check(self, kind: MethodKind, settings: TrainingSettings, every: int) -> None:
        """Refuse what the run cannot be judged by.

        Args:
            every: rounds from one evaluation to the next; 0 for one after the last round alone.

        Raises:
            ValueError: it has no evaluation before its last round, or the method has no such figure.
        """
        if not every:
            raise ValueError(
                "[stop] judges by evaluations, and with [evaluate] every = 0 the last round alone has one: "
                "set it to 1 or more"
            )
        without = {
            "combined_accuracy": "reward" not in kind.needs(settings) and "no reward head",
            "majority_accuracy": getattr(settings, "selectors", 1) < 2 and "no selectors that vote",
        }
        if reason := without.get(self.metric):
            raise ValueError(
                f"[stop] metric = {self.metric!r}: {kind.name} has {reason} here: take another figure, such "
                "as preference_accuracy"
            )
