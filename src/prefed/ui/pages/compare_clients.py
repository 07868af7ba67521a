"""Client by client over many runs: who gains, and every client in every case."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefed.runs.seeds import ACCURACIES
from prefed.ui.pages.chart import MARKS, color, stroke
from prefed.ui.pages.compared import Compared

CELLS = 6000
"""Cells of the table of clients at most."""
DOTS = 200
"""Clients that a strip has a dot for at most."""
STEPS = (0.2, 0.1, 0.03)
"""From which difference on a cell of that table is coloured more strongly."""


@dataclass(frozen=True)
class Shown:
    """A case as the page tells it apart: its letter, its name, and how its line looks."""

    key: str
    name: str
    index: int

    @property
    def color(self) -> int:
        """The number of its line's colour."""
        return color(self.index)

    @property
    def stroke(self) -> tuple[float, str]:
        """Width and dashes of its line."""
        return stroke(self.index)

    @property
    def mark(self) -> str:
        """The mark on its line, as an SVG path."""
        return MARKS[self.index % len(MARKS)]


@dataclass(frozen=True)
class Gains:
    """Who gains, case by case: a row has its case, its cells and a strip with a dot for each client."""

    caption: str
    rows: Sequence[tuple[Shown, Sequence[str], Strip]]


@dataclass(frozen=True)
class Clients:
    """Clients against cases: a row has the client, and for each case a figure and how strongly it differs."""

    title: str
    caption: str
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]


@dataclass(frozen=True)
class Strip:
    """One dot for each client, in pixels: ``dots`` are x, y, what colour, and what is said at it."""

    alt: str
    dots: Sequence[tuple[str, str, str, str]]
    zero: str
    mean: str


def strips(each: Sequence[Mapping[str, float]]) -> tuple[list[Strip], float]:
    """A strip for each case's gains, on one scale from −most to +most, and ``most``.

    Of many clients :data:`DOTS` are drawn, evenly by rank. Gains that are nearly equal lie above each other,
    as far as there is room.
    """
    most = max((abs(value) for values in each for value in values.values()), default=0.0) or 1.0

    def place(value: float) -> str:
        return f"{130 + 124 * value / most:.1f}"

    found = []
    for values in each:
        heights: dict[int, int] = {}
        dots = []
        ranked = sorted(values.items(), key=lambda item: item[1])
        shown = min(len(ranked), DOTS)
        for rank in range(shown):
            client, value = ranked[round(rank * (len(ranked) - 1) / max(1, shown - 1))]
            x = place(value)
            near = round(float(x) / 4)
            above = heights[near] = heights.get(near, -1) + 1
            y = 13 + (above + 1) // 2 % 4 * 3 * (1 if above % 2 else -1)
            kind = "gain" if value > 1e-9 else "loss" if value < -1e-9 else "even"
            dots.append((x, str(y), kind, f"{client}: {100 * value:+.1f}"))
        mean = statistics.fmean(values.values()) if values else 0.0
        low, high = (pick(values.values(), default=0.0) for pick in (min, max))
        alt = f"from {100 * low:+.1f} to {100 * high:+.1f} points, mean {100 * mean:+.1f}"
        found.append(Strip(alt, dots, place(0.0), place(mean)))
    return found, most


def gains_of(compared: Compared, cases: Sequence[Shown], names: Sequence[str]) -> list[Gains]:
    """Who gains by models of their own, and who gains over the reference case."""
    called = compared.accuracies
    tables = [
        _gain_rows(
            f"Each client's own model against the shared model of its run: {called[ACCURACIES[0]]}",
            compared.own_gains(),
            cases,
        )
    ]
    if len(cases) > 1:
        first = cases[compared.reference]
        for name in names:
            each = [{} if k == compared.reference else own for k, own in enumerate(compared.gains(name))]
            comparable = cases[: compared.comparable]
            tables.append(_gain_rows(f"Against {first.key} {first.name}: {called[name]}", each, comparable))
    return [table for table in tables if table.rows]


def _gain_rows(what: str, each: Sequence[Mapping[str, float]], cases: Sequence[Shown]) -> Gains:
    some = [(shown, gain) for shown, gain in zip(cases, each, strict=True) if gain]
    drawn, most = strips([gain for _, gain in some])
    ends = f"{100 * most:.0f}"
    rows = []
    for (shown, gain), strip in zip(some, drawn, strict=True):
        values = list(gain.values())
        up, down = sum(v > 1e-9 for v in values), sum(v < -1e-9 for v in values)
        cells = [
            f"{up:,}",
            f"{down:,}",
            f"{len(values) - up - down:,}",
            f"{100 * statistics.fmean(values):+.1f}",
        ]
        lowest = min(gain, key=gain.__getitem__)
        cells.append(f"{100 * gain[lowest]:+.1f} {lowest}")
        rows.append((shown, cells, strip))
    many = any(len(gain) > DOTS for _, gain in some)
    dots = f"The dots are {DOTS} clients of each case, evenly by rank" if many else "A dot is a client"
    return Gains(f"{what}, in percentage points. {dots}; strips go from −{ends} to +{ends}.", rows)


def clients_of(compared: Compared, drawn: Sequence[int], name: str) -> Clients:
    """Every client in every case, those first between whose figures in two cases most lies."""
    values = compared.values(name)
    of_drawn = [values[k] for k in drawn]
    clients = sorted({client for own in of_drawn for client in own})

    def width(client: str) -> float:
        own = [figures[client] for figures in of_drawn if client in figures]
        return max(own) - min(own)

    clients.sort(key=lambda client: -width(client))
    most = max(1, CELLS // len(drawn))
    first = values[compared.reference]
    rows = []
    for client in clients[:most]:
        cells = []
        for figures in of_drawn:
            figure = figures.get(client)
            gain = 0.0 if figure is None or client not in first else figure - first[client]
            cells.append(("" if figure is None else f"{100 * figure:.0f}", _strength(gain)))
        rows.append((client, cells))
    called = compared.accuracies[name]
    key = compared.keys[compared.reference]
    caption = f"{called.capitalize()} in percent, those clients first on whom the cases differ the most. "
    caption += f"The colour is the difference to {key}: blue above, orange below. "
    if len(clients) > most:
        caption += f"{most:,} of {len(clients):,} clients. "
    if not compared.fixed:
        caption += "Each seed deals the pairs anew, so it has clients of its own."
    return Clients(f"Every client: {called}", caption.strip(), rows)


def _strength(gain: float) -> str:
    """How a cell is coloured.

    >>> [_strength(gain) for gain in (0.25, 0.0, -0.05)]
    ['up3', '', 'down1']
    """
    for strength, step in zip((3, 2, 1), STEPS, strict=True):
        if abs(gain) >= step:
            return f"{'up' if gain > 0 else 'down'}{strength}"
    return ""
