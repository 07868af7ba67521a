"""The experiment file as typed records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import tomli_w
from pydantic import (
    BaseModel,
    Field,
    SerializeAsAny,
    ValidationError,
    model_serializer,
    model_validator,
)

from prefed.config.align import AlignConfig
from prefed.config.cluster import RayConfig
from prefed.config.errors import ConfigError, explain
from prefed.config.file import Origins, make_absolute, override, parse_toml, read_toml
from prefed.config.parts import check_every_weight, model_parts
from prefed.config.shorthand import fleet_of, graph_of
from prefed.core import Privacy
from prefed.core.strict import StrictModel
from prefed.core.text import did_you_mean
from prefed.data import DataConfig, SelectorConfig
from prefed.fleet import FleetConfig
from prefed.merge import MergeConfig
from prefed.merge.graphs import GraphConfig
from prefed.methods import METHODS, MethodKind, TrainingSettings
from prefed.models import ModelConfig, VariationalSettings


class CohortConfig(StrictModel):
    """How many clients take part in a round; they are drawn without replacement.

    >>> CohortConfig(fraction=0.1).of(53), CohortConfig().of(53)
    (5, None)
    """

    size: int | None = Field(None, ge=1, description="clients a round; left out with fraction: all of them")
    fraction: float | None = Field(None, gt=0, le=1, description="share of the clients, instead of size")

    @model_validator(mode="after")
    def _one(self) -> CohortConfig:
        if self.size is not None and self.fraction is not None:
            raise ValueError("give size or fraction, not both")
        return self

    def of(self, clients: int) -> int | None:
        """Clients a round, out of ``clients`` in all, and at least one; ``None`` for all."""
        return self.size if self.fraction is None else max(1, round(self.fraction * clients))


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
        description="seconds that a worker may take for one client's visit or evaluation; then it is ended "
        "and the run stops, to be resumed, or with ray another one tries; 0: any time",
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


class Experiment(StrictModel):
    """A whole experiment: everything that a run needs to know.

    >>> experiment = Experiment(
    ...     data={"train": "pairs.jsonl", "partition": {"by": "iid", "clients": 4}},
    ...     model={"name": "distilbert/distilgpt2"},
    ...     method={"name": "feddpo", "lr": 1e-3},
    ... )
    >>> experiment.method.settings.lr, experiment.rounds
    (0.001, 20)
    >>> Experiment.parse(to_toml(experiment)) == experiment
    True
    """

    seed: int = Field(42, description="seed of every random draw")
    rounds: int = Field(20, ge=1, description="communication rounds")
    data: DataConfig = Field(description="sources of the preferences, and their clients")
    model: ModelConfig = Field(description="which causal language model is aligned, and how")
    cohort: CohortConfig = Field(default_factory=CohortConfig, description="the clients of a round")
    method: MethodConfig = Field(description="the method and its settings")
    selector: SelectorConfig = Field(
        default_factory=lambda: SelectorConfig(),
        description="how selectors are asked which response is better, for methods that train selectors",
    )
    merge: MergeConfig = Field(default_factory=lambda: MergeConfig(), description="how uploads merge")
    fleet: FleetConfig | None = Field(
        None,
        description="a simulated fleet of clients, of different speeds, some of them late; left out: "
        "everybody replies in its round",
    )
    graph: GraphConfig | None = Field(
        None,
        description="who is whose neighbour, for a method without its server; left out: a server, but for "
        "decdpo, whose clients stand in a ring",
    )
    evaluate: EvaluateConfig = Field(
        default_factory=lambda: EvaluateConfig(), description="how clients' models are evaluated"
    )
    privacy: Privacy = Field(default_factory=lambda: Privacy(), description="limits on what leaves a client")
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig(), description="where clients work")
    align: AlignConfig | None = Field(
        None,
        description="how the server aligns a model of its own after the last round, with prompts and the "
        "clients' selectors; left out: not at all",
    )

    @model_validator(mode="after")
    def _selectors(self) -> Experiment:
        if self.align is not None and self.method.kind.reads != "choice":
            named = ", ".join(name for name, kind in METHODS.items() if kind.reads == "choice")
            raise ValueError(
                f"[align] needs selectors, and {self.method.name} trains none: take one of {named}, or leave "
                "[align] out"
            )
        if self.data.score == "whole" and self.method.kind.reads == "choice":
            raise ValueError(
                "[data] score = 'whole' is what a policy is scored on, and "
                f"{self.method.name} trains selectors: leave it out"
            )
        count = getattr(self.method.settings, "selectors", 1)
        if self.align is not None and isinstance(self.align.labels, int) and self.align.labels >= count:
            raise ValueError(
                f"[align] labels = {self.align.labels}: {self.method.name} trains {count} selectors here, "
                "numbered from 0"
            )
        if self.align is not None:
            self.align.check_tastes(self.method.name, self.has_tastes)
        return self

    @property
    def has_tastes(self) -> bool:
        """Whether the method's models have a latent taste."""
        return "variational" in self.method.kind.needs(self.method.settings)

    @model_validator(mode="after")
    def _every_weight(self) -> Experiment:
        if self.model.train == "full":
            check_every_weight(self.method.kind, self.method.settings, self.merge, self.align)
        return self

    @model_validator(mode="after")
    def _coherent(self) -> Experiment:
        fleet = self.whole_fleet
        if self.whole_graph is None:
            return self
        if self.cohort != CohortConfig():
            raise ValueError("[cohort]: without a server all clients train in every round: leave it out")
        if fleet is not None:
            raise ValueError("[fleet]: its clock is a server's, and a graph has none: leave one of them out")
        return self

    @property
    def parts(self) -> frozenset[str]:
        """The parts that the model must have, for the method and the merge rule."""
        return model_parts(self.model, self.method.kind, self.method.settings, self.merge)

    @property
    def whole_fleet(self) -> FleetConfig | None:
        """``[fleet]`` with what the method's settings say of it; ``None`` where nothing does."""
        return fleet_of(self.method.settings, self.fleet)

    @property
    def whole_graph(self) -> GraphConfig | None:
        """``[graph]`` with what the method's settings say of it; ``None`` where there is a server."""
        return graph_of(self.method.settings, self.graph)

    @property
    def whole_merge(self) -> MergeConfig:
        """``[merge]``, where ``late`` says what a late upload counts as, unless all are in time."""
        fleet = self.whole_fleet
        if fleet is None or self.merge.late is not None:
            return self.merge
        late = "delta" if fleet.server == "buffered" else "model"
        return self.merge.model_copy(update={"late": late})

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
        """Read an experiment file.

        A path to data or to a model folder is relative to the file's folder, or else to the working folder.
        It becomes absolute. A name that is no path there stays as it is: it is a hub name.

        Args:
            overrides: ``"key.sub=value"`` each. The value is written as in TOML; a bare word is a string.

        Raises:
            ConfigError: the file or an override cannot be read, names an unknown key, or has a value that is
                not allowed. The message names the place, the problem and a remedy.
        """
        path = Path(path)
        tables = read_toml(path)
        make_absolute(tables, (path.parent, Path()))
        return cls.from_tables(tables, str(path), override(tables, overrides, path.parent))

    @classmethod
    def parse(cls, text: str) -> Experiment:
        """Read an experiment from a TOML text; relative paths in it stay relative.

        Raises:
            ConfigError: the text is not TOML, or not a valid experiment.
        """
        return cls.from_tables(parse_toml(text, "the text"), "the text")

    @classmethod
    def from_tables(
        cls, tables: Mapping[str, Any], where: str, origins: Origins = MappingProxyType({})
    ) -> Experiment:
        """Validate nested tables.

        Args:
            where: the file that they come from, for messages.
            origins: path of a key → the option that set it, for keys that the file does not set.

        Raises:
            ConfigError: they are not a valid experiment; the message has a line for each problem.
        """
        try:
            return cls.model_validate(dict(tables))
        except ValidationError as error:
            raise ConfigError(explain(error, cls, tables, where, origins)) from None

    def tables(self) -> dict[str, Any]:
        """Nested tables with every default filled in, without the keys that are ``None``.

        Tables that the method does not read are left out where they have their defaults: ``[selector]``, and
        ``[model.variational]``. So are keys of other models and data than the usual. Runs store a digest of
        these tables, and earlier versions had none of them.
        """
        model = {"train"} if self.model.train == "lora" else set()
        unread: dict[str, Any] = {"model": model, "align": {"model": {"train"}}, "data": self.data.unread()}
        if self.method.kind.reads == "policy" and self.selector == SelectorConfig():
            unread["selector"] = True
        if not self.has_tastes and self.model.variational == VariationalSettings():
            model.add("variational")
        if not self.evaluate.unseen_pairs:
            unread["evaluate"] = {"unseen_pairs"}
        return self.model_dump(mode="json", exclude_none=True, exclude=unread)


def to_toml(experiment: Experiment) -> str:
    """Write an experiment, with every default filled in, as :meth:`Experiment.parse` reads it."""
    return tomli_w.dumps(experiment.tables())
