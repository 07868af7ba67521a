"""Charts that compare runs: accuracy over rounds, traffic and time, the worst client, and clients' gains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prefed.core.text import pluralize, size
from prefed.runs.finished_run import RunRecord
from prefed.runs.seed_groups import Case, by_seed, spent
from prefed.train.metrics import LEADING_METRICS, TABLE
from prefed.ui.pages.chart_data import (
    BARS,
    ROUNDS,
    Axis,
    Bars,
    Chart,
    Line,
    Look,
    Panel,
    bars_of,
    color_of,
    distributions_of,
    look_of,
    percent,
)
from prefed.ui.pages.chart_data import over_rounds as rounds_line
from prefed.ui.pages.comparison_data import Compared, disagreements, labels, plus_minus
from prefed.ui.pages.svg import LINE

BANDS = 6
"""Maximum number of cases with bands of one standard deviation over seeds."""
WIDE = 20.0
"""Minimum ratio of costs between cases for a logarithmic axis."""
CELLS = 6000
"""Maximum number of cells in the table of clients."""
DOTS = 200
"""Maximum number of dots in a strip."""
STEPS = (0.2, 0.1, 0.03)
"""Thresholds of differences for the colours in the table of clients."""


def comparison(runs: Sequence[RunRecord]) -> Chart:
    """The comparison plot: accuracy over rounds, clients after the last round, traffic."""
    marked = disagreements(runs)
    names = [name + (" *" if i in marked else "") for i, name in enumerate(labels(runs))]
    everybody = sorted({client for run in runs for client in run.clients})
    accuracies = [run.figures["preference_accuracy"].values["per_client"] for run in runs]
    groups = [(name, color_of(k), own) for k, (name, own) in enumerate(zip(names, accuracies, strict=True))]
    if len(everybody) <= BARS and len(everybody) * len(runs) <= 4 * BARS:
        order = sorted(everybody, key=lambda client: accuracies[0].get(client, -1.0))
        clients = bars_of(order, groups, "clients after the last round")
    else:
        clients = distributions_of(groups, "clients after the last round")
    return Chart(
        "comparison",
        "",
        "",
        [
            Panel(
                ROUNDS,
                Axis("preference accuracy", percent),
                [
                    line
                    for k, (run, name) in enumerate(zip(runs, names, strict=True))
                    for line in _ends(run, name, k)
                ],
                "over rounds: mean over clients (solid) and worst client (dashed)",
                360,
            ),
            replace(clients, title=clients.title + ("; *: not comparable" if marked else "")),
            _traffic(runs, names),
        ],
    )


def _ends(run: RunRecord, name: str, index: int) -> Iterator[Line]:
    for of, dash, label in (("mean", "", name), ("worst", "5 4", "")):
        rounds, values = run.curve("preference_accuracy", of)
        before = run.figures.get("baseline_accuracy")
        if rounds and before is not None:
            value = before.values["mean"] if of == "mean" else before.values["worst"]
            rounds, values = [0, *rounds], [value, *values]
        yield rounds_line(label, rounds, values, Look(color_of(index), 2.4, dash), percent)


def _traffic(runs: Sequence[RunRecord], names: Sequence[str]) -> Panel:
    shown = []
    for k, run in enumerate(runs):
        up, down = (float(run.summary["bytes"][way]) for way in ("up", "down"))
        text = f"{size(up)} up, {size(down)} down"
        shown += [
            Bars("", [(k, 0.0, up)], [text], color_of(k)),
            Bars("", [(k, up, up + down)], [text], color_of(k), [text], faint=True),
        ]
    return Panel(Axis(write=size, zero=True), Axis(names=names), shown, "traffic", 60 + 26 * len(runs))


def over_rounds(compared: Compared, drawn: Sequence[int], name: str) -> Chart | None:
    """A metric over rounds, mean over clients and seeds; ``None`` without values in at least two rounds."""
    points = {k: _curve(compared.cases[k], name) for k in drawn}
    if all(len(some) < 2 for some in points.values()):
        return None
    return _curves(compared, points, ROUNDS, name, "over rounds", lambda x: f"round {x:g}")


def over_spent(compared: Compared, drawn: Sequence[int], name: str, what: str) -> Chart | None:
    """A metric over cumulative bytes or seconds."""
    points: dict[int, list[_Point]] = {}
    for k in drawn:
        by_round = {0: 0.0, **spent(compared.cases[k], what)}
        curve = _curve(compared.cases[k], name)
        points[k] = [replace(point, x=by_round[int(point.x)]) for point in curve if point.x in by_round]
    ends = [point.x for some in points.values() for point in some[-1:]]
    log = bool(ends) and min(ends) > 0 and max(ends) > WIDE * min(ends)
    if log:
        points = {k: [point for point in some if point.x > 0] for k, some in points.items()}
    if what == "bytes":
        return _curves(
            compared, points, Axis("traffic in both directions", size, log), name, "against traffic", size
        )
    unit, word = _unit(max(ends, default=0.0))
    scaled = {k: [replace(point, x=point.x / unit) for point in some] for k, some in points.items()}
    kind = "of simulated time" if what == "time" else "of wall-clock time"
    axis = Axis(f"{word} {kind}", lambda value: f"{value:g}", log)
    return _curves(compared, scaled, axis, name, "against time", lambda x: f"{x:.3g} {word}")


def worst_against_mean(compared: Compared, drawn: Sequence[int], name: str) -> Chart | None:
    """The worst client's metric against the mean over clients, after the last round."""
    lines = []
    for k in drawn:
        case, label = compared.cases[k], compared.names[k]
        means, worst = by_seed(case, name), by_seed(case, name, "worst")
        if not worst:
            continue
        points = [(statistics.fmean(means.values()), statistics.fmean(worst.values()))]
        notes = [f"mean {plus_minus(means.values())}, worst client {plus_minus(worst.values())}"]
        if len(means) > 1:
            points += [(mean, worst[seed]) for seed, mean in means.items()]
            notes += [f"seed {s}: mean {m:.3f}, worst client {worst[s]:.3f}" for s, m in means.items()]
        key = compared.keys[k]
        lines.append(Line(label, points, notes, look_of(k), key=key, joined=False, main=1))
    if not lines:
        return None
    best = max(lines, key=lambda line: line.points[0][1])
    called = TABLE[name].label
    count = pluralize(len(lines), "case", "cases")
    alt = f"{called.capitalize()} of the worst client against the mean, {count}. "
    alt += f"The worst client is best in {best.name}: {best.notes[0]}."
    small = " Small markers are single seeds." if any(len(line.points) > 1 for line in lines) else ""
    x, y = Axis("mean over clients", percent), Axis("worst client", percent)
    title = f"{called.capitalize()}: worst client against mean."
    panel = Panel(x, y, lines, height=_height(lines), diagonal=True)
    equal = " On the dotted line all clients are equal." if panel.diagonal_ends else ""
    caption = f"Higher is better for the worst client, further right is better on average.{equal}{small}"
    return Chart(f"worst-client-{name}", alt, caption, [panel], title)


