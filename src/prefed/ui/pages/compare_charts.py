"""The charts of a page over many runs: accuracy over rounds, bytes and time, worst client against mean."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefed.core.text import pluralize, size
from prefed.runs.replicates import Case
from prefed.runs.seeds import ACCURACIES, by_seed, spent
from prefed.ui.pages.chart import Axis, Figure, Line, figure
from prefed.ui.pages.compared import Compared
from prefed.ui.pages.drawing import percent
from prefed.ui.pages.seeds import plus_minus

BANDS = 6
"""Cases of which deviations over seeds are drawn as bands at most."""
WIDE = 20.0
"""What is spent is drawn on a logarithmic axis where one case spends so many times as much as another."""


def over_rounds(compared: Compared, drawn: Sequence[int], name: str) -> Figure | None:
    """A figure over rounds, mean over clients and seeds; ``None`` where no case has it in two rounds."""
    points = {k: _curve(compared.cases[k], name) for k in drawn}
    if all(len(some) < 2 for some in points.values()):
        return None
    axis = Axis("round", lambda value: f"{value:g}", whole=True)
    return _curves(compared, points, axis, name, "over rounds", lambda x: f"round {x:g}")


def over_spent(compared: Compared, drawn: Sequence[int], name: str, what: str) -> Figure | None:
    """A figure over the bytes or the seconds that were spent by the end of a round."""
    points: dict[int, list[_Point]] = {}
    for k in drawn:
        by_round = {0: 0.0, **spent(compared.cases[k], what)}
        curve = _curve(compared.cases[k], name)
        points[k] = [
            _Point(by_round[int(point.x)], point.y, point.std, point.note)
            for point in curve
            if point.x in by_round
        ]
    ends = [point.x for some in points.values() for point in some[-1:]]
    log = bool(ends) and min(ends) > 0 and max(ends) > WIDE * min(ends)
    if log:
        points = {k: [point for point in some if point.x > 0] for k, some in points.items()}
    if what == "bytes":
        return _curves(
            compared, points, Axis("bytes in both directions", size, log), name, "against bytes", size
        )
    unit, word = _unit(max(ends, default=0.0))
    scaled = {
        k: [_Point(point.x / unit, point.y, point.std, point.note) for point in some]
        for k, some in points.items()
    }
    kind = "of the fleet's clock" if what == "time" else "on the machine that ran it"
    axis = Axis(f"{word} {kind}", lambda value: f"{value:g}", log)
    return _curves(compared, scaled, axis, name, "against time", lambda x: f"{x:.3g} {word}")


def worst_against_mean(compared: Compared, drawn: Sequence[int], name: str) -> Figure | None:
    """The worst client's figure over the mean of all, after the last round."""
    lines = []
    for k in drawn:
        case, label = compared.cases[k], compared.names[k]
        means, worst = by_seed(case, name), by_seed(case, name, "worst")
        if not means:
            continue
        told = f"mean {plus_minus(means)}, worst client {plus_minus(worst)}"
        points = [(statistics.fmean(means.values()), statistics.fmean(worst.values()), told)]
        if len(means) > 1:
            points += [
                (mean, worst[seed], f"seed {seed}: mean {mean:.3f}, worst client {worst[seed]:.3f}")
                for seed, mean in means.items()
            ]
        lines.append(Line(compared.keys[k], label, k, points, joined=False))
    if not lines:
        return None
    best = max(lines, key=lambda line: line.points[0][1])
    called = compared.accuracies[name]
    count = pluralize(len(lines), "case", "cases")
    alt = f"{called.capitalize()} of the worst client against the mean, {count}. "
    alt += f"The worst client does best in {best.name}: {best.points[0][2]}."
    small = " Small marks are single seeds." if any(len(line.points) > 1 for line in lines) else ""
    x, y = Axis("mean over clients", percent), Axis("worst client", percent)
    title = f"{called.capitalize()}: worst client against mean."
    made = figure(title, alt, "", lines, x, y, diagonal=True)
    alike = "; on the dotted line all clients are alike" if made.wide.diagonal else ""
    return replace(made, caption=f"Up is fairer, to the right is better{alike}.{small}")


@dataclass(frozen=True)
class _Point:
    x: float
    y: float
    std: float | None
    note: str


def _curve(case: Case, name: str) -> list[_Point]:
    """A figure over rounds; of the policy's or choices' accuracy round 0 is the untouched model."""
    rounds, values = case.over_rounds(name)
    points = []
    before = by_seed(case, "baseline_accuracy") if name == ACCURACIES[0] else {}
    if before and rounds:
        points.append(_point(0, list(before.values())))
    points += [_point(number, values[:, k].tolist()) for k, number in enumerate(rounds)]
    return points


def _point(x: float, values: Sequence[float]) -> _Point:
    std = statistics.stdev(values) if len(values) > 1 else None
    return _Point(x, statistics.fmean(values), std, plus_minus(dict(enumerate(values))))


def _curves(
    compared: Compared,
    points: Mapping[int, Sequence[_Point]],
    axis: Axis,
    name: str,
    over: str,
    write: Callable[[float], str],
) -> Figure | None:
    points = {k: some for k, some in points.items() if some}
    if not points:
        return None
    called = compared.accuracies[name]
    several = any(point.std is not None for some in points.values() for point in some)
    bands = several and len(points) <= BANDS
    lines = []
    for k, some in points.items():
        told = [(p.x, p.y, f"{p.note} at {write(p.x)}") for p in some]
        banded = bands and all(point.std is not None for point in some)
        low = [max(0.0, point.y - (point.std or 0.0)) for point in some] if banded else []
        high = [min(1.0, point.y + (point.std or 0.0)) for point in some] if banded else []
        lines.append(Line(compared.keys[k], compared.names[k], k, told, low, high))
    best = max(lines, key=lambda line: line.points[-1][1])
    lowest = min(lines, key=lambda line: line.points[-1][1])
    alt = f"{called.capitalize()} {over}, {pluralize(len(lines), 'case', 'cases')}, means over clients. "
    alt += f"Highest at the end: {best.name}, {best.points[-1][2]}"
    alt += f"; lowest: {lowest.name}, {lowest.points[-1][2]}." if len(lines) > 1 else "."
    caption = "Mean over clients" + (" and seeds" if several else "")
    caption += ", with one standard deviation over seeds." if bands else "."
    y = Axis("", percent)
    return figure(f"{called.capitalize()} {over}.", alt, caption, lines, axis, y)


def _unit(seconds: float) -> tuple[float, str]:
    """In what a time is written.

    >>> _unit(90.0), _unit(600.0)
    ((1.0, 'seconds'), (60.0, 'minutes'))
    """
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
