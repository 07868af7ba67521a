"""Plots of what runs show together, as Distributed DPO (arXiv:2605.20696) plots it, and the same in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.runs import studies
from prefed.runs.record import RunRecord
from prefed.runs.replicates import Case, cases
from prefed.runs.stationarity import GAPS
from prefed.runs.studies import Delay, Participation, Race, Steps, Topologies, Values
from prefed.ui.pages.differences import case_names
from prefed.ui.pages.distributed import GRADIENTS
from prefed.ui.pages.drawing import Theme, canvas, color_of, draw_line, legend, percent_axis, round_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = 20
"""Cases in one plot of curves at most; more could not be told apart."""


@dataclass(frozen=True)
class JointPlot:
    """A plot that runs make together.

    Attributes:
        name: of its file.
        draw: ``None`` where the plot would hold too much; the lines say so.
        lines: the numbers in it, in words.
    """

    name: str
    draw: Callable[[Theme], Figure] | None
    lines: Sequence[str]


def drawings(runs: Sequence[RunRecord], target: float | None = None) -> list[JointPlot]:
    """Every plot that these runs make together. Means over runs that differ in their seed alone.

    Args:
        target: the accuracy of the plot of simulated times; left out: the highest that all its runs reach.
    """
    known = cases(runs)
    found = [*_methods(known)]
    kinds: list[tuple[str, Iterator[Any], Callable[[Any, Theme], Figure], Callable[[Any], list[str]]]] = [
        ("participation", studies.participation(known), _draw_participation, _say_participation),
        ("steps", studies.steps(known), _draw_steps, _say_steps),
        ("delay", studies.delay(known), _draw_delay, _say_delay),
        ("topology", studies.topologies(known), _draw_topologies, _say_topologies),
        ("time", studies.races(known, target), _draw_race, _say_race),
    ]
    for kind, some, draw, say in kinds:
        for number, study in enumerate(some, 1):
            name = kind if number == 1 else f"{kind}-{number}"
            title = [study.family.title] if study.family.title else []
            found.append(JointPlot(name, partial(draw, study), [*title, *say(study)]))
    return found


def _methods(known: Sequence[Case]) -> Iterator[JointPlot]:
    diagnosed = [case for case in known if case.diagnosed]
    if not diagnosed:
        return
    if len(diagnosed) > CURVES:
        text = f"{len(diagnosed)} cases, and {CURVES} can be told apart: name the runs to be compared"
        yield JointPlot("methods", None, [text])
        return
    lines, names = [], case_names(diagnosed)
    for case, label in zip(diagnosed, names, strict=True):
        ends = (f"{name} {_mean([gap(run) for run in case.runs])}" for name, gap in GAPS.items())
        _, losses = case.over_rounds("global_loss")
        lines.append(f"{label}: loss {_mean(losses[:, -1].tolist())}, {', '.join(ends)}")
    yield JointPlot("methods", partial(_draw_methods, diagnosed, names), lines)


def _draw_methods(known: Sequence[Case], names: Sequence[str], theme: Theme) -> Figure:
    """Loss, gradient norm and the paper's gap over rounds; the range of the seeds is shaded."""
    figure, panels = canvas(10.0, 3.8, 1, 3)
    for index, (case, label) in enumerate(zip(known, names, strict=True)):
        color = color_of(theme, index, len(known))
        for axes, name in zip(panels, GRADIENTS, strict=True):
            rounds, values = case.over_rounds(name)
            draw_line(axes, rounds, values.mean(0).tolist(), color=color, label=label)
            if len(values) > 1:
                axes.fill_between(rounds, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
    for axes, title in zip(panels, GRADIENTS.values(), strict=True):
        axes.set(title=title, xlabel="round")
        round_axis(axes)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=4)
    return figure


def _draw_participation(study: Participation, theme: Theme) -> Figure:
    figure, panels = canvas(8.0, 3.2, 1, 2)
    for axes, (name, gaps) in zip(panels, study.gaps.items(), strict=True):
        start, slope, share = study.fits[name]
        _scatter(axes, gaps, theme.lines[0], None)
        ends = np.array([0.0, max(gaps)])
        label = f"{start:.3g} + {slope:.3g}/S, R² {share:.2f}"
        axes.plot(ends, start + slope * ends, "--", color=theme.lines[1], label=label)
        axes.set(title=name, xlabel="1/S")
        legend(axes)
    return _titled(figure, study.family.title)


