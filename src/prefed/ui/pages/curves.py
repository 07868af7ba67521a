"""Plots of a run over its rounds: accuracies, clients, losses, a reward head, costs, other figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.core.text import duration, size
from prefed.runs.figures import REWARDED
from prefed.runs.record import RunRecord
from prefed.ui.pages.distributed import OWN_PLOTS
from prefed.ui.pages.drawing import (
    Theme,
    canvas,
    color_of,
    draw_line,
    legend,
    percent_axis,
    plain_name,
    round_axis,
    short_name,
)
from prefed.ui.pages.shares import interval_of_mean, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW = 10
"""Clients that have a curve of their own at most; of more, quantiles are drawn."""
QUANTILES = {"lowest": 0.0, "lower quarter": 0.25, "median": 0.5, "upper quarter": 0.75, "highest": 1.0}

TITLES = {"preference_accuracy": "preference accuracy", "reward_accuracy": "reward accuracy"}
"""The two accuracies of a policy, always next to each other."""


def accuracies(run: RunRecord) -> dict[str, str]:
    """The accuracies that a run has beside each other: name → title. Those of a selector are one."""
    if "choice_loss" in run.summary:
        return {"preference_accuracy": "preference accuracy"}
    return {name: title for name, title in TITLES.items() if name in run.figures}


def _over_rounds(run: RunRecord) -> dict[str, str]:
    return {name: title for name, title in accuracies(run).items() if run.curve(name)[0]}


def accuracy(run: RunRecord, theme: Theme) -> Figure:
    """Each accuracy over rounds: the mean over clients, its 95% interval, and the worst client.

    Preference accuracy begins in round 0, the untouched model. Reward accuracy has no value there:
    nothing has changed yet.
    """
    titles = _over_rounds(run)
    figure, panels = canvas(7.2, 3.4, 1, len(titles))
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        _mean_and_worst(axes, run, name, theme.lines[0])
        shared = run.curve("shared_accuracy")
        if shared[0] and name == "preference_accuracy":
            told = _told("shared model", *shared)
            draw_line(axes, *shared, color=theme.lines[1], label="shared model, mean", told=told)
        axes.set(title=title if len(titles) > 1 else "", xlabel="round")
        percent_axis(axes.yaxis)
        round_axis(axes)
        legend(axes)
    _same_scales(panels)
    panels[0].set_ylabel("share of pairs")
    return figure


def _mean_and_worst(axes: Axes, run: RunRecord, name: str, color: Any) -> None:
    figures = _evaluations(run, name)
    rounds, values = [number for number, _ in figures], [figure["mean"] for _, figure in figures]
    intervals = [interval_of_mean(run, figure) for _, figure in figures]
    told = [f"mean, round {r}: {share(v, i)}" for r, v, i in zip(rounds, values, intervals, strict=True)]
    if any(intervals):
        band = [interval or (value, value) for interval, value in zip(intervals, values, strict=True)]
        low, high = np.array(band).T
        axes.fill_between(rounds, low, high, color=color, alpha=0.18, linewidth=0)
    label = "mean, 95% interval" if any(intervals) else "mean"
    draw_line(axes, rounds, values, color=color, label=label, told=told)
    worst = [figure["worst"] for _, figure in figures]
    told = _told("worst client", rounds, worst)
    draw_line(axes, rounds, worst, color=color, style="--", label="worst client", told=told)


def _evaluations(run: RunRecord, name: str) -> list[tuple[int, Any]]:
    """The rounds in which a figure of every client was measured, with the figure."""
    told = ((int(record["round"]), record.get("evaluation", {}).get(name)) for record in run.rounds)
    found = [
        (number, figure) for number, figure in told if isinstance(figure, Mapping) and "per_client" in figure
    ]
    before = run.figures.get("baseline_accuracy")
    start = [(0, before.values)] if before is not None and name == "preference_accuracy" else []
    return [*start, *found]


def clients(run: RunRecord, theme: Theme) -> Figure:
    """Each client's accuracies over rounds; of more than :data:`FEW` clients, quantiles over them."""
    titles = _over_rounds(run)
    figure, panels = canvas(7.2, 3.6, 1, len(titles))
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        figures = _evaluations(run, name)
        if len(run.clients) > FEW:
            _quantiles(axes, figures, theme)
        else:
            for index, client in enumerate(run.clients):
                own = [(r, each["per_client"][client]) for r, each in figures if client in each["per_client"]]
                rounds, values = [r for r, _ in own], [value for _, value in own]
                told, color = _told(client, rounds, values), color_of(theme, index, len(run.clients))
                # Of curves that run over each other every one shows.
                below = len(run.clients) - 1 - index
                width, style = 1.2 + min(1.3 * below, 4 * below / FEW), "--" if index % 2 else "-"
                look: Any = {"color": color, "width": width, "style": style, "label": short_name(client, 16)}
                draw_line(axes, rounds, values, **look, told=told)
        axes.set(title=title if len(titles) > 1 else "", xlabel="round")
        percent_axis(axes.yaxis)
        round_axis(axes)
    _same_scales(panels)
    panels[0].set_ylabel("share of pairs")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def _quantiles(axes: Axes, figures: Sequence[tuple[int, Any]], theme: Theme) -> None:
    rounds = [number for number, _ in figures]
    values = [list(figure["per_client"].values()) for _, figure in figures]
    lines = np.array([np.quantile(each, list(QUANTILES.values())) for each in values]).T
    low, quarter, _, most, high = lines
    color = theme.lines[0]
    axes.fill_between(rounds, low, high, color=color, alpha=0.13, linewidth=0)
    axes.fill_between(rounds, quarter, most, color=color, alpha=0.28, linewidth=0)
    for (name, at), line in zip(QUANTILES.items(), lines.tolist(), strict=True):
        form = "-" if at == 0.5 else "--" if at in (0.25, 0.75) else ":"
        draw_line(axes, rounds, line, color=color, style=form, label=name, told=_told(name, rounds, line))


