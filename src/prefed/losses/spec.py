"""The base of every objective: a name, a source, and settings with defaults and ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prefed.core.text import did_you_mean

__all__ = ["ObjectiveSpec"]


@dataclass(frozen=True)
class _Range:
    text: str
    contains: Callable[[float], bool]


_POSITIVE = _Range("above 0", lambda value: value > 0)
_FRACTION = _Range("from 0 to 1", lambda value: 0 <= value <= 1)
_SWITCH = _Range("0 or 1", lambda value: value in (0, 1))
_NOT_NEGATIVE = _Range("at least 0", lambda value: value >= 0)
_RANGES: Mapping[str, _Range] = {
    "label_smoothing": _Range("at least 0 and below 0.5", lambda value: 0 <= value < 0.5),
    "most": _Range("at least 0 and below 1", lambda value: 0 <= value < 1),
    **dict.fromkeys(("beta", "k", "clip"), _POSITIVE),
    **dict.fromkeys(("discount", "trace"), _FRACTION),
    **dict.fromkeys(("log_margin", "exclude", "scaled", "sums"), _SWITCH),
}
"""Setting → its range. Every other setting is at least 0."""


@dataclass(frozen=True)
class ObjectiveSpec:
    """An objective's name, source and settings.

    Attributes:
        name: as in an experiment file.
        source: paper and equation.
        defaults: every setting with its default.

    >>> plain = ObjectiveSpec("plain", "a paper", {"beta": 0.1})
    >>> plain.resolve({"beta": 0.2})
    {'beta': 0.2}
    >>> plain.resolve({"bta": 0.2})
    Traceback (most recent call last):
    ...
    ValueError: objective 'plain' has no setting 'bta'; did you mean 'beta'?
    """

    name: str
    source: str
    defaults: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", MappingProxyType(dict(self.defaults)))

    def resolve(self, settings: Mapping[str, float] | None = None) -> dict[str, float]:
        """All settings: the defaults, replaced by ``settings`` where these name them.

        Raises:
            ValueError: a setting is unknown or outside its range.
        """
        for name, value in (settings or {}).items():
            if name not in self.defaults:
                known = ", ".join(self.defaults) or "none"
                hint = did_you_mean(name, self.defaults) or f"; it has: {known}"
                raise ValueError(f"objective {self.name!r} has no setting {name!r}{hint}")
            allowed = _RANGES.get(name, _NOT_NEGATIVE)
            if not (isinstance(value, int | float) and math.isfinite(value) and allowed.contains(value)):
                raise ValueError(f"objective {self.name!r}: {name} must be {allowed.text}, not {value!r}")
        return {**self.defaults, **(settings or {})}
