"""The experiment file's tables on clients, methods, evaluation, engines, reports and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SerializeAsAny, field_validator, model_serializer, model_validator

from prefed.core.strict_settings import StrictModel
from prefed.core.text import pluralize
from prefed.engines.config import StopConfig
from prefed.methods import METHODS, MethodKind, TrainingSettings


def method_kind(name: str) -> MethodKind:
    """Look up a method, which a user named if it is from outside prefed.

    Raises:
        ValueError: unknown method; the message suggests the nearest name.
    """
    if name not in METHODS:
        raise ValueError(f"no method is called {name!r}{METHODS.hint(name)}")
    return METHODS[name]


class MethodConfig(BaseModel):
    """A method's name and settings.

    A file or mapping has them in one table: ``{"name": "feddpo", "lr": 1e-4}``.

    Attributes:
        name: one of :data:`prefed.methods.METHODS`, or the place of another method.
        settings: instance of that method's settings class.
    """

    model_config = {"frozen": True, "extra": "forbid"}

    name: str
    settings: SerializeAsAny[TrainingSettings]

    @model_validator(mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping) or isinstance(value.get("settings"), TrainingSettings):
            return value
        name = value.get("name")
        if not isinstance(name, str):
            raise ValueError(f"name is required, one of: {', '.join(METHODS)}")
        settings = {key: item for key, item in value.items() if key != "name"}
        return {"name": name, "settings": method_kind(name).Settings.model_validate(settings)}

    @model_serializer
    def _join(self) -> dict[str, Any]:
        return {"name": self.name, **self.settings.model_dump(mode="json", exclude_none=True)}

    @property
    def kind(self) -> MethodKind:
        """The method's entry in the registry."""
        return METHODS[self.name]


def check_stop(stop: StopConfig, kind: MethodKind, settings: TrainingSettings, every: int) -> None:
    """Check that the metric of ``[stop]`` is available during the run; ``every`` is that of ``[evaluate]``.

    Raises:
        ValueError: only the last round is evaluated, or the method does not have the metric.
    """
    if not every:
        raise ValueError(
            "[stop] needs evaluations, but with [evaluate] every = 0 only the last round is evaluated: "
            "set every to 1 or more"
        )
    without = {
        "combined_accuracy": "reward" not in kind.needs(settings)
        and f"{kind.name} has no reward head with these settings",
        "majority_accuracy": getattr(settings, "selectors", 1) < 2
        and f"{kind.name} has no selectors that vote with these settings",
        "loss": not settings.feedback.stop_loss
        and f"it is the DPO loss of pairs, but clients train on {settings.feedback.name}",
    }
    if reason := without.get(stop.metric):
        raise ValueError(
            f"[stop] metric = {stop.metric!r}: {reason}; use another metric, such as preference_accuracy"
        )


class RayConfig(StrictModel):
    """A Ray cluster that runs the clients. It does not affect results."""

    address: str | None = Field(
        None,
        min_length=1,
        description='the cluster, "HOST:PORT" or "auto" for the one of this machine; default: '
        "a cluster of only this machine, started for the run",
    )
    num_gpus: float = Field(
        0, ge=0, description="GPUs per actor; a fraction such as 0.5 puts several actors on one GPU"
    )
    ship_model: bool = Field(
        True,
        description="copy a model's folder to the machines; false: it is at the same path on each",
    )

    @model_validator(mode="after")
    def _countable(self) -> RayConfig:
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError("num_gpus must be a fraction of one GPU, or a whole number of GPUs")
        return self


