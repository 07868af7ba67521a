"""The ``[checkpoint]`` table: which earlier commits a run keeps, for a later replay from one of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from prefed.core.strict_settings import StrictModel


class CheckpointConfig(StrictModel):
    """Commits that a run keeps besides the last, from which `prefed forget` can replay."""

    keep: Literal["all", "log"] | Annotated[int, Field(ge=1)] = Field(
        "log",
        description="all; the newest commits, by number; or log: about 2·log2(rounds) of them, so that a "
        "replay computes at most twice the rounds since any given one",
    )

    def keeps(self, number: int, last: int) -> bool:
        """Whether the commit of round ``number`` is kept after round ``last``.

        With ``"log"``, a round is kept up to the age of 4 · (p - 1), where p is the largest power of two that
        divides it. The d + 1 rounds of ages d to 2d include a multiple of some p > (d + 1) / 2, and
        2d <= 4 · (p - 1).

        >>> [number for number in range(1, 41) if CheckpointConfig(keep="log").keeps(number, 40)]
        [16, 24, 28, 32, 36, 38, 40]
        >>> [number for number in range(1, 41) if CheckpointConfig(keep=2).keeps(number, 40)]
        [39, 40]
        """
        if self.keep == "log":
            return last - number <= 4 * ((number & -number) - 1)
        return self.keep == "all" or last - number < self.keep
