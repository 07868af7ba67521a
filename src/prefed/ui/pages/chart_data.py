"""Charts as data, and their numbers as CSV.

``svg.py`` draws charts in pages, ``plot_file.py`` writes them to files.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from prefed.core.text import printable, safe_cell

BARS = 40
"""Maximum number of clients with one bar each; beyond it, distributions are drawn."""
COLUMNS = ("panel", "series", "x", "y", "start", "low", "high", "value")
"""Columns of :func:`csv_of`. Bars have ``start``, bands ``low`` and ``high``, cells ``value``."""


@dataclass(frozen=True)
class Theme:
    """Colours of charts and pages. A page has both themes and follows the system's setting.

    Distinguishable with colour vision deficiencies (Okabe and Ito 2008).

    Attributes:
        text: labels and titles.
        quiet: grids, axes, and reference values.
        page: background.
        lines: runs and metrics, in turn.
    """

    text: str
    quiet: str
    page: str
    lines: tuple[str, ...]


LIGHT = Theme(
    "#1f2328", "#8b949e", "#ffffff",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7a5195", "#444444"),
)  # fmt: skip
DARK = Theme(
    "#e6edf3", "#7d8590", "#0d1117",
    ("#56b4e9", "#ff9a3c", "#3fd6a4", "#e59ac6", "#f0e442", "#3b82f6", "#c3a6ff", "#c9d1d9"),
)  # fmt: skip

COLORS = len(LIGHT.lines)
STROKES = ((4.5, ""), (3.0, "9 4"), (1.8, "2.5 3"), (2.2, "11 3 2 3"), (1.4, ""))
"""Widths and dashes of lines, in turn. Their number is coprime to those of colours and marks."""
MARKS = (
    "M0-4a4 4 0 1 0 .01 0Z",
    "M-3.5-3.5h7v7h-7Z",
    "M0-4.5 4.2 3.2H-4.2Z",
    "M0-5 4 0 0 5-4 0Z",
    "M0 4.5 4.2-3.2H-4.2Z",
    "M-3.6-3.6 3.6 3.6M-3.6 3.6 3.6-3.6",
    "M0-4.6V4.6M-4.6 0H4.6",
)
"""Markers of lines, in turn: circle, square, triangle, diamond, inverted triangle, cross, plus."""


@dataclass(frozen=True)
class Look:
    """Style of a line.

    Attributes:
        color: index of a theme's ``lines``, starting at 1; 0 is ``quiet``.
        mark: index of :data:`MARKS`.
    """

    color: int = 1
    width: float = 2.0
    dash: str = ""
    mark: int = 0

    @property
    def path(self) -> str:
        """The marker as an SVG path."""
        return MARKS[self.mark]


def look_of(index: int) -> Look:
    """The style of one of many lines; neighbours differ in colour, width, dashes and marker."""
    width, dash = STROKES[index % len(STROKES)]
    return Look(index % COLORS + 1, width, dash, index % len(MARKS))


def color_of(index: int) -> int:
    """The colour of one of many series, starting at 1."""
    return index % COLORS + 1


def number(value: float) -> str:
    """Format a number on an axis.

    >>> number(0.25), number(1e6)
    ('0.25', '1e+06')
    """
    return f"{value:.4g}"


def percent(value: float) -> str:
    """Format a share on an axis.

    >>> percent(0.5), percent(0.625)
    ('50%', '62.5%')
    """
    return f"{100 * value:.4g}%"


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        write: formats a value.
        whole: ticks are integers.
        zero: the axis includes 0.
        names: categories at 0, 1, 2 … from the top or the left; empty for a numeric axis.
    """

    label: str = ""
    write: Callable[[float], str] = number
    log: bool = False
    whole: bool = False
    zero: bool = False
    names: Sequence[str] = ()


ROUNDS = Axis("round", whole=True)