class EngineConfig(StrictModel):
    """Where and how clients run.

    Only ``threads``, ``max_tokens``, ``stack`` and ``state_dtype`` can affect results.
    """

    name: Literal["local", "ray"] = Field("local", description="on this machine, or on a Ray cluster")
    workers: int = Field(
        0,
        ge=0,
        description="worker processes; 0: only this process, or with ray as many as fit",
    )
    visit_timeout: float = Field(
        0,
        ge=0,
        description="timeout in seconds of a client's training or evaluation in a worker process, on Ray or "
        "in a peer; then another worker tries, at most three in total; 0: no timeout",
    )
    devices: list[Annotated[str, Field(pattern=r"^cuda:\d+$")]] | None = Field(
        None,
        min_length=1,
        description='CUDA devices of the processes, e.g. ["cuda:0", "cuda:1"]: one for each '
        "worker, in turn; default: all visible devices",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="threads per process; default: the machine's cores, divided equally; with ray 1",
    )
    max_tokens: int = Field(4096, ge=1, description="tokens per forward pass; larger batches are split")
    stack: int = Field(
        1,
        ge=1,
        description="number of clients that train together, sharing passes over the model",
    )
    state_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="dtype of clients' private tensors on disk"
    )
    ray: RayConfig | None = Field(None, description="the Ray cluster and its GPUs; only with name = 'ray'")

    @property
    def backend(self) -> str:
        """The name in :data:`prefed.engines.BACKENDS`."""
        return self.name if self.name != "local" else "processes" if self.workers else "in_process"

    @model_validator(mode="after")
    def _placed(self) -> EngineConfig:
        devices = self.devices or []
        if devices and self.name != "local":
            raise ValueError(
                f"devices does not apply to name = {self.name!r}, which assigns GPUs to its actors: remove "
                "it, and set ray.num_gpus"
            )
        if self.stack > 1 and self.backend != "in_process":
            raise ValueError(
                f"stack = {self.stack} needs all clients in one process: remove it, or use name = 'local' "
                "with workers = 0"
            )
        if len(set(devices)) < len(devices):
            raise ValueError(f"devices = {devices!r} lists a device twice: list each device once")
        if len(devices) > max(1, self.workers):
            processes = pluralize(max(1, self.workers), "process", "processes")
            raise ValueError(
                f"devices = {devices!r} lists {len(devices)} devices for {processes}: set workers = "
                f"{len(devices)}, or list fewer"
            )
        return self


class ReportConfig(StrictModel):
    """What the models of a run write, for its page: the most likely text, without sampling.

    >>> ReportConfig(prompts="Name a colour.").prompts
    ['Name a colour.']
    """

    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1,
        description="a prompt or a list of prompts, answered by the base model and, after rounds 1, 2, "
        "4, 8, … and the last, by the shared model and by clients' own; a text becomes a user's turn if the "
        "clients' prompts are dialogues",
    )
    clients: list[str] | None = Field(
        None,
        description="clients whose own models answer too; default: the first two, of a method with personal "
        "models",
    )
    max_new_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum number of tokens in an answer; default: twice those of the longest chosen "
        "response of the held-out pairs, from 64 to 256",
    )

    @field_validator("prompts", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class TrackConfig(StrictModel):
    """Experiment trackers to log to. They do not affect results and may change when a run resumes.

    >>> TrackConfig(to="tensorboard").to
    ['tensorboard']
    """

    to: list[str] = Field(
        min_length=1,
        description="the trackers, a name or a list of names: tensorboard, wandb, mlflow, trackio",
    )
    project: str = Field(
        "prefed", min_length=1, description="the project of the run; MLflow calls it an experiment"
    )
    name: str | None = Field(
        None, min_length=1, description="the run's name in the tracker; default: that of its run directory"
    )
    clients: bool = Field(
        True,
        description="log every client's metrics by its id; false: nothing that names a client, and no page",
    )
    page: bool = Field(
        True,
        description="include the page of `prefed report`, without the sections that only its owner may read",
    )

    @field_validator("to", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("to")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        from prefed.trackers.tools import TRACKERS

        for name in value:
            if name not in TRACKERS:
                raise ValueError(f"no tracker is called {name!r}{TRACKERS.hint(name)}")
        return value