def loss(run: RunRecord, theme: Theme) -> Figure:
    """The training loss over rounds, a mean over clients weighted by their pairs."""
    figure, (axes,) = canvas(7.2, 2.6)
    _figure(axes, run, "loss", theme.lines[2])
    axes.set(xlabel="round", ylabel="training loss")
    round_axis(axes)
    return figure


def reward_head(run: RunRecord, theme: Theme) -> Figure:
    """The figures of an explicit reward head over rounds, means over clients."""
    figure, (axes,) = canvas(7.2, 3.0)
    names = [name for name in REWARDED if name in run.figures]
    for name, color in zip(names, theme.lines, strict=False):
        label, curve = run.figures[name].label, run.curve(name)
        draw_line(axes, *curve, color=color, label=label, told=_told(label, *curve))
    axes.set(xlabel="round", ylabel="share of pairs")
    percent_axis(axes.yaxis)
    round_axis(axes)
    legend(axes)
    return figure


def cost(run: RunRecord, theme: Theme) -> Figure:
    """Bytes sent up and down by the end of each round, and how long each round took."""
    figure, (left, right) = canvas(7.2, 2.6, 1, 2)
    for name, label, color in (("bytes_up", "up", theme.lines[0]), ("bytes_down", "down", theme.lines[1])):
        rounds, values = run.curve(name)
        at, sums = [0, *rounds], [0.0, *np.cumsum(values).tolist()]
        told = [f"{label} by round {r}: {size(value)}" for r, value in zip(at, sums, strict=True)]
        draw_line(left, at, sums, color=color, style="-" if label == "up" else "--", label=label, told=told)
    left.set(xlabel="round", title="sent so far")
    left.yaxis.set_major_formatter(lambda value, _: size(value))
    legend(left)
    rounds, values = run.curve("seconds")
    told = [f"round {r}: {duration(value)}" for r, value in zip(rounds, values, strict=True)]
    draw_line(right, rounds, values, color=theme.lines[2], told=told)
    right.set(xlabel="round", title="seconds a round")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        round_axis(axes)
    return figure


def evaluated_figures(run: RunRecord) -> list[str]:
    """The run's own numbers that come from evaluations on held-out pairs, such as ``margin``."""
    return [n for n in run.own_figures if any(n in record.get("evaluation", {}) for record in run.rounds)]


def diagnostics(run: RunRecord) -> list[str]:
    """The run's other own numbers, of the method and its merge rule, that no other plot shows."""
    return [name for name in run.own_figures if name not in {*OWN_PLOTS, *evaluated_figures(run)}]


def moving(run: RunRecord, names: Sequence[str]) -> tuple[list[str], dict[str, float]]:
    """Those of ``names`` that change over rounds, and the others with the one value that each has.

    Figures with the same text before a slash, such as ``gate/0`` and ``gate/1``, change together.
    """
    values = {name: run.curve(name)[1] for name in names}
    changing = {name.split("/")[0] for name, own in values.items() if len(set(own)) > 1}
    moving = [name for name in names if name.split("/")[0] in changing]
    return moving, {name: own[0] for name, own in values.items() if own and name not in moving}


def figures(run: RunRecord, names: Sequence[str], theme: Theme) -> Figure:
    """Numbers of the round log over rounds. Those with the same text before a slash share axes."""
    from matplotlib.ticker import MaxNLocator

    panels: dict[str, list[str]] = {}
    for name in names:
        panels.setdefault(name.split("/")[0], []).append(name)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = canvas(7.2, 2.2 * rows, rows, columns)
    for axes, (title, own) in zip(grid, panels.items(), strict=False):
        for index, name in enumerate(own):
            _figure(axes, run, name, color_of(theme, index, len(own)), plain_name(name.partition("/")[2]))
            if all(value.is_integer() for value in run.curve(name)[1]):
                axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axes.set(title=plain_name(title.replace("_", " ")), xlabel="round")
        round_axis(axes)
        if len(own) > 1:
            legend(axes)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def _figure(axes: Axes, run: RunRecord, name: str, color: Any, label: str = "") -> None:
    rounds, values = run.curve(name)
    named = f"{label}, " if label else ""
    told = [f"{named}round {r}: {value:.4g}" for r, value in zip(rounds, values, strict=True)]
    draw_line(axes, rounds, values, color=color, label=label, told=told)


def _told(what: str, rounds: Sequence[int], values: Sequence[float]) -> list[str]:
    return [f"{what}, round {number}: {value:.1%}" for number, value in zip(rounds, values, strict=True)]


def _same_scales(panels: Sequence[Axes]) -> None:
    """One scale for shares that stand side by side, and the same rounds."""
    across, upwards = [axes.get_xlim() for axes in panels], [axes.get_ylim() for axes in panels]
    for axes in panels:
        axes.set_xlim(min(low for low, _ in across), max(high for _, high in across))
        axes.set_ylim(min(low for low, _ in upwards), max(high for _, high in upwards))
