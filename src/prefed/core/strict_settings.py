"""Base class of all settings, their error, and a flat view of nested settings."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class ConfigError(ValueError):
    """A settings file is invalid. The message names the file, the key and a remedy."""


class StrictModel(BaseModel):
    """Frozen settings that reject unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans(cls, data: Any) -> Any:
        """Reject booleans for numeric fields; Python would accept them as 1 and 0."""
        wrong: list[InitErrorDetails] = []
        for name, value in data.items() if isinstance(data, Mapping) else ():
            if isinstance(value, bool) and name in cls.model_fields:
                annotation = cls.model_fields[name].annotation
                kinds = {annotation, *get_args(annotation)}
                if kinds & {int, float} and bool not in kinds:
                    what = PydanticCustomError("number_type", "should be a number")
                    wrong.append(InitErrorDetails(type=what, loc=(name,), input=value))
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return data


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted name → value for every setting in nested tables.

    >>> flatten({"seed": 1, "method": {"lr": 0.1}})
    {'seed': 1, 'method.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return dotted name → both values for each setting that differs; a missing setting counts as ``None``.

    >>> differing({"seed": 1, "method": {"lr": 0.1}}, {"seed": 2, "method": {"lr": 0.1}})
    {'seed': (1, 2)}
    """
    old, new = flatten(before), flatten(after)
    pairs = {name: (old.get(name), new.get(name)) for name in sorted({*old, *new})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