@dataclass(frozen=True)
class _Point:
    x: float
    y: float
    std: float | None
    note: str


def _curve(case: Case, name: str) -> list[_Point]:
    rounds, values = case.over_rounds(name)
    points = []
    before = by_seed(case, "baseline_accuracy") if name == LEADING_METRICS[0] else {}
    if before and rounds:
        points.append(_point(0, list(before.values())))
    points += [_point(number, values[:, k].tolist()) for k, number in enumerate(rounds)]
    return points


def _point(x: float, values: Sequence[float]) -> _Point:
    std = statistics.stdev(values) if len(values) > 1 else None
    return _Point(x, statistics.fmean(values), std, plus_minus(values))


def _curves(
    compared: Compared,
    points: Mapping[int, Sequence[_Point]],
    axis: Axis,
    name: str,
    over: str,
    write: Callable[[float], str],
) -> Chart | None:
    points = {k: some for k, some in points.items() if some}
    if not points:
        return None
    called = TABLE[name].label
    several = any(point.std is not None for some in points.values() for point in some)
    bands = several and len(points) <= BANDS
    lines = []
    for k, some in points.items():
        points_of = [(p.x, p.y) for p in some]
        notes = [f"{p.note} at {write(p.x)}" for p in some]
        banded = bands and all(point.std is not None for point in some)
        low = [max(0.0, point.y - (point.std or 0.0)) for point in some] if banded else []
        high = [min(1.0, point.y + (point.std or 0.0)) for point in some] if banded else []
        lines.append(Line(compared.names[k], points_of, notes, look_of(k), low, high, compared.keys[k]))
    best = max(lines, key=lambda line: line.points[-1][1])
    lowest = min(lines, key=lambda line: line.points[-1][1])
    alt = f"{called.capitalize()} {over}, {pluralize(len(lines), 'case', 'cases')}, means over clients. "
    alt += f"Highest at the end: {best.name}, {best.notes[-1]}"
    alt += f"; lowest: {lowest.name}, {lowest.notes[-1]}." if len(lines) > 1 else "."
    caption = "Mean over clients" + (" and seeds" if several else "")
    caption += ", with one standard deviation over seeds." if bands else "."
    panel = Panel(axis, Axis("", percent), lines, height=_height(lines))
    file = f"{over}-{name}".replace(" ", "-")
    return Chart(file, alt, caption, [panel], f"{called.capitalize()} {over}.", named=True)


