"""The experiment file as a typed record, with checks across its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import tomli_w
from pydantic import Field, ValidationError, model_validator

from prefed.config.align import AlignConfig
from prefed.config.file import (
    Origins,
    allow_code,
    code_of,
    make_absolute,
    name_method,
    override,
    parse_toml,
    read_toml,
)
from prefed.config.settings import (
    EngineConfig,
    MethodConfig,
    ReportConfig,
    TrackConfig,
    check_stop,
)
from prefed.core import Privacy
from prefed.core.plugins import Code
from prefed.core.strict_settings import ConfigError, StrictModel
from prefed.data import DataConfig, SelectorConfig
from prefed.engines.config import CohortConfig, EvaluateConfig, FleetConfig, StopConfig
from prefed.merge import MergeConfig, lora
from prefed.merge.config import PRODUCT_RULES, GraphConfig
from prefed.merge.lora import LORA
from prefed.methods import METHODS
from prefed.methods.base import VALUE
from prefed.models import ModelConfig
from prefed.store import CheckpointConfig

IN_MEMORY = "passed to run(data=...)"
"""The data source of an experiment that was made in Python without one."""


class Experiment(StrictModel):
    """All settings of a run.

    In Python, ``data`` may lack ``train`` if pairs are passed to :func:`~prefed.runs.run.run`, and the name
    of the method may be a :class:`~prefed.methods.MethodKind`.

    Raises:
        ConfigError: a key or a value is invalid; the message has one line per problem.

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

    seed: int = Field(42, description="random seed")
    rounds: int = Field(20, ge=1, description="communication rounds")
    data: DataConfig = Field(description="sources of the preferences, and their clients")
    model: ModelConfig = Field(description="the causal language model to align, and its trained parts")
    cohort: CohortConfig = Field(default_factory=CohortConfig, description="the clients of a round")
    method: MethodConfig = Field(description="the method and its settings")
    selector: SelectorConfig = Field(
        default_factory=lambda: SelectorConfig(),
        description="the selectors' prompt, for methods that train selectors",
    )
    merge: MergeConfig = Field(
        default_factory=lambda: MergeConfig(), description="how the server merges uploads"
    )
    fleet: FleetConfig | None = Field(
        None,
        description="a simulated fleet of clients with different speeds and delays; default: "
        "every client replies in its round",
    )
    graph: GraphConfig | None = Field(
        None,
        description="the graph of neighbours that replaces the server; default: a server, or for decdpo "
        "a ring",
    )
    evaluate: EvaluateConfig = Field(
        default_factory=lambda: EvaluateConfig(), description="how clients' models are evaluated"
    )
    stop: StopConfig | None = Field(
        None,
        description="keep the best round by validation pairs as well as the last, and allow early stopping; "
        "default: run every round, and keep only the last",
    )
    checkpoint: CheckpointConfig | None = Field(
        None, description="earlier commits that the run keeps; default: none"
    )
    privacy: Privacy = Field(
        default_factory=lambda: Privacy(), description="limits and noise on what leaves a client"
    )
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig(), description="where clients run")
    align: AlignConfig | None = Field(
        None,
        description="how the server aligns its own model after the last round, with prompts and the "
        "clients' selectors; default: not at all",
    )
    report: ReportConfig | None = Field(
        None, description="prompts that the run's models answer, for its page; default: none"
    )
    track: TrackConfig | None = Field(None, description="experiment trackers to log to; default: none")

    def __init__(self, **tables: Any) -> None:
        data = tables.setdefault("data", {})
        if isinstance(data, Mapping) and "train" not in data:
            tables["data"] = {"train": IN_MEMORY, "partition": {"by": "file"}, **data}
        name_method(tables)
        allow_code(tables)
        try:
            super().__init__(**tables)
        except ValidationError as error:
            raise _config_error(type(self), error, tables, "Experiment", {}) from None

    # Lets pydantic bypass __init__ when it validates, so that it does not wrap a ConfigError.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate nested tables.

        Raises:
            ConfigError: the experiment is invalid; the message has one line per problem.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _config_error(cls, error, obj, "Experiment", {}) from None

    @model_validator(mode="after")
    def _selectors(self) -> Experiment:
        if self.align is not None and self.method.kind.reads != "choice":
            named = ", ".join(name for name, kind in METHODS.builtin.items() if kind.reads == "choice")
            raise ValueError(
                f"[align] needs selectors, but {self.method.name} trains none: use one of {named}, or remove "
                "[align]"
            )
        if self.data.score == "whole" and self.method.kind.reads == "choice":
            raise ValueError(
                f"[data] score = 'whole' is for policies, but {self.method.name} trains selectors: remove it"
            )
        writes = self.method.kind.reads == "policy" and LORA in self.method.kind.needs(self.method.settings)
        if self.report is not None and not writes:
            raise ValueError(f"[report]: {self.method.name} trains no model that writes text: remove it")
        count = getattr(self.method.settings, "selectors", 1)
        if self.align is not None and isinstance(self.align.labels, int) and self.align.labels >= count:
            raise ValueError(
                f"[align] labels = {self.align.labels}: {self.method.name} trains {count} selectors, so "
                f"labels is at most {count - 1}"
            )
        if self.align is not None:
            self.align.check_tastes(self.method.name, self.has_tastes)
        return self

    @property
    def has_tastes(self) -> bool:
        """Whether the method's models have a latent taste."""
        return "variational" in self.method.kind.needs(self.method.settings)

    @model_validator(mode="after")
    def _ranks(self) -> Experiment:
        most = self.model.lora.rank
        for client, rank in self.merge.ranks.items():
            if rank > most:
                raise ValueError(
                    f"[merge] ranks: {client!r} has rank {rank}, above that of [model.lora], {most}: raise "
                    "the latter"
                )
        return self

    @model_validator(mode="after")
    def _every_weight(self) -> Experiment:
        """Check that nothing requires a LoRA or a frozen model if ``train = "full"``."""
        if self.model.train != "full":
            return self
        if self.merge.ranks:
            raise ValueError("[merge] ranks are those of a LoRA, but [model] has train = 'full': remove them")
        if self.merge.lora != "fedit":
            raise ValueError(
                f"[merge] lora = {self.merge.lora!r} applies to the factors of a LoRA, but with [model] "
                "train = 'full' there is none: remove one of them"
            )
        if own := sorted(self.method.kind.needs(self.method.settings) - {LORA, VALUE}):
            raise ValueError(
                f"[model] train = 'full' trains every weight, but {self.method.name} adds its own parts to a "
                f"frozen model ({', '.join(own)}): use another method, or train = 'lora'"
            )
        if self.align is not None and self.align.model is None:
            raise ValueError(
                "[align] trains a LoRA, but [model] has train = 'full': set the model to align in "
                "[align.model]"
            )
        return self

    @model_validator(mode="after")
    def _judged(self) -> Experiment:
        if self.stop is not None:
            check_stop(self.stop, self.method.kind, self.method.settings, self.evaluate.every)
        gpus, ray = self.model.gpus, self.engine.ray
        if gpus > 1 and self.engine.devices:
            raise ValueError(
                f"[model] gpus = {gpus} takes all visible devices, {gpus} for each process: remove [engine] "
                "devices, and name devices in CUDA_VISIBLE_DEVICES"
            )
        if gpus > 1 and self.engine.name != "local" and (ray is None or ray.num_gpus < gpus):
            raise ValueError(f"[model] gpus = {gpus} needs as many for each actor: set ray.num_gpus = {gpus}")
        if gpus > 1 and self.engine.stack > 1:
            raise ValueError(
                f"[engine] stack = {self.engine.stack} needs the model on one device: remove it, or remove "
                "[model] gpus"
            )
        if self.engine.devices and self.model.device not in ("auto", "cuda"):
            raise ValueError(
                f"[engine] devices lists CUDA devices, but [model] device = {self.model.device!r}: remove "
                "one of them"
            )
        return self

    @model_validator(mode="after")
    def _private(self) -> Experiment:
        """Check that noise covers everything that leaves a client."""
        kind = self.privacy.kind
        if kind is None:
            return self
        problems = [*_problems_of_any_kind(self)]
        if kind in ("central", "distributed"):
            problems += [f"{each} (or use kind 'local')" for each in needs_single_uploads(self)]
        if kind == "distributed" and self.evaluate.unseen:
            problems.append("[evaluate] unseen: a mean over few newcomers would be all noise: remove it")
        if problems:
            raise ValueError(f"[privacy] kind = {kind!r}: {problems[0]}")
        return self

    @model_validator(mode="after")
    def _coherent(self) -> Experiment:
        fleet, graph = self.fleet, self.whole_graph
        if fleet is not None and self.cohort.sampling == "poisson":
            raise ValueError(
                "[cohort] sampling = 'poisson' does not apply to a [fleet], which assigns work to clients as "
                "they become free: use 'fixed'"
            )
        if graph is None:
            return self
        if self.merge.ranks:
            raise ValueError("[merge] ranks needs a server, which pads with zeros: remove it")
        if self.cohort != CohortConfig():
            raise ValueError(
                "[cohort] needs a server: without one, all clients train in every round: remove it"
            )
        if fleet is not None:
            raise ValueError("[fleet] needs a server, but [graph] has none: remove one of them")
        return self

    @property
    def parts(self) -> frozenset[str]:
        """The model parts that the method and the merge rule need.

        With ``train = "full"``, ``weights`` replaces ``lora``.
        """
        needs = self.method.kind.needs(self.method.settings) | lora.needs(self.merge.lora)
        return needs - {LORA} | {"weights"} if self.model.train == "full" else needs

    @property
    def whole_graph(self) -> GraphConfig | None:
        """``[graph]``, or its defaults for a serverless method; ``None`` with a server."""
        return GraphConfig() if self.graph is None and self.method.kind.serverless else self.graph

    @property
    def whole_merge(self) -> MergeConfig:
        """``[merge]``, with the default of ``late`` filled in if there is a fleet."""
        if self.fleet is None or self.merge.late is not None:
            return self.merge
        late = "delta" if self.fleet.server == "buffered" else "model"
        return self.merge.model_copy(update={"late": late})

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
        """Read an experiment file.

        A path to data or to a model is looked up in the file's folder, then in the working folder, and made
        absolute. A name that is found in neither is a hub name.

        Args:
            overrides: ``"key.sub=value"`` each. The value is written as in TOML; a bare word is a string.

        Raises:
            ConfigError: the file or an override cannot be read, or has an unknown key or an invalid value.
                The message names the place, the problem and a remedy.
        """
        path = Path(path)
        tables = read_toml(path)
        make_absolute(tables, (path.parent, Path()))
        origins = override(tables, overrides, path.parent)
        allow_code(tables, path)
        return cls.from_tables(tables, str(path), origins)

    @classmethod
    def parse(cls, text: str) -> Experiment:
        """Parse an experiment from TOML text. Relative paths stay relative.

        Raises:
            ConfigError: the text is not TOML, or the experiment is invalid.
        """
        return cls.from_tables(parse_toml(text, "the text"), "the text")

    @classmethod
    def from_tables(
        cls, tables: Mapping[str, Any], where: str, origins: Origins = MappingProxyType({})
    ) -> Experiment:
        """Validate nested tables from a file, which may name only code that was allowed.

        Args:
            where: the file, for messages.
            origins: path of a key → the option that set it, for keys not set by the file.

        Raises:
            ConfigError: the experiment is invalid; the message has one line per problem.
        """
        try:
            return super().model_validate(dict(tables))
        except ValidationError as error:
            raise _config_error(cls, error, tables, where, origins) from None

    def code(self) -> dict[str, Code]:
        """The code of objects from outside prefed, by their names."""
        return code_of(self.tables())

    def tables(self) -> dict[str, Any]:
        """The experiment as nested tables, including defaults but without keys that are ``None``."""
        return self.model_dump(mode="json", exclude_none=True)


