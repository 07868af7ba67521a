"""What FedBis and FedBiscuit have in common: how a client trains a selector."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from prefed.core import Objective
from prefed.methods.base.settings import TrainingSettings

CHOICE = Objective("choice")
"""Cross-entropy over the two letters, mean over both orders of a pair (FedBiscuit, eq. 3)."""


class SelectorSettings(TrainingSettings):
    """How a client trains a selector: FedBiscuit, tables 3 and 4.

    >>> SelectorSettings().batches(), SelectorSettings().local_steps
    ((16, 1), 30)
    >>> SelectorSettings(local_epochs=2).local_steps is None
    True
    """

    lr: float = Field(1e-5, gt=0, description="learning rate of the local optimiser")
    batch_size: int = Field(
        32, ge=2, description="pairs in a batch, each order of a pair counted: 32 is 16 pairs in both orders"
    )
    local_steps: int | None = Field(
        30, ge=1, description="optimiser steps of a visit; give this or local_epochs"
    )
    local_epochs: int | None = Field(
        None, ge=1, description="passes of a visit over the client's pairs; give this or local_steps"
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="decay rates of adamw's and adam's moment estimates"
    )

    @model_validator(mode="before")
    @classmethod
    def _epochs_alone(cls, values: Any) -> Any:
        # local_epochs alone replaces the default number of steps.
        if isinstance(values, dict) and values.get("local_epochs") is not None:
            return {"local_steps": None, **values}
        return values

    @model_validator(mode="after")
    def _both_orders(self) -> SelectorSettings:
        if self.batch_size % 2:
            raise ValueError(f"batch_size counts both orders of a pair: make {self.batch_size} even")
        return self

    def goal(self) -> Objective:
        """The loss that clients minimise."""
        return CHOICE

    def batches(self) -> tuple[int, int]:
        """Pairs in a batch, and batches that make an optimiser step."""
        return self.batch_size // 2, self.accumulate
