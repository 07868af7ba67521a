"""Charts as inline SVG, one drawing for wide screens and one for phones.

:func:`draw` computes the shapes and the template writes them. Colours are CSS variables, so that one drawing
serves light and dark themes. Thin lines are drawn above thick ones, which keeps overlapping lines visible.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefed.ui.pages.chart_data import Axis, Bars, Cells, Chart, Line, Panel, csv_of, heat, short_name

WIDE, NARROW = 880, 350
"""Widths of both drawings, in pixels."""
MARKED = 12
"""Maximum number of visible markers of a line."""
TOUCHED = 120
"""Maximum number of points in a panel for which tooltips are shown."""
LETTER, LINE = 6.7, 15.0
"""Width of a letter and height of a line of text, in pixels."""
ROOM = 14.0
"""Minimum distance between two names on an axis, in pixels."""
NUMBERED = 400
"""Maximum number of cells of a heat map with numbers."""


@dataclass(frozen=True)
class Shape:
    """An SVG element: tag, attributes, text and tooltip."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Shapes of one CSS class and colour (an index as in :class:`Look`, or ``None``)."""

    kind: str
    color: int | None
    shapes: list[Shape] = field(default_factory=list)

    def path(self, kind: str, data: str, note: str = "", **attributes: str) -> None:
        """Add a path."""
        self.shapes.append(Shape("path", {"class": kind, "d": data, **attributes}, note=note))

    def rect(self, left: float, top: float, width: float, height: float, note: str, **rest: str) -> None:
        """Add a rectangle."""
        place = {"x": _px(left), "y": _px(top), "width": _px(width), "height": _px(height)}
        self.shapes.append(Shape("rect", {**place, **rest}, note=note))

    def write(self, x: float, y: float, text: str, anchor: str = "start", **rest: str) -> None:
        """Add text."""
        self.shapes.append(Shape("text", {"x": _px(x), "y": _px(y), "text-anchor": anchor, **rest}, text))


@dataclass(frozen=True)
class Drawing:
    """A chart in pixels."""

    kind: str
    width: int
    height: int
    groups: list[Group]


def drawings(chart: Chart) -> list[Drawing]:
    """The chart for wide screens and for phones."""
    return [draw(chart, narrow=narrow) for narrow in (False, True)]


def csv_address(chart: Chart) -> str:
    """The chart's numbers as a data URL of a CSV file."""
    data = base64.b64encode(csv_of(chart).encode()).decode()
    return f"data:text/csv;charset=utf-8;base64,{data}"


def draw(chart: Chart, *, narrow: bool) -> Drawing:
    """Draw a chart; panels are side by side on wide screens and stacked on phones."""
    columns = 1 if narrow else 3 if len(chart.panels) == 3 else min(2, len(chart.panels))
    width = (NARROW if narrow else WIDE) // columns
    both = [panel.values() for panel in chart.panels]
    union = ([x for xs, _ in both for x in xs], [y for _, ys in both for y in ys])
    top, groups = 0, list[Group]()
    for start in range(0, len(chart.panels), columns):
        row = range(start, min(start + columns, len(chart.panels)))
        for at in row:
            values = union if chart.same else both[at]
            left = (at - start) * width
            groups += _Panel(chart, chart.panels[at], left, top, width, values, narrow).groups
        top += max(chart.panels[at].height for at in row)
    return Drawing("phone" if narrow else "broad", width * columns, top, groups)


