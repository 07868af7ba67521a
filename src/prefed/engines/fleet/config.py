"""The ``[fleet]`` table: how fast clients are, when they are there, and what the server waits for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prefed.core.strict import StrictModel


class FleetConfig(StrictModel):
    """A simulated fleet. By default all clients are equally fast and always there, and none is late.

    Raises:
        ValueError: two of the keys cannot serve together; the error says why.
    """

    server: Literal["synchronous", "buffered"] = Field(
        "synchronous",
        description="synchronous waits for the whole cohort; buffered keeps as many clients at work as a "
        "cohort has, and merges when enough replies are in",
    )
    max_delay: int = Field(
        0,
        ge=0,
        description="synchronous: a client starts from a model that is 0 to so many rounds old, drawn for "
        "each client and round",
    )
    buffer: int | None = Field(
        None, ge=1, description="buffered: replies that a merge needs; left out: as many as a cohort has"
    )
    seconds: float = Field(1.0, gt=0, description="mean time that a client takes for a visit")
    speeds: Literal["equal", "uniform", "lognormal", "exponential"] = Field(
        "equal", description="how clients' own times lie around that mean"
    )
    spread: float | None = Field(
        None,
        gt=0,
        description="of uniform: half of its width, as a share of the mean; of lognormal: sigma",
    )
    jitter: float = Field(0.0, ge=0, description="sigma of a lognormal factor of mean 1 on each visit's time")
    network: float = Field(0.0, ge=0, description="seconds for the messages of a visit, both ways")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that a visit ends without a reply, at any moment of it"
    )
    online: float | None = Field(
        None, gt=0, description="mean seconds that a client is there at a time; left out: always"
    )
    offline: float | None = Field(None, gt=0, description="mean seconds that it is away in between")
    trace: str | None = Field(
        None,
        description="a CSV or JSON lines file with times when each client is there, and its speed then",
    )
    period: float | None = Field(None, gt=0, description="seconds after which the trace begins anew")

    @model_validator(mode="after")
    def _coherent(self) -> FleetConfig:
        if self.server == "buffered" and self.max_delay:
            raise ValueError("with a buffered server delays follow from the speeds: leave out max_delay")
        if self.server == "synchronous" and self.buffer is not None:
            raise ValueError("buffer belongs to the buffered server; a synchronous one waits for its cohort")
        if (self.speeds in ("uniform", "lognormal")) != (self.spread is not None):
            raise ValueError("spread belongs to speeds 'uniform' and 'lognormal', which need it")
        if self.speeds == "uniform" and self.spread is not None and self.spread >= 1:
            raise ValueError("spread of uniform speeds is below 1: no visit takes no time")
        if (self.online is None) != (self.offline is None):
            raise ValueError("online and offline go together: give both or none")
        if self.trace is not None and self.online is not None:
            raise ValueError("the trace says when clients are there: leave out online and offline")
        if self.period is not None and self.trace is None:
            raise ValueError("period belongs to a trace")
        return self
