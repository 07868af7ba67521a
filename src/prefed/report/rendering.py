"""HTML pages from the templates beside this file: what a page shows, and how it gets into a template.

A template cannot be given text that changes the page. Jinja escapes every value for HTML, and writes out the
control characters that names from elsewhere may have.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from prefed.core.text import printable_lines
from prefed.report.drawing import DARK, LIGHT, Theme, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Plot", "Table", "plot", "render_template"]


@dataclass(frozen=True)
class Plot:
    """A plot, inline, for both kinds of screen.

    Attributes:
        light: the address of the image for a light screen; it holds the image itself.
        dark: the same for a dark screen.
        alt: says what the plot shows, for readers who do not see it.
        caption: stands below it; may be empty.
    """

    light: str
    dark: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: stands above it.
        heads: one for each column, that of the rows' names included.
        rows: each has a name and the cells that follow it.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


def plot(draw: Callable[[Theme], Figure], alt: str, caption: str = "") -> Plot:
    """Draw a plot for both kinds of screen."""
    light, dark = (base64.b64encode(svg(draw, theme).encode()).decode() for theme in (LIGHT, DARK))
    return Plot(f"data:image/svg+xml;base64,{light}", f"data:image/svg+xml;base64,{dark}", alt, caption)


def render_template(template: str, /, **values: Any) -> str:
    """The page that a template makes of ``values``.

    Raises:
        jinja2.UndefinedError: the template needs a value that is not there.
    """
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("prefed.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _visible(value: Any) -> Any:
    """Jinja calls this with every value of a page before it escapes it. Macros give markup, which stays."""
    return printable_lines(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
