"""What pages are made of: plots for both kinds of screen, tables, facts."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefed.report.drawing import DARK, LIGHT, Theme, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 500
"""Rows that a table of clients or rounds has at most."""

Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class Plot:
    """A plot for both kinds of screen. ``light`` and ``dark`` are addresses that hold the image itself."""

    light: str
    dark: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Table:
    """A table. ``heads`` are those of all columns; each row has a name and the cells that follow it."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


def number(value: Any, form: str = ".3f") -> str:
    """A number as a cell has it; empty for what is none."""
    return format(value, form) if isinstance(value, int | float) else ""


def plot(draw: Callable[[Theme], Figure], alt: str, caption: str = "") -> Plot:
    """Draw a plot for both kinds of screen."""
    light, dark = (base64.b64encode(svg(draw, theme).encode()).decode() for theme in (LIGHT, DARK))
    return Plot(f"data:image/svg+xml;base64,{light}", f"data:image/svg+xml;base64,{dark}", alt, caption)
