"""A grid over an experiment file: some keys with several values each, and several seeds."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefed.config.errors import ConfigError
from prefed.config.experiment import Experiment
from prefed.config.file import make_absolute, override, parse_override, read_toml

_LONGEST = 60
"""Letters of a combination's name at most."""
_ELSEWHERE = {
    "seed": "seeds are given by --seeds",
    "evaluate.split": "a sweep chooses on validation pairs",
    "engine": "where the work is done decides nothing; set it with --set",
}
"""Keys that no grid may have, with the reason."""


@dataclass(frozen=True)
class Combination:
    """One value of each key of a grid.

    Attributes:
        name: of its folders and of its case on the page.
        texts: key → its value as ``--set`` takes it.
        values: key → its value.
    """

    name: str
    texts: Mapping[str, str]
    values: Mapping[str, Any]

    @property
    def of_data(self) -> tuple[str, ...]:
        """The keys of ``[data]`` with their values: what is chosen on other pairs is not compared."""
        return tuple(f"{key}={text}" for key, text in self.texts.items() if key.split(".")[0] == "data")

    def experiment(self, path: Path, overrides: Sequence[str], own: Sequence[str]) -> Experiment:
        """The experiment in ``path`` with these values.

        Args:
            overrides: ``KEY=VALUE`` of ``--set``; values of the grid are laid over them.
            own: further ones, laid over all; no message speaks of them.

        Raises:
            ConfigError: it is not valid; the message names the file and the key, or the option that set it.
        """
        tables = read_toml(path)
        make_absolute(tables, (path.parent, Path()))
        origins = {**override(tables, overrides, path.parent)}
        values = [f"{key}={text}" for key, text in self.texts.items()]
        origins |= override(tables, values, path.parent, "--grid")
        for keys in override(tables, own, path.parent):
            origins.pop(keys, None)
        return Experiment.from_tables(tables, str(path), origins)


def parse_grid(texts: Sequence[str], overrides: Sequence[str] = ()) -> list[Combination]:
    """Every combination of the values of some keys; the last key changes fastest.

    Args:
        texts: ``"key.sub=value,value"`` each. A value is written as in TOML; a bare word is a string.
        overrides: what ``--set`` sets, which no key of a grid may be.

    Returns:
        One combination without any value where ``texts`` is empty.

    Raises:
        ConfigError: a text is no key with values, a key or a value is there twice, or is not for a grid.

    >>> [each.name for each in parse_grid(["method.name=feddpo,fedper", "method.lr=1e-4,1e-3"])]
    ['feddpo-lr0.0001', 'feddpo-lr0.001', 'fedper-lr0.0001', 'fedper-lr0.001']
    """
    axes: dict[str, dict[str, Any]] = {}
    fixed = {text.partition("=")[0].strip() for text in overrides}
    for text in texts:
        key, _, words = text.partition("=")
        key = key.strip()
        if key in axes:
            raise ConfigError(f"--grid {text}: {key} has a --grid already; give all its values in one")
        if key in fixed:
            raise ConfigError(f"--grid {text}: --set has {key} too; leave one of them out")
        for name, why in _ELSEWHERE.items():
            if key == name or key.startswith(f"{name}."):
                raise ConfigError(f"--grid {text}: {why}")
        axes[key] = _values(text, key, words)
    last = [key.rpartition(".")[2] for key in axes]
    short = {key: name if last.count(name) == 1 else key for key, name in zip(axes, last, strict=True)}
    combinations = []
    for chosen in itertools.product(*(values.items() for values in axes.values())):
        own = dict(zip(axes, chosen, strict=True))
        name = "-".join(_word(short[key], value) for key, (_, value) in own.items()) or "run"
        texts_of = {key: text for key, (text, _) in own.items()}
        values_of = {key: value for key, (_, value) in own.items()}
        combinations.append(Combination(_folder(name, texts_of), texts_of, values_of))
    return combinations


def parse_seeds(text: str | None, first: int) -> list[int]:
    """The seeds of a sweep: how many there are, from ``first`` on, or the seeds themselves.

    Raises:
        ConfigError: it is neither a number of at least one nor different seeds with commas between them.

    >>> parse_seeds("3", 42), parse_seeds("7,1", 42), parse_seeds(None, 42)
    ([42, 43, 44], [7, 1], [42])
    """
    if text is None:
        return [first]
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        seeds = []
    if "," not in text and seeds:
        seeds = list(range(first, first + seeds[0]))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"--seeds {text}: write how many seeds, e.g. --seeds 3, or different seeds, e.g. --seeds 1,2,5"
        )
    return seeds


def _values(text: str, key: str, words: str) -> dict[str, Any]:
    """Text → value of each value of a key."""
    values: dict[str, Any] = {}
    for word in _split(text, words):
        _, value = parse_override(f"{key}={word}", "--grid")
        if any(value == each and type(value) is type(each) for each in values.values()):
            raise ConfigError(f"--grid {text}: {word} is there twice")
        values[word] = value
    return values


def _split(text: str, words: str) -> list[str]:
    """The texts of values between commas, but for commas in brackets, braces and quotes."""
    parts, pending = [], ""
    for piece in words.split(","):
        pending = f"{pending},{piece}" if pending else piece
        quotes = any(pending.count(mark) % 2 for mark in "\"'")
        if not quotes and all(pending.count(a) <= pending.count(b) for a, b in ("[]", "{}")):
            parts.append(pending.strip())
            pending = ""
    if pending or not all(parts):
        raise ConfigError(
            f"--grid {text}: write it as key=value,value, no value empty, e.g. --grid method.lr=1e-4,1e-3"
        )
    return parts


def _word(key: str, value: Any) -> str:
    """A key with its value in a folder's name; of texts the value alone."""
    return value if isinstance(value, str) else f"{key}{str(value).lower()}"


def _folder(name: str, texts: Mapping[str, str]) -> str:
    """``name`` as a folder's name. Where it had to change, a digest of the values keeps it apart."""
    safe = re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).strip("-.")[:_LONGEST]
    if safe == name:
        return name
    digest = hashlib.sha256("\n".join(f"{key}={text}" for key, text in texts.items()).encode())
    return f"{safe}-{digest.hexdigest()[:6]}".lstrip("-")
