"""Curves and points of many cases as drawings inside a page.

A page over many runs has a dozen of them, so each is one SVG text for both kinds of screen: its colours are
names that the page's style gives values to. Pointing at a mark shows its figures. Lines that run over each
other stay visible: each has a colour, a width, a dash and a mark of its own, and thin dashed ones lie on
thick whole ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prefed.ui.pages.drawing import LIGHT

COLORS = len(LIGHT.lines)
"""Colours that lines have in turn: those of the page's themes."""
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
"""Marks that lines have in turn: circle, square, triangle, diamond, triangle on its point, cross, plus."""
MARKED = 12
"""Marks of a line at most."""
LETTER = 6.7
"""Width of a letter in a drawing, in pixels."""
LINE = 15.0
"""Height of a line of text, in pixels."""


@dataclass(frozen=True)
class Line:
    """A case in a chart.

    The name of a joined line stands at its end; loose points have its letter beside the main one.

    Attributes:
        key: its letter.
        index: its number, which decides how it looks.
        points: x, y, and what is said at the point.
        low, high: of a band around the points; empty for none.
        joined: whether the points are joined; of loose points the first is the main one.
    """

    key: str
    name: str
    index: int
    points: Sequence[tuple[float, float, str]]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    joined: bool = True


@dataclass(frozen=True)
class Axis:
    """An axis: what is along it, how a value on it is written, and whether values are ``whole`` numbers."""

    label: str
    write: Callable[[float], str]
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Drawn:
    """A case in pixels, as the template puts it down; ``path`` and ``band`` are those of SVG."""

    line: Line
    color: int
    stroke: tuple[float, str]
    mark: str
    path: str
    band: str
    marks: Sequence[tuple[str, str, str]]
    label: tuple[str, str, str, str]


@dataclass(frozen=True)
class Chart:
    """A chart in pixels: ``x`` and ``y`` are ticks, ``frame`` is left, top, right and bottom."""

    width: int
    height: int
    frame: tuple[int, int, int, int]
    x: Sequence[tuple[str, str]]
    y: Sequence[tuple[str, str]]
    x_label: str
    y_label: str
    diagonal: tuple[str, str, str, str] | None
    drawn: Sequence[Drawn]


@dataclass(frozen=True)
class Figure:
    """A chart in two widths, with the words for those who do not see it."""

    title: str
    alt: str
    caption: str
    wide: Chart
    narrow: Chart


def figure(
    title: str, alt: str, caption: str, lines: Sequence[Line], x: Axis, y: Axis, *, diagonal: bool = False
) -> Figure:
    """Lines over a page's width, with names at their ends, and over a phone's, with letters.

    Args:
        diagonal: also draw where x and y are equal.
    """
    most = max((len(line.name) for line in lines if line.joined), default=0)
    wide, narrow = (
        _chart(lines, x, y, width, margin, short, diagonal)
        for width, margin, short in ((880, min(230, 34 + round(LETTER * (most + 3))), False), (350, 34, True))
    )
    return Figure(title, alt, caption, wide, narrow)


def _chart(
    lines: Sequence[Line], x: Axis, y: Axis, width: int, margin: int, short: bool, diagonal: bool
) -> Chart:
    height = max(260 if short else 340, round(LINE * len(lines)) + 70)
    frame = (52, 28, width - margin, height - 46)
    xs = [point[0] for line in lines for point in line.points]
    ys = [value for line in lines for value in (*(p[1] for p in line.points), *line.low, *line.high)]
    x_scale, x_ticks = _scale(xs, frame[0], frame[2], x, 4 if short else 7)
    y_scale, y_ticks = _scale(ys, frame[3], frame[1], y, 6)
    joined = [line for line in lines if line.joined]
    ends = [(x_scale(line.points[-1][0]), y_scale(line.points[-1][1])) for line in joined]
    places = spread_out([end[1] for end in ends], LINE, frame[1] + 4, frame[3])
    drawn = []
    for line, end, place in zip(joined, ends, places, strict=True):
        text, room = f"{line.key} {line.name}", int((width - frame[2] - 22) / LETTER)
        text = line.key if short else text if len(text) <= room else f"{text[: room - 1]}…"
        # A dotted line leads from the end of the curve to its name, where the name had to move.
        leader = _path([end, (frame[2] + 6, place), (frame[2] + 14, place)])
        drawn.append(_drawn(line, x_scale, y_scale, (*_pixels((frame[2] + 17, place + 4)), text, leader)))
    beside: list[tuple[float, float]] = []
    for line in sorted((each for each in lines if not each.joined), key=lambda each: -each.points[0][1]):
        x_at, y_at = x_scale(line.points[0][0]) + 9, y_scale(line.points[0][1]) + 4
        while any(abs(x_at - left) < 2 * LETTER and abs(y_at - top) < LINE - 3 for left, top in beside):
            y_at += 3
        beside.append((x_at, y_at))
        drawn.append(_drawn(line, x_scale, y_scale, (*_pixels((x_at, y_at)), line.key, "")))
    # The thickest lie below.
    drawn.sort(key=lambda each: -each.stroke[0])
    cross = None
    if diagonal and xs:
        low, high = max(min(xs), min(ys)), min(max(xs), max(ys))
        cross = (_pixel(x_scale(low)), _pixel(y_scale(low)), _pixel(x_scale(high)), _pixel(y_scale(high)))
        cross = cross if low < high else None
    return Chart(
        width,
        height,
        frame,
        [(_pixel(x_scale(tick)), x.write(tick)) for tick in x_ticks],
        [(_pixel(y_scale(tick)), y.write(tick)) for tick in y_ticks],
        x.label,
        y.label,
        cross,
        drawn,
    )


