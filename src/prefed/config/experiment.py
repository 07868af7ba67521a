"""The experiment file as typed records."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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

from prefed.config.errors import ConfigError, explain, nearest
from prefed.core import Privacy
from prefed.core.strict import Strict
from prefed.data import DataConfig
from prefed.merge import MergeConfig
from prefed.methods import METHODS, MethodKind, TrainingSettings
from prefed.models import ModelConfig

__all__ = [
    "FREE",
    "CohortConfig",
    "EngineConfig",
    "EvaluateConfig",
    "Experiment",
    "MethodConfig",
    "load",
    "method_kind",
    "to_toml",
]


class CohortConfig(Strict):
    """How many clients take part in a round, drawn without replacement.

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
        """Clients a round out of ``clients``, at least one; ``None`` for all."""
        return self.size if self.fraction is None else max(1, round(self.fraction * clients))


class EvaluateConfig(Strict):
    """How clients' models are judged on their own pairs."""

    every: int = Field(1, ge=0, description="rounds from one evaluation to the next; 0: after the last alone")
    split: Literal["test", "validation"] = Field("test", description="the pairs that clients are judged on")
    clients: int | None = Field(
        None, ge=1, description="judge at most so many clients, the same ones each time; left out: all"
    )
    beta: float | None = Field(
        None, gt=0, description="beta of the reported DPO loss; left out: the method's, else 0.1"
    )
    unseen: int | list[str] = Field(
        0, description="clients, by number or by id, that never train and are judged apart as newcomers"
    )
    unseen_steps: list[int] = Field(
        [0], description="local steps a newcomer takes on its own pairs before it is judged; one figure each"
    )

    @model_validator(mode="after")
    def _newcomers(self) -> EvaluateConfig:
        if isinstance(self.unseen, int) and self.unseen < 0:
            raise ValueError("unseen is a number of clients, 0 or more, or a list of their ids")
        if not self.unseen_steps or min(self.unseen_steps) < 0:
            raise ValueError("unseen_steps lists numbers of local steps, 0 or more")
        return self


class EngineConfig(Strict):
    """Where clients work; ``threads``, ``max_tokens`` and ``state_dtype`` alone can change a digit."""

    name: Literal["local"] = Field("local", description="on this machine")
    workers: int = Field(0, ge=0, description="processes that share the clients' work; 0: this one alone")
    visit_timeout: float = Field(
        0,
        ge=0,
        description="seconds that a worker may take for one client's visit or evaluation; then it is ended "
        "and the run stops, to be resumed; 0: any time",
    )
    threads: int | None = Field(
        None, ge=1, description="threads of each process; left out: the machine's cores, shared out"
    )
    max_tokens: int = Field(4096, ge=1, description="tokens of one forward pass; larger batches are split")
    state_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="dtype of clients' private tensors on disk"
    )


FREE = frozenset({"engine.workers", "engine.visit_timeout"})
"""Settings that change no number, and may be others when a run is resumed."""


def method_kind(name: str) -> MethodKind:
    """The method's entry in the registry.

    Raises:
        ValueError: there is none; the message has the nearest name.
    """
    if name not in METHODS:
        raise ValueError(
            f"no method is called {name!r}{nearest(name, METHODS)} (methods: {', '.join(METHODS)})"
        )
    return METHODS[name]


class MethodConfig(BaseModel):
    """A method by name, with its own settings.

    In a file, and in a mapping, name and settings stand side by side: ``{"name": "feddpo", "lr": 1e-4}``.

    Attributes:
        name: one of :data:`prefed.methods.METHODS`.
        settings: that method's record.
    """

    model_config = {"frozen": True, "extra": "forbid"}

    name: str
    settings: SerializeAsAny[TrainingSettings]

    @model_validator(mode="before")
    @classmethod
    def _apart(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"name": given}
        if not isinstance(given, Mapping) or isinstance(given.get("settings"), TrainingSettings):
            return given
        name = given.get("name")
        if not isinstance(name, str):
            raise ValueError(f"name says which method to run: {', '.join(METHODS)}")
        settings = {key: value for key, value in given.items() if key != "name"}
        return {"name": name, "settings": method_kind(name).Settings.model_validate(settings)}

    @model_serializer
    def _together(self) -> dict[str, Any]:
        return {"name": self.name, **self.settings.model_dump(mode="json", exclude_none=True)}

    @property
    def kind(self) -> MethodKind:
        """The method's entry in the registry."""
        return METHODS[self.name]


