"""The numbers that a plot draws, as a table for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.core.text import safe_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLUMNS = ("panel", "series", "x", "y", "start", "value")
"""Columns of :func:`csv_of`: where bars begin is ``start``, what a map has in a cell is ``value``."""

Row = dict[str, str]


def csv_of(figure: Figure) -> str:
    """Lines, bars, points and maps of a figure as CSV, a row for each of their points.

    A position that has a name on its axis, such as a client's, is written as this name. A column that no row
    needs is left out. A name that a spreadsheet would take for a formula has an apostrophe before it.
    """
    rows = [
        {"panel": _title(axes), **row}
        for axes in figure.axes
        if axes.get_visible() and axes.get_label() != "<colorbar>"
        for row in _rows(axes)
    ]
    used = [name for name in COLUMNS if any(row.get(name) for row in rows)]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(used)
    table.writerows([safe_cell(row.get(name, "")) for name in used] for row in rows)
    return text.getvalue()


def _rows(axes: Axes) -> Iterator[Row]:
    from matplotlib.collections import PathCollection, QuadMesh
    from matplotlib.container import BarContainer

    x_names, y_names = _names(axes.xaxis), _names(axes.yaxis)

    def at(x: float, y: float) -> Row:
        return {"x": x_names.get(x, _number(x)), "y": y_names.get(y, _number(y))}

    for line in axes.lines:
        if line.get_transform() is axes.transData:
            for x, y in _points(line.get_xydata()):
                yield {"series": _series(line), **at(x, y)}
    for bars in axes.containers:
        if isinstance(bars, BarContainer):
            for bar in bars.patches:
                yield {"series": _series(bars), **_bar(bar, bars.orientation or "vertical", at)}
    for drawn in axes.collections:
        if isinstance(drawn, QuadMesh):
            values = np.ma.filled(np.ma.asarray(drawn.get_array(), dtype=np.float64), np.nan)
            for row in range(values.shape[0]):
                for column in range(values.shape[1]):
                    yield {**at(column, row), "value": _number(values[row, column])}
        elif isinstance(drawn, PathCollection) and drawn.get_alpha() != 0:
            for x, y in _points(drawn.get_offsets()):
                yield {"series": _series(drawn), **at(x, y)}


def _points(array: Any) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = np.asarray(array, dtype=np.float64).tolist()
    return points


def _bar(bar: Any, orientation: str, at: Any) -> Row:
    """A bar's category is on one axis, how far it goes on the other."""
    if orientation == "vertical":
        return dict(at(bar.get_x() + bar.get_width() / 2, bar.get_height()))
    start = bar.get_x()
    middle = round(bar.get_y() + bar.get_height() / 2)
    return {**at(bar.get_width(), middle), **({"start": _number(start)} if start else {})}


def _names(axis: Axis) -> dict[float, str]:
    """Position → the name that an axis has there; empty on an axis of numbers."""
    from matplotlib.ticker import FixedLocator

    if not isinstance(axis.get_major_locator(), FixedLocator):
        return {}
    labels = (label.get_text().replace(r"\$", "$") for label in axis.get_ticklabels())
    return dict(zip(map(float, axis.get_majorticklocs()), labels, strict=False))


def _title(axes: Axes) -> str:
    title = axes.get_title("left") or axes.get_title("center")
    return (title or axes.get_ylabel()).replace(r"\$", "$")


def _series(artist: Any) -> str:
    label = str(artist.get_label() or "")
    return "" if label.startswith("_") else label.replace(r"\$", "$")


def _number(value: Any) -> str:
    return "" if value is None or value != value else f"{float(value):.10g}"
