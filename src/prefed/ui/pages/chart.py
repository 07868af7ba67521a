"""Charts as data: what a chart shows, in which looks, and its numbers as CSV.

``svg.py`` draws a chart inside a page, ``plot_file.py`` as a file.
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
"""Clients that get bars of their own at most; of more, the distribution is drawn."""
COLUMNS = ("panel", "series", "x", "y", "start", "low", "high", "value")
"""Columns of :func:`csv_of`: ``start`` of bars, ``low`` and ``high`` of bands, ``value`` of cells."""


@dataclass(frozen=True)
class Theme:
    """Colours of charts, and of the page around them. A page has both themes and follows the screen.

    The colours differ for people with any colour vision (Okabe and Ito 2008).

    Attributes:
        text: of labels and titles.
        quiet: of grids, axes, and values that others are compared with.
        page: behind the chart.
        lines: of runs and metrics, in turn.
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
"""Width and dashes that lines have in turn; the numbers of colours and marks are no multiples of theirs."""
MARKS = (
    "M0-4a4 4 0 1 0 .01 0Z",
    "M-3.5-3.5h7v7h-7Z",
    "M0-4.5 4.2 3.2H-4.2Z",
    "M0-5 4 0 0 5-4 0Z",
    "M0 4.5 4.2-3.2H-4.2Z",
    "M-3.6-3.6 3.6 3.6M-3.6 3.6 3.6-3.6",
    "M0-4.6V4.6M-4.6 0H4.6",
)
"""Marks that lines have in turn, as SVG paths: circle, square, triangle, diamond, triangle on its point,
cross, plus."""


@dataclass(frozen=True)
class Look:
    """How a line looks.

    Attributes:
        color: a number of the theme's colours, from 1; 0 is its quiet one.
        mark: a number of :data:`MARKS`.
    """

    color: int = 1
    width: float = 2.0
    dash: str = ""
    mark: int = 0

    @property
    def path(self) -> str:
        """The mark, as an SVG path."""
        return MARKS[self.mark]


def look_of(index: int) -> Look:
    """The look of one of many lines: neighbours differ in colour, width, dashes and mark."""
    width, dash = STROKES[index % len(STROKES)]
    return Look(index % COLORS + 1, width, dash, index % len(MARKS))


def color_of(index: int) -> int:
    """The colour of one of many series, from 1."""
    return index % COLORS + 1


def number(value: float) -> str:
    """A number along an axis.

    >>> number(0.25), number(1e6)
    ('0.25', '1e+06')
    """
    return f"{value:.4g}"


def percent(value: float) -> str:
    """A share of pairs along an axis.

    >>> percent(0.5), percent(0.625)
    ('50%', '62.5%')
    """
    return f"{100 * value:.4g}%"


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        write: a value along it, in words.
        whole: ticks are whole numbers.
        zero: it starts at 0.
        names: what is at 0, 1, 2 …, from the top or the left; empty on an axis of numbers.
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
    """A curve or loose points.

    Attributes:
        points: x and y.
        notes: what is said at each point.
        low, high: of a band around the points; empty for none.
        key: a short name where there is no room for the name.
        joined: whether the points are joined.
        step: whether the curve goes in steps.
        main: how many loose points have a large mark; the others have a small one. ``None``: all.
        texts: next to loose points; empty for none.
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
    """Bars along one axis.

    Attributes:
        spans: the place on the other axis, where the bar starts and where it ends.
        notes: what is said at each bar.
        texts: at the ends of the bars; empty for none.
        thickness: 1 is the distance between two names.
        lying: whether the bars go to the right; otherwise they go up.
        faint: for the second part of a stack.
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
    """A map of values as colours from ``low`` to ``high``.

    Attributes:
        values: a row for each name of the y axis, NaN for none.
        notes: what is said at each cell, row by row.
    """

    values: Sequence[Sequence[float]]
    notes: Sequence[str]
    low: float
    high: float
    name: str = ""


Shown: TypeAlias = Line | Bars | Cells


@dataclass(frozen=True)
class Panel:
    """Axes with what is drawn between them.

    Attributes:
        height: in pixels.
        at_x, at_y: a line where the axis has this value.
        diagonal: also draw where x and y are equal.
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
        """All x and all y that the axes must hold."""
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


@dataclass(frozen=True)
class Chart:
    """One or more panels, with words for those who do not see them.

    Attributes:
        name: of a file with its numbers, without an ending.
        alt: what the chart shows, in words.
        caption: next to it; may be empty.
        title: above it; may be empty.
        same: whether all panels have the same scales.
        named: whether the lines' names are at their ends.
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
        """Key, name and look of each series that has a name."""
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
    """A curve over rounds, which says each of its values."""
    called = f"{name}, " if name else ""
    notes = [f"{called}round {r}: {write(value)}" for r, value in zip(rounds, values, strict=True)]
    return Line(name, list(zip(map(float, rounds), values, strict=True)), notes, look)


Group: TypeAlias = tuple[str, int, Mapping[str, float]]
"""Accuracies that are drawn alike: a label, a colour, and client → accuracy."""


def bars_of(clients: Sequence[str], groups: Sequence[Group], title: str = "") -> Panel:
    """Bars to the right, one of each group per client, the first client at the top."""
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
    """For each accuracy the share of clients that have it or less, as steps."""
    shown = []
    for label, color, per_client in groups:
        values = sorted(per_client.values())
        shares = [count / len(values) for count in range(1, len(values) + 1)]
        pairs = list(zip(values, shares, strict=True))
        notes = [f"{label}: {share:.0%} of clients have at most {value:.1%}" for value, share in pairs]
        shown.append(Line(label, pairs, notes, Look(color), step=True))
    x, y = Axis("share of pairs", percent), Axis("clients with at most so much", percent)
    return Panel(x, y, shown, title)


def short_name(name: str, most: int = 28) -> str:
    """A name along an axis: control characters written out, and cut if it is long."""
    name = printable(name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


Row: TypeAlias = dict[str, str]


def csv_of(chart: Chart) -> str:
    """The numbers of a chart as CSV, a row for each point, bar and cell.

    A position that has a name on its axis, such as a client's, is written as this name. A column that no row
    needs is left out. A name that a spreadsheet would take for a formula has an apostrophe before it.
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
"""The colours of maps from low to high, red, green and blue: cividis (Nuñez, Anderton and Renslow 2018)."""


def heat(value: float, low: float, high: float) -> str:
    """The colour of a value in a map.

    >>> heat(0.0, 0.0, 1.0), heat(1.0, 0.0, 1.0)
    ('#00224e', '#fee838')
    """
    at = (len(CIVIDIS) - 1) * (0.5 if high <= low else (value - low) / (high - low))
    red, green, blue = (round(float(np.interp(at, range(len(CIVIDIS)), channel))) for channel in CIVIDIS.T)
    return f"#{red:02x}{green:02x}{blue:02x}"
