"""What a site's administrator decides: ``site.toml``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator

from prefed.config.errors import ConfigError, explain
from prefed.config.file import make_absolute, read_toml
from prefed.config.settings import method_kind
from prefed.core.strict_settings import StrictModel
from prefed.core.text import did_you_mean
from prefed.data.config import DataConfig
from prefed.data.sources.huggingface import looks_like_hub_name

OWN_DATA = ("train", "validation", "test", "partition", "format", "columns", "encoding", "flip")
"""Keys of ``[data]`` that are a site's own business: the experiment's are not read there."""


EXCHANGES = ("train", "score")
"""Names of all exchanges that a method has."""


def check_name(value: str) -> str:
    """A federation's or a site's name, which becomes the name of folders and certificates.

    Raises:
        ValueError: it has other characters than letters, digits, ``.``, ``_`` and ``-``.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value):
        raise ValueError("a name has letters, digits, '.', '_' and '-', 63 characters at most")
    return value


class SiteModel(StrictModel):
    """Where this site has the model that the experiment names."""

    name: str = Field(min_length=1, description="folder or hub name of the base model, as on this machine")
    revision: str | None = Field(None, description="hub revision of it; the experiment's is not read")
    device: str | None = Field(None, description="as [model] device; left out: as the experiment says")
    reward_model: str | None = Field(
        None, description="folder of the model that scores responses, for offline PPO"
    )


class Tell(StrictModel):
    """What the hub and the other sites learn about this site's clients."""

    names: bool = Field(True, description="clients' names; false: names that this site makes up")
    pairs: bool = Field(
        False,
        description="how many pairs each client has; a merge weighs by it, so without it the site stays out",
    )


