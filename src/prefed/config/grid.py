"""Parse ``--grid`` and ``--seeds`` of a sweep: combinations of settings, and the names of their folders."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefed.config.file import parse_override
from prefed.core.strict_settings import ConfigError

_LONGEST = 60
"""Maximum length of a combination's name."""
_ELSEWHERE = {
    "seed": "set seeds with --seeds",
    "evaluate.split": "a sweep always selects on validation pairs",
    "engine": "[engine] does not affect results; set it with --set",
}
"""Key not allowed in a grid → why."""


@dataclass(frozen=True)
class Combination:
    """One value of each key of a grid.

    Attributes:
        name: name of its cell, and of its case on the page.
        texts: key → value as text.
        values: key → parsed value.
    """

    name: str
    texts: Mapping[str, str]
    values: Mapping[str, Any]

    @property
    def of_data(self) -> tuple[str, ...]:
        """``KEY=VALUE`` of the ``[data]`` keys. Only combinations with equal data are comparable."""
        return tuple(f"{key}={text}" for key, text in self.texts.items() if key.split(".")[0] == "data")


def parse_grid(texts: Sequence[str], overrides: Sequence[str] = ()) -> list[Combination]:
    """Parse ``--grid`` into all combinations of values; the last key varies fastest.

    Args:
        texts: ``"key.sub=value,value"`` each. A value is written as in TOML; a bare word is a string.
        overrides: values of ``--set``, whose keys cannot be in the grid.

    Returns:
        The combinations; a single empty one if ``texts`` is empty.

    Raises:
        ConfigError: a text is malformed, a key or value is repeated, or a key is not allowed in a grid.

    >>> [each.name for each in parse_grid(["method.name=feddpo,fedper", "method.lr=1e-4,1e-3"])]
    ['feddpo-lr0.0001', 'feddpo-lr0.001', 'fedper-lr0.0001', 'fedper-lr0.001']
    """
    axes: dict[str, dict[str, Any]] = {}
    fixed = {text.partition("=")[0].strip() for text in overrides}
    for text in texts:
        key, _, words = text.partition("=")
        key = key.strip()
        if key in axes:
            raise ConfigError(
                f"--grid {text}: {key} already appears in another --grid; give all its values in one"
            )
        if key in fixed:
            raise ConfigError(f"--grid {text}: {key} is also set by --set; remove one of them")
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
    """Parse ``--seeds``: a number of seeds starting with ``first``, or a list of seeds.

    Raises:
        ConfigError: the text is neither a positive number nor a list of distinct seeds.

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
            f"--seeds {text}: write a number of seeds, e.g. --seeds 3, or distinct seeds, e.g. --seeds 1,2,5"
        )
    return seeds


def _values(text: str, key: str, words: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in _split(text, words):
        _, value = parse_override(f"{key}={word}", "--grid")
        if any(value == each and type(value) is type(each) for each in values.values()):
            raise ConfigError(f"--grid {text}: {word} is repeated")
        values[word] = value
    return values


def _split(text: str, words: str) -> list[str]:
    """Split at commas outside brackets, braces and quotes."""
    parts, pending = [], ""
    for piece in words.split(","):
        pending = f"{pending},{piece}" if pending else piece
        quotes = any(pending.count(mark) % 2 for mark in "\"'")
        if not quotes and all(pending.count(a) <= pending.count(b) for a, b in ("[]", "{}")):
            parts.append(pending.strip())
            pending = ""
    if pending or not all(parts):
        raise ConfigError(
            f"--grid {text}: a value is empty; write key=value,value, e.g. --grid method.lr=1e-4,1e-3"
        )
    return parts


def _word(key: str, value: Any) -> str:
    """A key with its value, for a folder's name; only the value if it is a string."""
    return value if isinstance(value, str) else f"{key}{str(value).lower()}"


def _folder(name: str, texts: Mapping[str, str]) -> str:
    """``name`` as a safe folder name, made unique by a digest of the values if it had to change."""
    safe = re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).strip("-.+_")[:_LONGEST]
    if safe == name:
        return name
    digest = hashlib.sha256("\n".join(f"{key}={text}" for key, text in texts.items()).encode())
    return f"{safe}-{digest.hexdigest()[:6]}".lstrip("-")
