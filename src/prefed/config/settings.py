"""The tables ``[cohort]``, ``[method]``, ``[evaluate]``, ``[stop]``, ``[engine]`` and ``[track]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SerializeAsAny, field_validator, model_serializer, model_validator

from prefed.core.strict_settings import StrictModel
from prefed.core.text import did_you_mean
from prefed.methods import METHODS, MethodKind, TrainingSettings


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


def method_kind(name: str) -> MethodKind:
    """Look a method up in the registry.

    Raises:
        ValueError: it has no such method; the message has the nearest name.
    """
    if name not in METHODS:
        raise ValueError(
            f"no method is called {name!r}{did_you_mean(name, METHODS)} (methods: {', '.join(METHODS)})"
        )
    return METHODS[name]


class MethodConfig(BaseModel):
    """A method's name and its settings.

    In a file and in a mapping they are in one table: ``{"name": "feddpo", "lr": 1e-4}``.

    Attributes:
        name: one of :data:`prefed.methods.METHODS`.
        settings: the record of that method's settings.
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
            raise ValueError(f"name says which method to run: {', '.join(METHODS)}")
        settings = {key: item for key, item in value.items() if key != "name"}
        return {"name": name, "settings": method_kind(name).Settings.model_validate(settings)}

    @model_serializer
    def _join(self) -> dict[str, Any]:
        return {"name": self.name, **self.settings.model_dump(mode="json", exclude_none=True)}

    @property
    def kind(self) -> MethodKind:
        """The method's entry in the registry."""
        return METHODS[self.name]


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


class TrackConfig(StrictModel):
    """Which tools are told how a run goes. No number depends on it, and a resumed run may have another one.

    >>> TrackConfig(to="tensorboard").to
    ['tensorboard']
    """

    to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        min_length=1, description="the tools, a name or a list of names"
    )
    project: str = Field(
        "prefed", min_length=1, description="the project of the run; MLflow calls it an experiment"
    )
    name: str | None = Field(
        None, min_length=1, description="the run's name there; left out: that of its run directory"
    )
    clients: bool = Field(
        True,
        description="tell every client's figures, by its id; false: nothing that names one, and no page",
    )
    page: bool = Field(
        True, description="add the page that prefed report makes, without what only its owner may read"
    )

    @field_validator("to", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value