class Limits(StrictModel):
    """What the hub may ask for. Anything else is refused, and the refusal is logged."""

    methods: list[str] | None = Field(None, description="methods that may run, by name; left out: all")
    exchanges: list[str] | None = Field(None, description="exchanges that may be asked for; left out: all")
    rounds: int = Field(1000, ge=1, description="rounds that a run may have")
    threads: int | None = Field(
        None,
        ge=1,
        description="threads that a run may ask for, where this file has none of its own; left out: as many "
        "as the machine has cores",
    )
    max_length: int = Field(4096, ge=2, description="[data] max_length that a run may have")
    max_tokens: int = Field(
        65536, ge=1, description="[engine] max_tokens that a run may have: tokens of one forward pass"
    )
    rank: int = Field(256, ge=1, description="[model.lora] rank that a run may have")
    minimum_cohort: int = Field(2, ge=1, description="clients that a round must have, of all sites together")
    minimum_pairs: int = Field(0, ge=0, description="[privacy] minimum_pairs that a run must have at least")
    privacy: Literal["central", "local"] | None = Field(
        None,
        description="noise that a run must have: local, added at this site; central, the hub's or this "
        "site's; left out: none",
    )
    noise_multiplier: float = Field(
        0, ge=0, description="[privacy] noise_multiplier that a run must have at least"
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        description="what a client may spend in all runs together, by this site's own account; a run must "
        "have local noise then, and a visit that would spend more is refused; left out: any",
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta at which epsilon is reported")
    evaluate: bool = Field(
        True,
        description="metrics over held-out pairs may be asked for; a run needs a site that allows it",
    )
    message_mb: int = Field(4096, ge=1, description="MiB of the longest message that is read")
    visit_seconds: float = Field(
        0, ge=0, description="seconds that a visit may take before its process is ended; 0: any time"
    )

    @field_validator("methods", "exchanges")
    @classmethod
    def _some(cls, value: list[str] | None) -> list[str] | None:
        if value == []:
            raise ValueError("an empty list would let nothing in: name one, or leave the key out for all")
        return value

    @field_validator("methods")
    @classmethod
    def _known(cls, value: list[str] | None) -> list[str] | None:
        for name in value or []:
            method_kind(name)
        return value

    @field_validator("exchanges")
    @classmethod
    def _had(cls, value: list[str] | None) -> list[str] | None:
        for name in value or []:
            if name not in EXCHANGES:
                near = did_you_mean(name, EXCHANGES)
                raise ValueError(
                    f"no method has an exchange {name!r}{near} (exchanges: {', '.join(EXCHANGES)})"
                )
        return value


class SiteConfig(StrictModel):
    """A site of a federation."""

    federation: str = Field(min_length=1, description="the federation's name, as in its project file")
    name: str = Field(min_length=1, description="the site's name, as in the project file")
    kit: str = Field("kit", description="the folder of the site's kit, from `prefed federation init`")
    state: str = Field("state", description="the folder of private states, tokens and the log")
    data: dict[str, Any] = Field(
        description=f"the site's own pairs: of an experiment's [data] {', '.join(OWN_DATA)}"
    )
    model: SiteModel = Field(description="where this site has the base model")
    tell: Tell = Field(default_factory=lambda: Tell(), description="what the hub learns about clients")
    limits: Limits = Field(default_factory=lambda: Limits(), description="what the hub may ask for")
    threads: int | None = Field(
        None, ge=1, description="threads of the process that trains; left out: as the experiment says"
    )

    _where: str = PrivateAttr("site.toml")

    @property
    def where(self) -> str:
        """The file that this was read from, for messages."""
        return self._where

    @field_validator("name", "federation")
    @classmethod
    def _named(cls, value: str) -> str:
        return check_name(value)

    @field_validator("data")
    @classmethod
    def _own(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(set(value) - set(OWN_DATA)):
            why = "is the experiment's to say" if name in DataConfig.model_fields else "is no key"
            near = did_you_mean(name, OWN_DATA) if why == "is no key" else ""
            raise ValueError(f"{name} {why}: a site's [data] has {', '.join(OWN_DATA)}{near}")
        return value

    @classmethod
    def load(cls, path: Path) -> SiteConfig:
        """Read a site's file. Paths in it start at its folder.

        Raises:
            ConfigError: it cannot be read, or names a key or a value that is not allowed.
        """
        tables = read_toml(path, "`prefed federation init PROJECT` makes one for each site")
        make_absolute(tables, (path.parent,))
        model = tables.get("model")
        if isinstance(model, dict):
            make_absolute({"method": model}, (path.parent,))
        try:
            config = cls.model_validate(tables)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, tables, str(path), {})) from None
        folders = {key: str((path.parent / getattr(config, key)).resolve()) for key in ("kit", "state")}
        config = config.model_copy(update=folders)
        config._where = str(path)
        return config


def check_places(config: SiteConfig) -> None:
    """Refuse data and models that can only be meant as paths and are not there.

    A name that the Hugging Face hub may have is left to the run that needs it.

    Raises:
        ConfigError: one is not there, or the file names no data.
    """
    if "train" not in config.data:
        raise ConfigError(f"{config.where}: data.train: missing; name this site's own pairs")
    for key, source in _sources(config.data):
        if not (Path(source).expanduser().exists() or looks_like_hub_name(source)):
            raise ConfigError(
                f"{config.where}: {key} = {source!r}: no such file or folder; put this site's pairs "
                "there, or name the file that has them"
            )
    for key in ("name", "reward_model"):
        model = getattr(config.model, key)
        if model is None or Path(model).expanduser().is_dir():
            continue
        if model[:1] in ("/", ".", "~") or model.count("/") > 1:
            raise ConfigError(
                f"{config.where}: model.{key} = {model!r}: no such folder; put the model there that the hub "
                "names to you, or name its folder"
            )


def _sources(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each source of ``[data]`` that is a text, with its key."""
    waiting = [(f"data.{role}", data[role]) for role in ("train", "validation", "test") if role in data]
    for key, value in waiting:
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, list):
            waiting += [(key, each) for each in value]
        elif isinstance(value, dict):
            inside = ["path"] if "path" in value else list(value)
            waiting += [(f"{key}.{name}", value[name]) for name in inside]
