"""``site.toml``: the settings of a site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, field_validator
from pydantic.dataclasses import dataclass

from prefed.config.align import ENDPOINT, PEOPLE, JudgeConfig
from prefed.config.errors import validate
from prefed.config.file import make_absolute, read_toml
from prefed.config.settings import method_kind
from prefed.core.plugins import is_code
from prefed.core.strict_settings import ConfigError, StrictModel
from prefed.core.text import did_you_mean
from prefed.data.config import DataConfig
from prefed.data.sources.huggingface import looks_like_hub_name
from prefed.privacy.secure import LEAST, Identity, SecureError, fingerprint
from prefed.privacy.secure.identity import is_fingerprint

OWN_DATA = ("train", "validation", "test", "partition", "format", "columns", "encoding", "flip")
"""Keys of ``[data]`` that a site sets. The experiment's values of these keys are ignored there."""

EXCHANGES = ("train", "score")
"""Names of the exchanges of all methods."""


@dataclass(frozen=True)
class Terms:
    """Settings of a hub. To resume a run, one site suffices."""

    federation: str
    sites: tuple[str, ...]
    wait: float = Field(default=120.0, ge=0, description="seconds to wait for all sites to connect")
    at_least: int | None = Field(
        default=None, ge=1, description="start after --wait with so many sites; default: all"
    )
    visit: float = Field(default=600.0, ge=1, description="seconds for a site's task; then it is left out")
    most_clients: int = Field(default=10_000, ge=1, description="most clients that a site may declare")
    most_pairs: int = Field(
        default=10_000_000, ge=1, description="most pairs, a client's weight, that a site may declare"
    )


def check_name(value: str) -> str:
    """Check the name of a federation or a site, which is also used for folders and certificates.

    Raises:
        ValueError: the name is too long or has characters other than letters, digits, ``.``, ``_`` and ``-``.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value):
        raise ValueError(
            f"{value!r} is not a valid name: use at most 63 letters, digits, '.', '_' and '-', starting with "
            "a letter or digit"
        )
    return value


class SiteModel(StrictModel):
    """``[model]``: the site's copy of the models that the experiment uses."""

    name: str = Field(min_length=1, description="folder or hub name of the base model on this machine")
    revision: str | None = Field(None, description="hub revision; the experiment's is ignored")
    device: str | None = Field(None, description="device; default: that of the experiment")
    reward_model: str | None = Field(None, description="folder of the reward model, for offline PPO")


class Disclose(StrictModel):
    """``[disclose]``: what the hub and the other sites learn about this site's clients."""

    names: bool = Field(True, description="report clients' names; false: report pseudonyms")
    pairs: bool = Field(
        False,
        description="report each client's number of pairs, which weights the merge; required to join a run",
    )


class SiteJudge(JudgeConfig):
    """``[judge]``: how this site's clients judge completions of the hub."""

    prefix: ClassVar[str] = "[judge] "

    name: str = Field(
        min_length=1,
        description="utility, selector:RUN, reward:FOLDER, local:FOLDER or endpoint:MODEL, as for `prefed "
        "judge`; each client judges with its own taste; or people:FOLDER, who judge in [align.refresh]",
    )

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        from prefed.align.judge.names import ARGUMENTS, split_name

        if split_name(value)[0] not in ARGUMENTS:
            raise ValueError(f"{value!r}: a site loads no judge from outside prefed")
        return value

    @field_validator("taste")
    @classmethod
    def _own(cls, value: str) -> str:
        if value != cls.model_fields["taste"].default:
            raise ValueError("each client judges with its own taste: remove it")
        return value

    def beside(self, folder: Path) -> SiteJudge:
        """The same with a path that starts at ``folder``, if that exists."""
        kind, _, place = self.name.partition(":")
        found = folder / Path(place).expanduser()
        # The folder of what people chose may be made later.
        if kind == ENDPOINT or not place or not (found.exists() or kind == PEOPLE):
            return self
        return self.model_copy(update={"name": f"{kind}:{found.resolve()}"})