def _say_participation(study: Participation) -> list[str]:
    lines = []
    for name, gaps in study.gaps.items():
        start, slope, share = study.fits[name]
        fit = f"{start:.3g} + {slope:.3g}/S, R² {share:.2f}"
        lines.append(f"{name} {_list(gaps, lambda x: f'S={1 / x:.0f}')}; nearest line {fit}")
    return lines


def _draw_steps(study: Steps, theme: Theme) -> Figure:
    figure, panels = canvas(8.0, 3.2, 1, 2)
    for axes, (name, rates) in zip(panels, study.gaps.items(), strict=True):
        for index, (rate, gaps) in enumerate(sorted(rates.items())):
            _scatter(axes, gaps, color_of(theme, index, len(rates)), f"η = {rate:g}", joined=True)
        axes.set(title=name, xlabel="local steps E")
        _log_where_wide(axes, [gap for gaps in rates.values() for some in gaps.values() for gap in some])
        round_axis(axes)
        legend(axes)
    return _titled(figure, study.family.title)


def _say_steps(study: Steps) -> list[str]:
    return [
        f"{name} at η = {rate:g}: {_list(gaps, lambda x: f'E={x:.0f}')}"
        for name, rates in study.gaps.items()
        for rate, gaps in sorted(rates.items())
    ]


def _draw_delay(study: Delay, theme: Theme) -> Figure:
    """Gradient norms over rounds, and both final gaps against q_max."""
    figure, (curves, *panels) = canvas(11.0, 3.4, 1, 3)
    ordered = sorted(study.family.cases, key=lambda case: case.fleet.max_delay)
    for index, (case, label) in enumerate(zip(ordered, case_names(ordered), strict=True)):
        rounds, values = case.over_rounds("gradient_norm")
        color = color_of(theme, index, len(ordered))
        draw_line(curves, rounds, values.mean(0).tolist(), color=color, label=label)
    curves.set(title="gradient norm of the global objective", xlabel="round")
    round_axis(curves)
    legend(curves)
    for axes, (name, ways) in zip(panels, study.gaps.items(), strict=True):
        for index, (way, gaps) in enumerate(ways.items()):
            _scatter(axes, gaps, color_of(theme, index, len(ways)), f"late uploads as {way}", joined=True)
        axes.set(title=name, xlabel="q_max")
        round_axis(axes)
        legend(axes)
    return _titled(figure, study.family.title)


def _say_delay(study: Delay) -> list[str]:
    return [
        f"{name}, late uploads as {way}: {_list(gaps, lambda x: f'q_max={x:.0f}')}"
        for name, ways in study.gaps.items()
        for way, gaps in ways.items()
    ]


def _draw_topologies(study: Topologies, theme: Theme) -> Figure:
    """Consensus errors of each graph, beside what theory has them proportional to.

    Each curve has one factor of its own, which puts it nearest to the errors in logarithms.
    """
    figure, panels = canvas(9.0, 3.6, 1, 2)
    at = np.arange(len(study.graphs))
    for axes, when in zip(panels, ("before", "after"), strict=True):
        errors = [getattr(graph, when) for graph in study.graphs]
        for x, some in zip(at, errors, strict=True):
            axes.plot([x] * len(some), some, "o", color=theme.lines[0], alpha=0.5)
        means = [fmean(some) for some in errors]
        axes.plot(at, means, "_", color=theme.lines[0], markersize=18, label="runs")
        for (label, curve), color in zip(_curves(study, when).items(), theme.lines[1:], strict=False):
            axes.plot(at, curve, "--D", color=color, markerfacecolor="none", label=label)
        axes.set_xticks(at, [f"{graph.name}\nρ {graph.rho:.3g}" for graph in study.graphs])
        axes.set_yscale("log", nonpositive="mask")
        axes.set(title=f"consensus error {when} the mix")
        legend(axes)
    return _titled(figure, study.family.title)


def _curves(study: Topologies, when: str) -> dict[str, list[float]]:
    """Theoretical curves: heterogeneity's and noise's, and after the mix the paper's 1/(1 − ρ²)."""
    if any(graph.factors is None for graph in study.graphs):
        return {}
    curves = {
        "differing clients": [getattr(graph.factors, f"heterogeneity_{when}") for graph in study.graphs],
        "noisy gradients": [getattr(graph.factors, f"noise_{when}") for graph in study.graphs],
    }
    if when == "after":
        curves["1/(1 − ρ²), the paper's"] = [1 / (1 - graph.rho**2) for graph in study.graphs]
    errors = [fmean(getattr(graph, when)) for graph in study.graphs]
    return {name: _nearest(curve, errors) for name, curve in curves.items()}