def _height(lines: Sequence[Line]) -> int:
    return max(340, round(LINE * len(lines)) + 70)


def _unit(seconds: float) -> tuple[float, str]:
    """Seconds per unit, and the unit, for a duration.

    >>> _unit(90.0), _unit(600.0)
    ((1.0, 'seconds'), (60.0, 'minutes'))
    """
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


@dataclass(frozen=True)
class Shown:
    """A case on the page: letter, name and index."""

    key: str
    name: str
    index: int

    @property
    def look(self) -> Look:
        """The style of its line."""
        return look_of(self.index)


@dataclass(frozen=True)
class Gains:
    """Clients' gains: each row has a case, cells, and a strip with one dot per client."""

    caption: str
    rows: Sequence[tuple[Shown, Sequence[str], Strip]]


@dataclass(frozen=True)
class Clients:
    """Table of clients and cases: each row has a client and, for each case, a value and its colour class."""

    title: str
    caption: str
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]


@dataclass(frozen=True)
class Strip:
    """One dot per client: ``dots`` are x, y, CSS class and tooltip; positions are in pixels."""

    alt: str
    dots: Sequence[tuple[str, str, str, str]]
    zero: str
    mean: str


def strips(each: Sequence[Mapping[str, float]]) -> tuple[list[Strip], float]:
    """Draw one strip per case, on a common scale from −most to +most.

    At most :data:`DOTS` clients are drawn, evenly by rank. Dots of nearly equal gains are stacked.

    Returns:
        The strips, and ``most``.
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
    """Tables of gains of personal over shared models, and of gains over the reference case."""
    tables = [
        _gain_rows(
            f"Each client's own model against the shared model of its run: {TABLE[LEADING_METRICS[0]].label}",
            compared.own_gains(),
            cases,
        )
    ]
    if len(cases) > 1:
        first = cases[compared.reference]
        for name in names:
            each = [{} if k == compared.reference else own for k, own in enumerate(compared.gains(name))]
            tables.append(_gain_rows(f"Against {first.key} {first.name}: {TABLE[name].label}", each, cases))
    return [table for table in tables if table.rows]


def _gain_rows(what: str, each: Sequence[Mapping[str, float]], cases: Sequence[Shown]) -> Gains:
    some = [(shown, gain) for shown, gain in zip(cases, each, strict=False) if gain]
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
    dots = f"The dots are {DOTS} clients of each case, evenly by rank" if many else "Each dot is a client"
    return Gains(f"{what}, in percentage points. {dots}; strips range from −{ends} to +{ends}.", rows)


def clients_of(compared: Compared, drawn: Sequence[int], name: str) -> Clients:
    """Table of every client in every case, starting with those that differ most between cases."""
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
    called = TABLE[name].label
    key = compared.keys[compared.reference]
    caption = f"{called.capitalize()} in percent, starting with the clients that differ most between cases. "
    caption += f"Colours show the difference from {key}: blue above, orange below. "
    if len(clients) > most:
        caption += f"{most:,} of {len(clients):,} clients. "
    if not compared.fixed:
        caption += "Each seed partitions the pairs differently, so clients differ between seeds."
    return Clients(f"Every client: {called}", caption.strip(), rows)


def _strength(gain: float) -> str:
    """The colour class of a cell.

    >>> [_strength(gain) for gain in (0.25, 0.0, -0.05)]
    ['up3', '', 'down1']
    """
    for strength, step in zip((3, 2, 1), STEPS, strict=True):
        if abs(gain) >= step:
            return f"{'up' if gain > 0 else 'down'}{strength}"
    return ""