class Limits(StrictModel):
    """``[limits]``: what the hub may request. Other requests are refused and logged."""

    methods: list[str] | None = Field(None, description="allowed methods; default: all")
    code: list[str] = Field(
        [],
        description="names of installed code from outside prefed that an experiment may use: entry points or "
        "PACKAGE.MODULE:OBJECT; default: none",
    )
    approval: Literal["runs", "code"] | None = Field(
        None,
        description="what must be approved with `prefed site approve` before it starts: each run (settings "
        "and code), or each version of code from outside prefed; default: nothing",
    )
    exchanges: list[str] | None = Field(None, description="allowed exchanges; default: all")
    rounds: int = Field(1000, ge=1, description="maximum number of rounds of a run")
    threads: int | None = Field(
        None,
        ge=1,
        description="maximum number of threads that a run may request, unless this file sets `threads`; "
        "default: the number of cores",
    )
    max_length: int = Field(4096, ge=2, description="maximum [data] max_length")
    max_tokens: int = Field(65536, ge=1, description="maximum [engine] max_tokens: tokens per forward pass")
    rank: int = Field(256, ge=1, description="maximum [model.lora] rank")
    width: int = Field(
        4096,
        ge=1,
        description="maximum width of bottleneck, reward head, latent tastes and shared rewards, and maximum "
        "number of prototypes, shared rewards and samples of a taste",
    )
    minimum_cohort: int = Field(2, ge=1, description="minimum number of clients per round, over all sites")
    minimum_pairs: int = Field(0, ge=0, description="minimum [privacy] minimum_pairs")
    privacy: Literal["central", "distributed", "local"] | None = Field(
        None,
        description="required noise: local (this site's is enough), distributed (or local: enough together "
        "with the other sites') or central (any, also of the hub); default: none required",
    )
    colluders: int = Field(
        0, ge=0, description="minimum number of colluding sites that distributed noise must withstand"
    )
    noise_multiplier: float = Field(0, ge=0, description="minimum [privacy] noise_multiplier")
    epsilon: float | None = Field(
        None,
        gt=0,
        description="privacy budget of each client over all runs, by this site's accounting; requires local "
        "or distributed noise, and visits that would exceed it are refused; default: unlimited",
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta at which epsilon is reported")
    evaluate: bool = Field(
        True, description="allow metrics over held-out pairs; a run needs at least one site that allows them"
    )
    judgements: int = Field(
        0,
        ge=0,
        description="maximum number of pairs of completions that a client judges in a run, with [judge]; "
        "votes reach the hub, under secure sums only as a noised sum, and in a refresh the number of pairs; "
        "0: none",
    )
    message_mb: int = Field(4096, ge=1, description="maximum length of a message in MiB")
    visit_seconds: float = Field(0, ge=0, description="time limit of a visit in seconds; 0: no limit")

    @field_validator("methods", "exchanges")
    @classmethod
    def _some(cls, value: list[str] | None) -> list[str] | None:
        if value == []:
            raise ValueError("an empty list allows nothing: add an entry, or remove the key to allow all")
        return value

    @field_validator("methods")
    @classmethod
    def _known(cls, value: list[str] | None) -> list[str] | None:
        for name in value or []:
            if not is_code(name):
                method_kind(name)
        return value

    @field_validator("exchanges")
    @classmethod
    def _had(cls, value: list[str] | None) -> list[str] | None:
        for name in value or []:
            if name not in EXCHANGES:
                near = did_you_mean(name, EXCHANGES)
                raise ValueError(f"unknown exchange {name!r}{near} (exchanges: {', '.join(EXCHANGES)})")
        return value


class SiteConfig(StrictModel):
    """The settings of a site."""

    federation: str = Field(description="the federation's name in its project file")
    name: str = Field(description="the site's name in the project file")
    kit: str = Field("kit", description="folder of the site's kit, from `prefed federation init`")
    state: str = Field("state", description="folder of private states, tokens and the audit log")
    data: dict[str, Any] = Field(
        description=f"the site's pairs; keys of an experiment's [data]: {', '.join(OWN_DATA)}"
    )
    model: SiteModel = Field(description="the site's copy of the models")
    disclose: Disclose = Field(Disclose(), description="what the hub learns about clients")
    limits: Limits = Field(Limits(), description="what the hub may request")
    judge: SiteJudge | None = Field(
        None, description="how clients judge completions, if [limits] judgements allows it"
    )
    sites: dict[str, str] = Field(
        {},
        description="for secure sums: fingerprint of each other site's key, as `prefed site keys` prints it "
        "there; compare it by telephone, not through the hub",
    )
    threads: int | None = Field(
        None, ge=1, description="threads of the training process; default: as in the experiment"
    )

    _where: str = PrivateAttr("site.toml")

    @property
    def where(self) -> str:
        """The path of this file, for error messages."""
        return self._where

    @field_validator("name", "federation")
    @classmethod
    def _named(cls, value: str) -> str:
        return check_name(value)

    @field_validator("sites")
    @classmethod
    def _pinned(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not is_fingerprint(text):
                raise ValueError(
                    f"{check_name(name)}: {text!r} is not a fingerprint: eight words of five letters, joined "
                    "by hyphens, as `prefed site keys` prints them at that site"
                )
        return value

    @property
    def identity(self) -> Path:
        """The file of the site's identity."""
        return Path(self.state) / "identity"

    def own_words(self) -> str:
        """The fingerprint of the site's key, if secure sums are possible with it and with ``[sites]``.

        Raises:
            SecureError: there is no key, ``[sites]`` has another one for this site, the same one for two
                sites, or too few sites.
        """
        own, seen = fingerprint(Identity.at(self.identity).public), dict[str, str]()
        pins = {self.name: own, **self.sites}
        if pins[self.name] != own:
            raise SecureError(
                f"the fingerprint of this site's key is {own}, and [sites] has {pins[self.name]}"
            )
        for name, words in pins.items():
            if (other := seen.setdefault(words, name)) != name:
                raise SecureError(f"[sites] has the same fingerprint for {other} and {name}: {words}")
        if len(pins) < LEAST:
            raise SecureError(
                f"[sites] has {len(pins) - 1} other sites, and a sum needs {LEAST - 1}: ask them for their "
                "words by telephone"
            )
        return own

    @field_validator("data")
    @classmethod
    def _own(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(set(value) - set(OWN_DATA)):
            known = name in DataConfig.model_fields
            why = "is set by the experiment" if known else "is not a known key"
            near = "" if known else did_you_mean(name, OWN_DATA)
            raise ValueError(f"{name} {why}: the keys of a site's [data] are {', '.join(OWN_DATA)}{near}")
        return value

    @classmethod
    def load(cls, path: Path) -> SiteConfig:
        """Read ``site.toml``. Relative paths start at its folder.

        Raises:
            ConfigError: the file cannot be read, or a key or value is invalid.
        """
        tables = read_toml(path, "`prefed federation init PROJECT` creates one for each site")
        make_absolute(tables, (path.parent,))
        model = tables.get("model")
        if isinstance(model, dict):
            make_absolute({"method": model}, (path.parent,))
        config = validate(cls, tables, str(path))
        if config.limits.judgements and config.judge is None:
            raise ConfigError(f"{path}: [limits] judgements requires [judge] name")
        folders = {key: str((path.parent / getattr(config, key)).resolve()) for key in ("kit", "state")}
        judge = config.judge and config.judge.beside(path.parent)
        config = config.model_copy(update={**folders, "judge": judge})
        config._where = str(path)
        return config


def check_places(config: SiteConfig) -> None:
    """Check that the paths of data and models exist. Possible names on the Hugging Face hub are not checked.

    Raises:
        ConfigError: a path does not exist, or ``data.train`` is missing.
    """
    if "train" not in config.data:
        raise ConfigError(f"{config.where}: data.train is missing: set it to this site's pairs")
    for key, source in _sources(config.data):
        if not (Path(source).expanduser().exists() or looks_like_hub_name(source)):
            raise ConfigError(
                f"{config.where}: {key} = {source!r}: no such file or folder: put this site's pairs there "
                "or correct the path"
            )
    for key in ("name", "reward_model"):
        model = getattr(config.model, key)
        if model is None or Path(model).expanduser().is_dir():
            continue
        if model[:1] in ("/", ".", "~") or model.count("/") > 1:
            raise ConfigError(
                f"{config.where}: model.{key} = {model!r}: no such folder: put the federation's model there "
                "or correct the path"
            )

    judge = config.judge.name if config.judge else ""
    kind, _, run = judge.partition(":")
    if kind == "selector" and not Path(run).expanduser().is_dir():
        raise ConfigError(
            f"{config.where}: judge.name = {judge!r}: no such folder: put a run there or correct the path"
        )


def _sources(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each source path of ``[data]`` with its key."""
    waiting = [(f"data.{role}", data[role]) for role in ("train", "validation", "test") if role in data]
    for key, value in waiting:
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, list):
            waiting += [(key, each) for each in value]
        elif isinstance(value, dict):
            inside = ["path"] if "path" in value else list(value)
            waiting += [(f"{key}.{name}", value[name]) for name in inside]
