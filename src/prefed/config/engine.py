"""The table ``[engine]``; that of Ray is in :mod:`prefed.config.cluster`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prefed.config.cluster import RayConfig
from prefed.core.strict import StrictModel


class EngineConfig(StrictModel):
    """Where clients work. Only ``threads``, ``max_tokens`` and ``state_dtype`` can change a digit."""

    name: Literal["local", "ray"] = Field("local", description="on this machine, or on a Ray cluster")
    workers: int = Field(
        0,
        ge=0,
        description="processes that share the clients' work; 0: only this one, or with ray as many as fit",
    )
    visit_timeout: float = Field(
        0,
        ge=0,
        description="seconds that a worker may take for one client's visit or evaluation; then another "
        "worker tries, three in all; 0: any time",
    )
    devices: list[Annotated[str, Field(pattern=r"^cuda:\d+$")]] | None = Field(
        None,
        min_length=1,
        description='CUDA devices that the processes share, such as ["cuda:0", "cuda:1"]: one for each '
        "worker, in turn; left out: all that this program sees",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="threads of each process; left out: the machine's cores, shared out; with ray 1",
    )
    max_tokens: int = Field(4096, ge=1, description="tokens of one forward pass; larger batches are split")
    state_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="dtype of clients' private tensors on disk"
    )
    ray: RayConfig | None = Field(None, description="which Ray cluster, and GPUs; read with name ray alone")

    @model_validator(mode="after")
    def _placed(self) -> EngineConfig:
        devices = self.devices or []
        if devices and self.name == "ray":
            raise ValueError(
                "devices are those of this machine, and Ray gives each actor its own: leave them out, and "
                "set ray.num_gpus"
            )
        if len(set(devices)) < len(devices):
            raise ValueError(f"devices = {devices!r} names one twice: workers take turns over them")
        if len(devices) > max(1, self.workers):
            raise ValueError(
                f"devices = {devices!r} are {len(devices)}, and the work is done in {max(1, self.workers)} "
                f"processes: set workers = {len(devices)}, or name fewer"
            )
        return self