@dataclass(frozen=True)
class Line:
    """A curve or a scatter of points.

    Attributes:
        points: x and y.
        notes: tooltip of each point.
        low, high: band around the points; may be empty.
        key: short name for narrow charts.
        joined: whether lines connect the points.
        step: whether the curve is a step function.
        main: number of unconnected points with a large marker; ``None``: all.
        texts: labels of unconnected points; may be empty.
    """

    name: str
    points: Sequence[tuple[float, float]]
    notes: Sequence[str]
    look: Look = field(default_factory=Look)
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    key: str = ""
    joined: bool = True
    step: bool = False
    main: int | None = None
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class Bars:
    """Horizontal or vertical bars.

    Attributes:
        spans: position on the category axis, start and end of each bar.
        notes: tooltip of each bar.
        texts: labels at the ends of the bars; may be empty.
        thickness: relative to the distance between two categories.
        lying: whether the bars are horizontal.
        faint: lighter, for the second part of a stack.
    """

    name: str
    spans: Sequence[tuple[float, float, float]]
    notes: Sequence[str]
    color: int = 1
    texts: Sequence[str] = ()
    thickness: float = 0.8
    lying: bool = True
    faint: bool = False


@dataclass(frozen=True)
class Cells:
    """A heat map with colours from ``low`` to ``high``.

    Attributes:
        values: one row per name of the y axis; NaN for empty cells.
        notes: tooltip of each cell, row by row.
    """

    values: Sequence[Sequence[float]]
    notes: Sequence[str]
    low: float
    high: float
    name: str = ""


Shown: TypeAlias = Line | Bars | Cells


@dataclass(frozen=True)
class Panel:
    """Axes and their content.

    Attributes:
        height: in pixels.
        at_x, at_y: positions of reference lines.
        diagonal: whether to draw the line y = x.
    """

    x: Axis
    y: Axis
    shown: Sequence[Shown]
    title: str = ""
    height: int = 300
    at_x: float | None = None
    at_y: float | None = None
    diagonal: bool = False

    def values(self) -> tuple[list[float], list[float]]:
        """All x and all y values that the axes must cover."""
        xs, ys = [], []
        for each in self.shown:
            if isinstance(each, Line):
                xs += [x for x, _ in each.points]
                ys += [*(y for _, y in each.points), *each.low, *each.high]
            elif isinstance(each, Bars):
                along = [end for _, *ends in each.spans for end in ends]
                places = [place + side for place, *_ in each.spans for side in (-0.5, 0.5)]
                xs, ys = (xs + along, ys + places) if each.lying else (xs + places, ys + along)
        xs += [] if self.at_x is None else [self.at_x]
        ys += [] if self.at_y is None else [self.at_y]
        return xs, ys

    @property
    def diagonal_ends(self) -> tuple[float, float] | None:
        """The ends of the line y = x; ``None`` if it is not drawn or outside the axes."""
        xs, ys = self.values()
        if not self.diagonal or not xs:
            return None
        low, high = max(min(xs), min(ys)), min(max(xs), max(ys))
        return (low, high) if low < high else None


@dataclass(frozen=True)
class Chart:
    """One or more panels with a text alternative.

    Attributes:
        name: name of the CSV file, without extension.
        alt: text alternative for screen readers.
        caption: text below the chart; may be empty.
        title: text above the chart; may be empty.
        same: whether all panels share their scales.
        named: whether lines are labelled at their ends.
    """

    name: str
    alt: str
    caption: str
    panels: Sequence[Panel]
    title: str = ""
    same: bool = False
    named: bool = False

    @property
    def legend(self) -> list[tuple[str, str, Look]]:
        """Key, name and style of each named series."""
        found: dict[str, tuple[str, str, Look]] = {}
        for panel in self.panels:
            for each in panel.shown:
                if isinstance(each, Line) and each.name:
                    found.setdefault(each.name, (each.key, each.name, each.look))
                elif isinstance(each, Bars) and each.name:
                    found.setdefault(each.name, ("", each.name, Look(each.color, 9.0, mark=-1)))
        return list(found.values())


def over_rounds(
    name: str, rounds: Sequence[int], values: Sequence[float], look: Look, write: Callable[[float], str]
) -> Line:
    """A curve over rounds, with its values as tooltips."""
    called = f"{name}, " if name else ""
    notes = [f"{called}round {r}: {write(value)}" for r, value in zip(rounds, values, strict=True)]
    return Line(name, list(zip(map(float, rounds), values, strict=True)), notes, look)


Group: TypeAlias = tuple[str, int, Mapping[str, float]]
"""Accuracies drawn in one colour: label, colour, and client → accuracy."""


