"""The table ``[evaluate]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prefed.core.strict import StrictModel


class EvaluateConfig(StrictModel):
    """How clients' models are evaluated on their own pairs."""

    every: int = Field(
        1, ge=0, description="rounds from one evaluation to the next; 0: only after the last round"
    )
    split: Literal["test", "validation"] = Field(
        "test", description="the pairs that clients are evaluated on"
    )
    clients: int | None = Field(
        None, ge=1, description="evaluate at most so many clients, the same ones each time; left out: all"
    )
    beta: float | None = Field(
        None, gt=0, description="beta of the reported DPO loss; left out: the method's, else 0.1"
    )
    diagnose: int | None = Field(
        None,
        ge=1,
        description="rounds from one diagnosis to the next: the global objective's loss and gradient, how "
        "much clients' gradients differ, their variance; left out: none",
    )
    diagnostic_pairs: int | None = Field(
        None, ge=2, description="training pairs of each client that a diagnosis draws; left out: all"
    )
    unseen: int | list[str] = Field(
        0, description="clients, by number or by id, that never train; they are evaluated apart, as newcomers"
    )
    unseen_steps: list[int] = Field(
        [0],
        description="local steps a newcomer takes on its own pairs before its evaluation; one figure each",
    )
    unseen_pairs: list[int] = Field(
        [],
        description="for selectors with a latent taste: pairs from which a newcomer's taste is inferred, "
        "without a step, before its evaluation; one figure each",
    )

    @model_validator(mode="after")
    def _newcomers(self) -> EvaluateConfig:
        if isinstance(self.unseen, int) and self.unseen < 0:
            raise ValueError("unseen is a number of clients, 0 or more, or a list of their ids")
        if not self.unseen_steps or min(self.unseen_steps) < 0:
            raise ValueError("unseen_steps lists numbers of local steps, 0 or more")
        if any(pairs < 1 for pairs in self.unseen_pairs):
            raise ValueError("unseen_pairs lists numbers of pairs, 1 or more")
        return self