class Experiment(Strict):
    """A whole experiment: what a run needs to know and nothing else.

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

    seed: int = Field(42, description="of every random draw")
    rounds: int = Field(20, ge=1, description="communication rounds")
    data: DataConfig = Field(description="where preferences come from and who holds them")
    model: ModelConfig = Field(description="which causal language model is aligned, and how")
    cohort: CohortConfig = Field(default_factory=CohortConfig, description="who takes part in a round")
    method: MethodConfig = Field(description="the method and its settings")
    merge: MergeConfig = Field(default_factory=lambda: MergeConfig(), description="how uploads merge")
    evaluate: EvaluateConfig = Field(
        default_factory=lambda: EvaluateConfig(), description="how clients' models are judged"
    )
    privacy: Privacy = Field(
        default_factory=lambda: Privacy(), description="what must not leave a client, whatever else is sent"
    )
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig(), description="where work is done")

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
        """The experiment in a file: see :func:`load`."""
        return load(path, overrides)

    @classmethod
    def parse(cls, text: str) -> Experiment:
        """The experiment in a TOML text, paths as they stand.

        Raises:
            ConfigError: it is no TOML, or not a valid experiment.
        """
        return _validate(_toml(text, "the text"), "the text", {})


def load(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment file.

    Paths to data and to a model folder are taken from the file's folder, or else from the working folder,
    and come out absolute; a name that is neither stays what it is, a hub name.

    Args:
        path: a TOML file.
        overrides: ``"key.sub=value"`` each, the value as TOML has it, or a bare word for a string.

    Raises:
        ConfigError: the file or an override cannot be read, names an unknown key or holds a value that is
            not allowed; the message says where, what, and what would do.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `prefed init METHOD --out {path}` writes one") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        # Editors on Windows may put a byte order mark before the text.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: not UTF-8 text (byte 0x{raw[error.start]:02x} in line {line}); save it as UTF-8"
        ) from None
    tree = _toml(text.replace("\r\n", "\n"), str(path))
    _root(tree, (path.parent, Path()))
    origins: dict[tuple[str, ...], str] = {}
    for override in overrides:
        keys, value = _override(override)
        origins[keys] = f"--set {override}"
        patch = _nested(keys, value)
        _root(patch, (Path(), path.parent))
        _put(tree, patch, override)
    return _validate(tree, str(path), origins)


def to_toml(experiment: Experiment) -> str:
    """The experiment with every default filled in, as :meth:`Experiment.parse` reads it again."""
    return tomli_w.dumps(experiment.model_dump(mode="json", exclude_none=True))


def _validate(tree: dict[str, Any], where: str, origins: Mapping[tuple[str, ...], str]) -> Experiment:
    try:
        return Experiment.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, Experiment, tree, where, origins)) from None


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from None


def _override(text: str) -> tuple[tuple[str, ...], Any]:
    name, equals, written = text.partition("=")
    try:
        keys: list[str] = []
        inside: Any = tomllib.loads(f"{name} = 0")
        while isinstance(inside, dict):
            ((key, inside),) = inside.items()
            keys.append(key)
    except (tomllib.TOMLDecodeError, ValueError):
        equals = ""
    if not equals:
        raise ConfigError(f"--set {text}: write it as key=value, e.g. --set method.lr=1e-4")
    try:
        held = tomllib.loads(f"value = {written}")
        value = held["value"] if len(held) == 1 else written
    except tomllib.TOMLDecodeError:
        value = written
    known = isinstance(value, bool | int | float | str | list | dict)
    return tuple(keys), value if known else written


def _nested(keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    tree: dict[str, Any] = value
    return tree


def _put(tree: dict[str, Any], patch: Mapping[str, Any], override: str) -> None:
    """Lay ``patch``, one value deep in tables, over ``tree``."""
    ((key, value),) = patch.items()
    keys, _ = _override(override)
    while keys[1:]:
        inside = tree.setdefault(key, {})
        if not isinstance(inside, dict):
            raise ConfigError(f"--set {override}: {key} is {inside!r}, not a table")
        tree, keys = inside, keys[1:]
        ((key, value),) = value.items()
    tree[key] = value


def _root(tree: dict[str, Any], folders: Sequence[Path]) -> None:
    """Make the paths in ``tree`` absolute that lead to something from one of ``folders``."""
    for table, key in list(_paths(tree)):
        written = Path(table[key]).expanduser()
        for folder in folders if table[key] else ():
            if (folder / written).exists():
                table[key] = str((folder / written).resolve())
                break


def _paths(tree: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Where ``tree`` holds text that may be a path: the table or list, and the key in it."""
    data = tree.get("data")
    for table, key in (("model", "name"), ("method", "reward_model")):
        held = tree.get(table)
        if isinstance(held, dict) and isinstance(held.get(key), str):
            yield held, key
    roles = ("train", "validation", "test")
    waiting: list[tuple[Any, Any]] = [(data, role) for role in roles] if isinstance(data, dict) else []
    while waiting:
        table, key = waiting.pop()
        value = table[key] if isinstance(table, list) else table.get(key)
        if isinstance(value, str):
            yield table, key
        elif isinstance(value, list):
            waiting += [(value, index) for index in range(len(value))]
        elif isinstance(value, dict):
            waiting += [(value, "path")] if "path" in value else [(value, name) for name in value]