def bars_of(clients: Sequence[str], groups: Sequence[Group], title: str = "") -> Panel:
    """Horizontal bars, one per client and group, with the first client at the top."""
    thick = 0.8 / len(groups)
    shown = []
    for index, (label, color, per_client) in enumerate(groups):
        places = {c: at - 0.4 + (index + 0.5) * thick for at, c in enumerate(clients)}
        values = {client: per_client.get(client) for client in clients}
        shown.append(
            Bars(
                label,
                [(places[c], 0.0, v or 0.0) for c, v in values.items()],
                [f"{c}, {label}: {'none' if v is None else f'{v:.1%}'}" for c, v in values.items()],
                color,
                ["" if v is None else f"{v:.0%}" for v in values.values()] if len(groups) <= 4 else (),
                0.9 * thick,
            )
        )
    x, y = Axis("share of pairs", percent, zero=True), Axis(names=clients)
    return Panel(x, y, shown, title, 60 + (12 + 14 * len(groups)) * len(clients))


def distributions_of(groups: Sequence[Group], title: str = "") -> Panel:
    """Empirical distribution functions over clients, one per group."""
    shown = []
    for label, color, per_client in groups:
        values = sorted(per_client.values())
        shares = [count / len(values) for count in range(1, len(values) + 1)]
        pairs = list(zip(values, shares, strict=True))
        notes = [f"{label}: {share:.0%} of clients have at most {value:.1%}" for value, share in pairs]
        shown.append(Line(label, pairs, notes, Look(color), step=True))
    x, y = Axis("share of pairs", percent), Axis("cumulative share of clients", percent)
    return Panel(x, y, shown, title)


def short_name(name: str, most: int = 28) -> str:
    """Escape control characters in a name and truncate it."""
    name = printable(name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


Row: TypeAlias = dict[str, str]


def csv_of(chart: Chart) -> str:
    """The numbers of a chart as CSV, one row per point, bar or cell.

    Positions on a category axis are written as names. Empty columns are left out. Names that a spreadsheet
    would evaluate as formulas are prefixed with an apostrophe.
    """
    rows = [
        {"panel": panel.title or panel.y.label, **row}
        for panel in chart.panels
        for each in panel.shown
        for row in _rows(panel, each)
    ]
    used = [name for name in COLUMNS if any(row.get(name) for row in rows)]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(used)
    table.writerows([safe_cell(printable(row.get(name, ""))) for name in used] for row in rows)
    return text.getvalue()


def _rows(panel: Panel, shown: Shown) -> Iterator[Row]:
    if isinstance(shown, Line):
        for at, (x, y) in enumerate(shown.points):
            band = {"low": _plain(shown.low[at]), "high": _plain(shown.high[at])} if shown.low else {}
            yield {"series": shown.name, "x": _plain(x), "y": _plain(y), **band}
    elif isinstance(shown, Bars):
        names = (panel.y if shown.lying else panel.x).names
        for place, start, end in shown.spans:
            where = names[round(place)] if names else _plain(place)
            across, up = (_plain(end), where) if shown.lying else (where, _plain(end))
            yield {"series": shown.name, "x": across, "y": up, "start": _plain(start) if start else ""}
    else:
        for name, values in zip(panel.y.names, shown.values, strict=True):
            for column, value in zip(panel.x.names, values, strict=True):
                yield {"x": column, "y": name, "value": _plain(value)}


def _plain(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.10g}"


CIVIDIS = np.array(
    [
        [0, 34, 78],
        [18, 53, 112],
        [59, 73, 108],
        [87, 93, 109],
        [112, 113, 115],
        [138, 134, 120],
        [165, 156, 116],
        [195, 179, 105],
        [225, 204, 85],
        [254, 232, 56],
    ],
    dtype=np.float64,
)
"""RGB colours of heat maps from low to high: cividis (Nuñez, Anderton and Renslow 2018)."""


def heat(value: float, low: float, high: float) -> str:
    """The colour of a value in a heat map.

    >>> heat(0.0, 0.0, 1.0), heat(1.0, 0.0, 1.0)
    ('#00224e', '#fee838')
    """
    at = (len(CIVIDIS) - 1) * (0.5 if high <= low else (value - low) / (high - low))
    red, green, blue = (round(float(np.interp(at, range(len(CIVIDIS)), channel))) for channel in CIVIDIS.T)
    return f"#{red:02x}{green:02x}{blue:02x}"