def _drawn(
    line: Line,
    x_scale: Callable[[float], float],
    y_scale: Callable[[float], float],
    label: tuple[str, str, str, str],
) -> Drawn:
    points = [(x_scale(x), y_scale(y)) for x, y, _ in line.points]
    # Each line has its marks at other points, so that marks of equal lines do not hide each other.
    every = max(1, math.ceil(len(points) / MARKED)) if line.joined else 1
    at = {*range(line.index % every, len(points), every), len(points) - 1}
    marks = [(*_pixels(points[k]), line.points[k][2]) for k in sorted(at)]
    band = ""
    if line.low:
        along = [x for x, _ in points]
        edge = [*zip(along, map(y_scale, line.low), strict=True)]
        edge += reversed([*zip(along, map(y_scale, line.high), strict=True)])
        band = f"{_path(edge)}Z"
    path = _path(points) if line.joined else ""
    return Drawn(
        line, color(line.index), stroke(line.index), MARKS[line.index % len(MARKS)], path, band, marks, label
    )


def color(index: int) -> int:
    """The number of a line's colour among those of the page, from 1."""
    return index % COLORS + 1


def stroke(index: int) -> tuple[float, str]:
    """Width and dashes of a line."""
    return STROKES[index % len(STROKES)]


def _scale(
    values: Sequence[float], start: float, end: float, axis: Axis, ticks: int
) -> tuple[Callable[[float], float], list[float]]:
    """The map from values to pixels, with a little room at both ends, and the ticks inside."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    log = axis.log
    along: Callable[[float], float] = math.log10 if log else float
    first, last = along(low), along(high)
    room = 0.04 * (last - first) or 0.05 * abs(first) or 0.5
    first, last = first - room, last + room
    if low >= 0 > first and not log:
        first = 0.0

    def to_pixel(value: float) -> float:
        return start + (end - start) * (along(value) - first) / (last - first)

    if log:
        found = LogLocator(base=10, subs=(1, 2, 5), numticks=3 * ticks).tick_values(10**first, 10**last)
    else:
        found = MaxNLocator(ticks, steps=[1, 2, 5, 10], integer=axis.whole).tick_values(first, last)
    inside = [float(tick) for tick in found if not log or tick > 0]
    inside = [tick for tick in inside if first - 1e-12 <= along(tick) <= last + 1e-12]
    apart: list[float] = []
    for tick in inside:
        if not apart or abs(to_pixel(tick) - to_pixel(apart[-1])) >= abs(end - start) / ticks / 1.5:
            apart.append(tick)
    return to_pixel, apart


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as may be to those that are wanted, in their order, each ``gap`` from the next.

    >>> spread_out([10, 11, 50], 5, 0, 60)
    [10, 15, 50]
    >>> spread_out([60, 60], 5, 0, 60)
    [55, 60]
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    places = list(wanted)
    floor = low
    for index in order:
        places[index] = max(places[index], floor)
        floor = places[index] + gap
    ceiling = high
    for index in reversed(order):
        places[index] = min(places[index], ceiling)
        ceiling = places[index] - gap
    return places


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(" ".join(_pixels(point)) for point in points)


def _pixels(point: tuple[float, float]) -> tuple[str, str]:
    return _pixel(point[0]), _pixel(point[1])


def _pixel(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
