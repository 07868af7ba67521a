"""The ``[engine.ray]`` table."""

from __future__ import annotations

from pydantic import Field, model_validator

from prefed.core.strict import StrictModel


class RayConfig(StrictModel):
    """A Ray cluster whose machines share the clients' work. No number depends on it."""

    address: str | None = Field(
        None,
        min_length=1,
        description='the cluster, "HOST:PORT" or "auto" for the one that this machine belongs to; left out: '
        "a cluster of this machine alone, started for the run",
    )
    num_gpus: float = Field(
        0, ge=0, description="GPUs of each actor; a share such as 0.5 puts several actors on one GPU"
    )
    ship_model: bool = Field(
        True,
        description="copy a model's folder to the machines; false: it is at the same path on each of them",
    )

    @model_validator(mode="after")
    def _countable(self) -> RayConfig:
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError("num_gpus is a share of one GPU, or a whole number of GPUs")
        return self
