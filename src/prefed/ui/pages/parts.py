"""What pages are made of: plots in two widths with their numbers, tables, facts."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from prefed.ui.pages.drawing import Theme
from prefed.ui.pages.inline_svg import inline
from prefed.ui.pages.plotted import csv_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 500
"""Rows that a table of clients or rounds has at most."""

Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class Plot:
    """A plot in a page.

    Attributes:
        wide: an ``<svg>`` element.
        narrow: the same for a phone.
        alt: what the plot shows, in words.
        caption: below it; may be empty.
        name: of a file with its numbers.
        csv: the address of this file, which holds it.
    """

    wide: Markup
    narrow: Markup
    alt: str
    caption: str
    name: str
    csv: str


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
    """Draw a plot for wide and narrow screens, light or dark ones."""
    wide, narrow, numbers = inline(draw, alt)
    drawer = draw.func if isinstance(draw, partial) else draw
    name = getattr(drawer, "__name__", "").strip("_").removeprefix("draw_")
    data = base64.b64encode(csv_of(numbers).encode()).decode()
    return Plot(
        Markup(wide),
        Markup(narrow),
        alt,
        caption,
        f"{name if name.isidentifier() else 'plot'}.csv",
        f"data:text/csv;charset=utf-8;base64,{data}",
    )