def _nearest(curve: Sequence[float], errors: Sequence[float]) -> list[float]:
    """``curve`` times the factor by which it is nearest to ``errors`` in logarithms, where both are above 0.

    >>> _nearest([1.0, 2.0, 0.0], [10.0, 20.0, 0.0])
    [10.0, 20.0, 0.0]
    """
    both = [(c, e) for c, e in zip(curve, errors, strict=True) if c > 0 and e > 0]
    shift = fmean(math.log(e / c) for c, e in both) if both else 0.0
    return [round(math.exp(shift) * c, 12) for c in curve]


def _say_topologies(study: Topologies) -> list[str]:
    lines = []
    for when in ("before", "after"):
        errors = (f"{graph.name} {_mean(getattr(graph, when))}" for graph in study.graphs)
        lines.append(f"consensus error {when} the mix: {', '.join(errors)}")
        for label, curve in _curves(study, when).items():
            values = (f"{g.name} {value:.3g}" for g, value in zip(study.graphs, curve, strict=True))
            lines.append(f"  {label}, one factor: {', '.join(values)}")
    return lines


def _draw_race(study: Race, theme: Theme) -> Figure:
    figure, (curves, bars) = canvas(9.0, 3.4, 1, 2)
    names = _racers(study)
    for index, ((case, times), name) in enumerate(zip(study.seconds, names, strict=True)):
        color = color_of(theme, index, len(names))
        for number, run in enumerate(case.runs):
            at, values = zip(*studies.timeline(run), strict=True)
            curves.plot(at, values, color=color, alpha=0.8, label=name if not number else None)
        reached = [seconds for seconds in times if seconds is not None]
        mean = fmean(reached) if reached else 0.0
        bars.barh(index, mean, color=color)
        bars.annotate(f" {_times(times)}", (mean, index), va="center", fontsize=8)
    curves.axhline(study.target, color=theme.quiet, linestyle=":")
    curves.set(xlabel="simulated seconds", title="accuracy, mean over clients")
    percent_axis(curves.yaxis)
    legend(curves)
    bars.set_yticks(range(len(names)), names)
    bars.margins(x=0.35)
    bars.set(xlabel="simulated seconds", title=f"time to {study.target:.1%}")
    return _titled(figure, study.family.title)


def _say_race(study: Race) -> list[str]:
    named = zip(_racers(study), study.seconds, strict=True)
    return [f"{name}: {study.target:.1%} after {_times(times)}" for name, (_, times) in named]


def _racers(study: Race) -> list[str]:
    known = [case for case, _ in study.seconds]
    return [f"{name} ({case.fleet.server})" for name, case in zip(case_names(known), known, strict=True)]


def _times(times: Sequence[float | None]) -> str:
    reached = [seconds for seconds in times if seconds is not None]
    never = f"{len(times) - len(reached)} of {len(times)} runs never"
    if not reached:
        return never
    return f"{fmean(reached):.4g} s" + (f", {never}" if len(reached) < len(times) else "")


def _scatter(axes: Axes, values: Values, color: Any, label: str | None, *, joined: bool = False) -> None:
    """A point for each run, and where ``joined`` a line through the means."""
    for x, some in values.items():
        axes.plot([x] * len(some), some, "o", color=color, alpha=0.6)
    if joined:
        axes.plot([*values], [fmean(some) for some in values.values()], color=color, label=label)


def _log_where_wide(axes: Axes, values: Sequence[float]) -> None:
    if min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")


def _titled(figure: Figure, title: str) -> Figure:
    if title:
        figure.suptitle(title, fontsize=8)
    return figure


def _list(values: Mapping[float, Sequence[float]], name: Callable[[float], str]) -> str:
    return ", ".join(f"{name(x)} {_mean(some)}" for x, some in values.items())


def _mean(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation.

    >>> _mean([0.5, 0.7]), _mean([0.5])
    ('0.6 ± 0.14', '0.5')
    """
    mean = f"{fmean(values):.3g}"
    return f"{mean} ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else mean