def _config_error(
    root: type[Experiment], error: ValidationError, tables: Any, where: str, origins: Origins
) -> ConfigError:
    from prefed.config.errors import explain

    return ConfigError(explain(error, root, tables if isinstance(tables, Mapping) else {}, where, origins))


def to_toml(experiment: Experiment) -> str:
    """Serialise an experiment, including defaults, for :meth:`Experiment.parse`."""
    return tomli_w.dumps(experiment.tables())


def _problems_of_any_kind(experiment: Experiment) -> Iterator[str]:
    kind, merge = experiment.method.kind, experiment.merge
    if why := kind.reason("NO_NOISE"):
        yield f"{kind.name} does not support differential privacy: {why}"
    if merge.weights != "uniform" and experiment.whole_graph is None:
        yield (
            f"[merge] weights = {merge.weights!r} depends on numbers that clients send without "
            "noise, and gives some clients more weight: set 'uniform'"
        )
    if experiment.method.settings.schedule == "plateau":
        yield "schedule 'plateau' depends on clients' losses, which are not sent: use another schedule"
    if experiment.evaluate.diagnose is not None:
        yield "[evaluate] diagnose makes clients send gradients without noise: remove it"
    if experiment.stop is not None:
        yield (
            "[stop] selects a round by clients' validation metrics, which have no noise: remove it, and "
            "fix the number of rounds beforehand"
        )