class _Panel:
    def __init__(
        self,
        chart: Chart,
        panel: Panel,
        left: int,
        top: int,
        width: int,
        values: tuple[list[float], list[float]],
        narrow: bool,
    ):
        self.panel, self.narrow, self.named = panel, narrow, chart.named
        self.groups: list[Group] = []
        cells = next((each for each in panel.shown if isinstance(each, Cells)), None)
        texts = [text for each in panel.shown if isinstance(each, Bars) for text in each.texts]
        most = 16 if narrow else 28
        self.x_names = [short_name(name, 16) for name in panel.x.names]
        self.y_names = [short_name(name, most) for name in panel.y.names]
        turned = bool(self.x_names) and max(map(len, self.x_names)) > 4
        bottom = 12 + (26 if panel.x.label else 0)
        bottom += round(LETTER * max(map(len, self.x_names))) if turned else 14
        self.top, self.bottom = top + (44 if panel.title else 28), top + panel.height - bottom
        self.y, y_ticks = _scale(panel.y, values[1], self.bottom, self.top, 6)
        written = self.y_names or [panel.y.write(tick) for tick in y_ticks]
        self.left = left + 20 + round(LETTER * max(map(len, written), default=2))
        self.right = left + width - 14
        if chart.named:
            names = max((len(e.name) for e in panel.shown if isinstance(e, Line) and e.joined), default=0)
            self.right = left + width - (34 if narrow else min(230, 34 + round(LETTER * (names + 3))))
        elif cells is not None:
            self.right -= 46
        elif texts and not panel.x.names:
            self.right -= round(LETTER * max(map(len, texts)))
        ticks = 4 if width < WIDE / 2 - 1 or narrow else 7
        self.x, x_ticks = _scale(panel.x, values[0], self.left, self.right, ticks)
        self._frame(left, top, x_ticks, y_ticks, turned)
        if cells is not None:
            self._cells(cells)
        for each in panel.shown:
            if isinstance(each, Bars):
                self._bars(each)
        self._lines([each for each in panel.shown if isinstance(each, Line)])

    def _frame(
        self, left: int, top: int, x_ticks: Sequence[float], y_ticks: Sequence[float], turned: bool
    ) -> None:
        panel, grid = self.panel, Group("grid", None)
        self.groups.append(grid)
        if panel.title:
            grid.write(left + 2, top + 14, panel.title, **{"class": "title"})
        if panel.y.label:
            grid.write(left + 2, self.top - 14, panel.y.label)
        for tick in y_ticks:
            grid.path("tick", f"M{self.left} {_px(self.y(tick))}H{self.right}")
            grid.write(self.left - 8, self.y(tick) + 4, panel.y.write(tick), "end")
        for at, name in _with_room(self.y_names, self.bottom - self.top):
            grid.write(self.left - 8, self.y(at) + 4, name, "end")
        for tick in x_ticks:
            grid.path("tick", f"M{_px(self.x(tick))} {self.bottom}v5")
            grid.write(self.x(tick), self.bottom + 19, panel.x.write(tick), "middle")
        room = ROOM if turned else LETTER * max(map(len, self.x_names), default=1) + 8
        for at, name in _with_room(self.x_names, self.right - self.left, room):
            if turned:
                x, y = _px(self.x(at) + 4), _px(self.bottom + 8)
                grid.write(self.x(at) + 4, self.bottom + 8, name, "end", transform=f"rotate(-90 {x} {y})")
            else:
                grid.write(self.x(at), self.bottom + 19, name, "middle")
        grid.path("axis", f"M{self.left} {self.bottom}H{self.right}")
        grid.write((self.left + self.right) / 2, top + panel.height - 8, panel.x.label, "middle")
        if panel.at_x is not None:
            grid.path("axis", f"M{_px(self.x(panel.at_x))} {self.top}V{self.bottom}")
        if panel.at_y is not None:
            grid.path("axis", f"M{self.left} {_px(self.y(panel.at_y))}H{self.right}")
        if ends := panel.diagonal_ends:
            grid.path("diagonal", _path([(self.x(end), self.y(end)) for end in ends]))

    def _cells(self, cells: Cells) -> None:
        group, scale = Group("cells", None), Group("grid", None)
        values = np.array(cells.values, dtype=np.float64)
        width = (self.right - self.left) / max(1, values.shape[1])
        height = (self.bottom - self.top) / max(1, values.shape[0])
        numbered = values.size <= NUMBERED and width >= 4.5 * LETTER and height >= LINE - 2
        for ((row, column), value), note in zip(np.ndenumerate(values), cells.notes, strict=True):
            left, top = self.left + column * width, self.top + row * height
            empty = math.isnan(value)
            fill = "none" if empty else heat(float(value), cells.low, cells.high)
            group.rect(left, top, width, height, note, fill=fill)
            if numbered and not empty:
                ink = "#ffffff" if value < (cells.low + cells.high) / 2 else "#000000"
                group.write(
                    left + width / 2, top + height / 2 + 4, f"{value:.2f}", "middle", style=f"fill: {ink}"
                )
        steps, tall = 20, min(120.0, float(self.bottom - self.top))
        for step in range(steps):
            fill = heat(1 - step / (steps - 1), 0.0, 1.0)
            top = self.top + step * tall / steps
            group.rect(self.right + 10, top, 8, tall / steps + 0.5, "", fill=fill)
        scale.write(self.right + 22, self.top + 9, f"{cells.high:.2g}")
        scale.write(self.right + 22, self.top + tall, f"{cells.low:.2g}")
        self.groups += [group, scale]

    def _bars(self, bars: Bars) -> None:
        group = Group("faint bars" if bars.faint else "bars", bars.color)
        for at, ((place, start, end), note) in enumerate(zip(bars.spans, bars.notes, strict=True)):
            first, last = place - bars.thickness / 2, place + bars.thickness / 2
            if bars.lying:
                x, y = (self.x(start), self.x(end)), (self.y(first), self.y(last))
            else:
                x, y = (self.x(first), self.x(last)), (self.y(start), self.y(end))
            group.rect(min(x), min(y), abs(x[1] - x[0]), abs(y[1] - y[0]), note)
            if bars.texts and bars.lying:
                group.write(x[1] + 4, (y[0] + y[1]) / 2 + 4, bars.texts[at])
        self.groups.append(group)

    def _lines(self, lines: Sequence[Line]) -> None:
        drawn = []
        joined = [line for line in lines if line.joined and line.points]
        if self.named:
            ends = [self._at(line.points[-1]) for line in joined]
            places = spread_out([end[1] for end in ends], LINE, self.top + 4, self.bottom)
            room = int((WIDE - self.right - 22) / LETTER)
            for line, end, place in zip(joined, ends, places, strict=True):
                group = self._line(line, len(lines))
                text = f"{line.key} {line.name}".strip()
                text = line.key if self.narrow else text if len(text) <= room else f"{text[: room - 1]}…"
                # A dotted leader connects the end of the curve with its label.
                group.path("leader", _path([end, (self.right + 6, place), (self.right + 14, place)]))
                group.write(self.right + 17, place + 4, text)
                drawn.append((line, group))
        else:
            drawn += [(line, self._line(line, len(lines))) for line in joined]
        taken: list[tuple[float, float]] = []
        loose = [line for line in lines if not line.joined and line.points]
        for line in sorted(loose, key=lambda each: -each.points[0][1]):
            group = self._line(line, len(lines))
            for point, text in zip(line.points, line.texts or ([line.key] if line.key else []), strict=False):
                x, y = self._at(point)
                x, y = x + 9, y + 4
                while any(abs(x - left) < 2 * LETTER and abs(y - top) < LINE - 3 for left, top in taken):
                    y += 3
                taken.append((x, y))
                group.write(x, y, text)
            drawn.append((line, group))
        # Draw thick lines first.
        drawn.sort(key=lambda each: -each[0].look.width)
        self.groups += [group for _, group in drawn]

    def _line(self, line: Line, count: int) -> Group:
        group = Group("case" if self.named or line.key else "line", line.look.color)
        points, look = [self._at(point) for point in line.points], line.look
        if line.low:
            along = [x for x, _ in points]
            edge = [*zip(along, map(self.y, line.low), strict=True)]
            edge += reversed([*zip(along, map(self.y, line.high), strict=True)])
            group.path("band", f"{_path(edge)}Z")
        if line.joined:
            dashes = {"stroke-dasharray": look.dash} if look.dash else {}
            path = _steps(points) if line.step else _path(points)
            group.path("curve", path, **{"stroke-width": f"{look.width:g}"}, **dashes)
        # Lines have markers at different points, so that markers of equal lines do not hide each other.
        every = max(1, math.ceil(len(points) / MARKED)) if line.joined else 1
        shown = {*range(look.mark % every, len(points), every), len(points) - 1}
        shown = {len(points) - 1} if line.step else shown
        touched = max(1, math.ceil(len(points) * count / TOUCHED))
        for at in range(len(points)):
            place = f"translate({' '.join(_pixels(points[at]))})"
            label = f"{line.name}: " if line.key else ""
            if at in shown:
                small = line.main is not None and at >= line.main
                kind, place = ("mark small", f"{place} scale(.6)") if small else ("mark", place)
                group.path(kind, look.path, f"{label}{line.notes[at]}", transform=place)
            elif at % touched == 0 and not line.key:
                group.path("touch", "M-5-5h10v10h-10Z", line.notes[at], transform=place)
        return group

    def _at(self, point: tuple[float, float]) -> tuple[float, float]:
        return self.x(point[0]), self.y(point[1])


