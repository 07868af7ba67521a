"""Nested tables, such as those of a TOML file, as one flat table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["flatten"]


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name → value of each setting in nested tables.

    >>> flatten({"seed": 1, "method": {"lr": 0.1}})
    {'seed': 1, 'method.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