def needs_single_uploads(experiment: Experiment) -> Iterator[str]:
    """Reasons why the mean of a round's uploads is not enough for the server.

    Central and distributed noise provide only this mean.
    """
    kind, merge = experiment.method.kind, experiment.merge
    if experiment.whole_graph is not None:
        yield "without a server, no party has the mean of all uploads"
    if experiment.fleet is not None:
        yield "[fleet] lets a client upload late, or twice in a round: remove it"
    if why := kind.reason("SINGLE_UPLOADS"):
        yield f"{kind.name}: {why}, but only the mean of all uploads is available"
    if merge.rule != "mean":
        yield f"[merge] rule = {merge.rule!r} needs individual uploads: use rule 'mean'"
    if merge.ranks:
        yield "[merge] ranks gives uploads different shapes, which have no mean: remove it"
    if merge.by_loss:
        yield f"[merge] weights = {merge.weights!r} needs each client's loss: use 'samples' or 'uniform'"
    if merge.lora in PRODUCT_RULES:
        yield (
            f"[merge] lora = {merge.lora!r} needs the product of each client's factors, but only the mean of "
            "the factors is available: use another value"
        )
    if getattr(experiment.method.settings, "alignment", "off") != "off":
        yield "[method] alignment weights each upload by its angle to the others: set it to 'off'"