def _with_room(names: Sequence[str], pixels: float, room: float = ROOM) -> list[tuple[int, str]]:
    """The names to draw with their positions: all, or every second, third … if there is too little room."""
    every = max(1, math.ceil(room * len(names) / max(1.0, pixels)))
    return list(enumerate(names))[::every]


def _scale(
    axis: Axis, values: Sequence[float], start: float, end: float, most: int
) -> tuple[Callable[[float], float], list[float]]:
    """The map from values to pixels, with a margin at both ends, and the ticks."""
    if axis.names:
        # The first name of a vertical axis is at the top.
        first, last = (start, end) if start < end else (end, start)
        step = (last - first) / len(axis.names)
        return lambda value: first + step * (value + 0.5), []
    known = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    low, high = (min(known), max(known)) if known else (1.0, 10.0) if axis.log else (0.0, 1.0)
    if axis.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    along: Callable[[float], float] = math.log10 if axis.log else float
    lowest, highest = along(low), along(high)
    room = 0.04 * (highest - lowest) or 0.05 * abs(lowest) or 0.5
    first, last = lowest - room, highest + room
    if low >= 0 > first and not axis.log:
        first = 0.0

    def to_pixel(value: float) -> float:
        if axis.log and value <= 0:
            return start
        return start + (end - start) * (along(value) - first) / (last - first)

    return to_pixel, ticks(first, last, most, log=axis.log, whole=axis.whole)


