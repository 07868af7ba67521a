"""The table ``[cohort]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prefed.core.strict import StrictModel


class CohortConfig(StrictModel):
    """How many clients take part in a round, and how they are drawn.

    >>> CohortConfig(fraction=0.1).of(53), CohortConfig().of(53)
    (5, None)
    """

    size: int | None = Field(None, ge=1, description="clients a round; left out with fraction: all of them")
    fraction: float | None = Field(None, gt=0, le=1, description="share of the clients, instead of size")

    sampling: Literal["fixed", "poisson"] = Field(
        "fixed",
        description="fixed: so many clients, drawn without replacement; poisson: each client for itself, all "
        "with one probability, so that size is what to expect",
    )
    offences: int | None = Field(
        None,
        ge=1,
        description="bad uploads of a client after which the server asks it no more; left out: any number",
    )

    @model_validator(mode="after")
    def _one(self) -> CohortConfig:
        if self.size is not None and self.fraction is not None:
            raise ValueError("give size or fraction, not both")
        if self.sampling == "poisson" and self.size is None and self.fraction is None:
            raise ValueError("sampling 'poisson' needs size or fraction: without them all clients take part")
        return self

    def of(self, clients: int) -> int | None:
        """Clients a round, out of ``clients`` in all, and at least one; ``None`` for all."""
        return self.size if self.fraction is None else max(1, round(self.fraction * clients))
