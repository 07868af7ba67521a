"""What every objective is: a name, a source, and settings with defaults and ranges."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["ObjectiveSpec"]


@dataclass(frozen=True)
class _Range:
    text: str
    holds: Callable[[float], bool]


_RANGES: Mapping[str, _Range] = MappingProxyType(
    {
        "beta": _Range("above 0", lambda value: value > 0),
        "label_smoothing": _Range("at least 0 and below 0.5", lambda value: 0 <= value < 0.5),
        "alpha": _Range("at least 0", lambda value: value >= 0),
        "log_margin": _Range("0 or 1", lambda value: value in (0, 1)),
        "gamma": _Range("at least 0", lambda value: value >= 0),
        "desirable": _Range("at least 0", lambda value: value >= 0),
        "undesirable": _Range("at least 0", lambda value: value >= 0),
        "weight": _Range("at least 0", lambda value: value >= 0),
        "exclude": _Range("0 or 1", lambda value: value in (0, 1)),
        "k": _Range("above 0", lambda value: value > 0),
        "most": _Range("at least 0 and below 1", lambda value: 0 <= value < 1),
        "scale_least": _Range("at least 0", lambda value: value >= 0),
        "scale_most": _Range("at least 0", lambda value: value >= 0),
        "kl": _Range("at least 0", lambda value: value >= 0),
        "clip": _Range("above 0", lambda value: value > 0),
        "value": _Range("at least 0", lambda value: value >= 0),
        "entropy": _Range("at least 0", lambda value: value >= 0),
        "discount": _Range("from 0 to 1", lambda value: 0 <= value <= 1),
        "trace": _Range("from 0 to 1", lambda value: 0 <= value <= 1),
        "target_kl": _Range("at least 0", lambda value: value >= 0),
        "scaled": _Range("0 or 1", lambda value: value in (0, 1)),
        "sums": _Range("0 or 1", lambda value: value in (0, 1)),
    }
)


@dataclass(frozen=True)
class ObjectiveSpec:
    """An objective's name, source and settings.

    Attributes:
        name: as in an experiment file.
        source: paper and equation.
        defaults: the settings there are, with their defaults.

    >>> recipe = ObjectiveSpec("plain", "a paper", {"beta": 0.1})
    >>> recipe.resolve({"beta": 0.2})
    {'beta': 0.2}
    >>> recipe.resolve({"bta": 0.2})
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
        """``settings`` checked, over the defaults.

        Raises:
            ValueError: a setting is unknown or outside its range.
        """
        for name, value in (settings or {}).items():
            if name not in self.defaults:
                known = ", ".join(self.defaults) or "none"
                close = difflib.get_close_matches(name, self.defaults, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"it has: {known}"
                raise ValueError(f"objective {self.name!r} has no setting {name!r}; {hint}")
            allowed = _RANGES[name]
            if not (isinstance(value, int | float) and math.isfinite(value) and allowed.holds(value)):
                raise ValueError(f"objective {self.name!r}: {name} must be {allowed.text}, not {value!r}")
        return {**self.defaults, **(settings or {})}