def ticks(first: float, last: float, most: int, *, log: bool = False, whole: bool = False) -> list[float]:
    """At most ``most`` round values between two limits; on a logarithmic axis the limits are exponents.

    >>> ticks(0.0, 10.4, 7), ticks(-0.1, 3.2, 7, whole=True), ticks(-0.1, 2.2, 4, log=True)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.0, 1.0, 2.0, 3.0], [1.0, 10.0, 100.0])
    """
    if log and last - first >= 1:
        step = math.ceil((last - first) / most)
        return [10.0**power for power in range(math.ceil(first), math.floor(last) + 1, step)]
    if log:
        first, last = 10**first, 10**last
    size = 10 ** math.floor(math.log10((last - first) / most))
    steps = (size * factor for factor in (1, 2, 5, 10, 20))
    step = next(step for step in steps if (last - first) / step <= most)
    step = max(1.0, step) if whole else step
    low, high = math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9)
    return [round(count * step, 12) + 0.0 for count in range(low, high + 1) if not log or count > 0]


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions close to the wanted ones, in the same order and at least ``gap`` apart.

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


def _steps(points: Sequence[tuple[float, float]]) -> str:
    first, *others = points
    return f"M{' '.join(_pixels(first))}" + "".join(f"H{_px(x)}V{_px(y)}" for x, y in others)


def _pixels(point: tuple[float, float]) -> tuple[str, str]:
    return _px(point[0]), _px(point[1])


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
