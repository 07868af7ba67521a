"""Plots: accuracy over rounds, clients before and after, bytes sent, the method's own figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.core.text import size
from prefed.report.comparison import disagreements, labels
from prefed.report.distributed import SHOWN
from prefed.report.drawing import (
    BARS,
    Theme,
    canvas,
    color_of,
    draw_bars,
    draw_distributions,
    draw_line,
    legend,
    percent_axis,
    round_axis,
    short_name,
)
from prefed.runs.figures import REWARDED, Profile
from prefed.runs.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 400
"""A heat map of more cells has no numbers in them."""
TICKS = 16
"""Block numbers below an axis at most."""


def accuracy(run: RunRecord, theme: Theme) -> Figure:
    """Preference accuracy over rounds: the mean over clients and the worst client, from round 0 on."""
    figure, (axes,) = canvas(7.2, 3.4)
    _accuracy(axes, run, theme.lines[0], "")
    shared = run.curve("shared_accuracy")
    if shared[0]:
        draw_line(axes, *shared, color=theme.lines[1], label="shared model, mean")
    _share_over_rounds(axes, "share of pairs ordered rightly")
    legend(axes)
    return figure


def loss(run: RunRecord, theme: Theme) -> Figure:
    """The training loss over rounds, a mean over clients weighted by their pairs."""
    figure, (axes,) = canvas(7.2, 2.6)
    draw_line(axes, *run.curve("loss"), color=theme.lines[2])
    axes.set(xlabel="round", ylabel="training loss")
    round_axis(axes)
    return figure


def reward_head(run: RunRecord, theme: Theme) -> Figure:
    """The figures of an explicit reward head over rounds, means over clients."""
    figure, (axes,) = canvas(7.2, 3.0)
    names = [name for name in REWARDED if name in run.figures]
    for name, color in zip(names, theme.lines, strict=False):
        draw_line(axes, *run.curve(name), color=color, label=run.figures[name].label)
    _share_over_rounds(axes, "share of pairs")
    legend(axes)
    return figure


def blocks(run: RunRecord, name: str, theme: Theme) -> Figure:
    """A figure of every client's blocks as colours, a row for each client.

    Of more than :data:`BARS` clients, each block's median, middle half and whole range are drawn instead.
    """
    profile = run.profiles[name]
    values, numbers = profile.values, np.arange(len(profile.blocks))
    if len(profile.clients) > BARS:
        figure, (axes,) = canvas(7.2, 3.0)
        low, quarter, median, most, high = np.nanquantile(values, (0, 0.25, 0.5, 0.75, 1), axis=0)
        color = theme.lines[0]
        axes.fill_between(numbers, low, high, color=color, alpha=0.15, linewidth=0, label="all clients")
        axes.fill_between(numbers, quarter, most, color=color, alpha=0.35, linewidth=0, label="middle half")
        draw_line(axes, numbers.tolist(), median.tolist(), color=color, label="median client")
        axes.set(ylabel=profile.label)
        legend(axes)
    else:
        figure, (axes,) = canvas(7.2, 1.0 + 0.26 * len(profile.clients))
        _heat_map(figure, axes, profile)
    every = math.ceil(len(numbers) / TICKS)
    axes.set_xticks(numbers[::every], [str(block) for block in profile.blocks[::every]])
    axes.set(xlabel="block")
    return figure


def ranking(run: RunRecord) -> list[str]:
    """The judged clients, the least accurate first."""
    accuracies = run.figures["preference_accuracy"].values["per_client"]
    return sorted(run.clients, key=lambda client: accuracies[client])


def clients(run: RunRecord, theme: Theme) -> Figure:
    """Every judged client before and after; of more than :data:`BARS`, the distribution of accuracies."""
    colors = {
        "baseline_accuracy": theme.quiet,
        "shared_accuracy": theme.lines[1],
        "preference_accuracy": theme.lines[0],
    }
    figures = {name: run.figures[name] for name in colors if name in run.figures}
    groups = [(figure.label, colors[name], figure.values["per_client"]) for name, figure in figures.items()]
    if len(run.clients) > BARS:
        plot, (axes,) = canvas(7.2, 3.4)
        draw_distributions(axes, groups)
        legend(axes)
        return plot
    order = ranking(run)
    plot, (axes,) = canvas(7.2, 0.9 + (0.16 + 0.16 * len(groups)) * len(order))
    draw_bars(axes, order, groups)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(groups))
    return plot


def cost(run: RunRecord, theme: Theme) -> Figure:
    """Bytes sent up and down by the end of each round, and how long each round took."""
    figure, (left, right) = canvas(7.2, 2.6, 1, 2)
    for name, label, color in (("bytes_up", "up", theme.lines[0]), ("bytes_down", "down", theme.lines[1])):
        rounds, values = run.curve(name)
        sums = [0.0, *np.cumsum(values).tolist()]
        draw_line(left, [0, *rounds], sums, color=color, style="-" if label == "up" else "--", label=label)
    left.set(xlabel="round", title="sent so far")
    left.yaxis.set_major_formatter(lambda value, _: size(value))
    legend(left)
    draw_line(right, *run.curve("seconds"), color=theme.lines[2])
    right.set(xlabel="round", title="seconds a round")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        round_axis(axes)
    return figure


def other_figures(run: RunRecord) -> list[str]:
    """The run's own figures that no other plot shows."""
    return [name for name in run.own_figures if name not in SHOWN]


def figures(run: RunRecord, theme: Theme) -> Figure:
    """Other figures of the round log, such as those of the method and its merge rule, over rounds.

    A run without any has no such plot. Figures with the same text before a slash in their names, such as
    ``gate/0`` and ``gate/1``, share axes.
    """
    from matplotlib.ticker import MaxNLocator

    panels: dict[str, list[str]] = {}
    for name in other_figures(run):
        panels.setdefault(name.split("/")[0], []).append(name)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = canvas(7.2, 2.2 * rows, rows, columns)
    for axes, (title, names) in zip(grid, panels.items(), strict=False):
        for index, name in enumerate(names):
            label = name.partition("/")[2]
            rounds, values = run.curve(name)
            draw_line(axes, rounds, values, color=color_of(theme, index, len(names)), label=label)
            if all(value.is_integer() for value in values):
                axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set(title=title.replace("_", " "), xlabel="round")
        round_axis(axes)
        if len(names) > 1:
            legend(axes)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def comparison(runs: Sequence[RunRecord], theme: Theme) -> Figure:
    """Runs against each other: accuracy over rounds, clients at the end, bytes sent."""
    names = [name + (" *" if i in disagreements(runs) else "") for i, name in enumerate(labels(runs))]
    colors = [color_of(theme, index, len(runs)) for index in range(len(runs))]
    everybody = sorted({client for run in runs for client in run.clients})
    few = len(everybody) <= BARS and len(everybody) * len(runs) <= 4 * BARS
    height = 0.9 + (0.16 + 0.15 * len(runs)) * len(everybody) if few else 3.4
    below = 0.7 + 0.3 * len(runs)
    figure, (curves, bars, traffic) = canvas(8.0, 4.2 + height + below, 3, 1, [4.2, height, below])
    for run, name, color in zip(runs, names, colors, strict=True):
        _accuracy(curves, run, color, name)
    curves.set_title("over rounds: mean over clients, and the worst client dashed")
    _share_over_rounds(curves, "share of pairs ordered rightly")
    handles, texts = curves.get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside upper left", ncols=3 if max(map(len, names)) < 24 else 1)
    accuracies = [run.figures["preference_accuracy"].values["per_client"] for run in runs]
    groups = list(zip(names, colors, accuracies, strict=True))
    if few:
        order = sorted(everybody, key=lambda client: accuracies[0].get(client, -1.0))
        draw_bars(bars, order, groups)
    else:
        draw_distributions(bars, groups)
    bars.set_title("clients at the end" + (", * on other data or models" if disagreements(runs) else ""))
    _traffic(traffic, runs, names, colors)
    return figure


def _traffic(axes: Axes, runs: Sequence[RunRecord], names: Sequence[str], colors: Sequence[Any]) -> None:
    at = np.arange(len(runs))[::-1]
    up, down = ([run.summary["bytes"][way] for run in runs] for way in ("up", "down"))
    axes.barh(at, up, color=colors)
    axes.barh(at, down, left=up, color=colors, alpha=0.45)
    for y, (u, d) in zip(at, zip(up, down, strict=True), strict=True):
        axes.annotate(f" {size(u)} up, {size(d)} down", (u + d, y), va="center", fontsize=8)
    axes.set_yticks(at, names)
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    axes.set_title("what travelled")
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(lambda value, _: size(value))


def _share_over_rounds(axes: Axes, label: str) -> None:
    axes.set(xlabel="round", ylabel=label)
    percent_axis(axes.yaxis)
    round_axis(axes)


def _heat_map(figure: Figure, axes: Axes, profile: Profile) -> None:
    from matplotlib import colormaps

    values = profile.values
    within = bool(np.nanmin(values) >= 0 and np.nanmax(values) <= 1)
    low, high = (0.0, 1.0) if within else (float(np.nanmin(values)), float(np.nanmax(values)))
    # With more colours matplotlib would draw the scale as an image, and a page's plots hold none.
    colors = colormaps["cividis"].resampled(40)
    rows, columns = (np.arange(count + 1) - 0.5 for count in values.shape)
    mesh = axes.pcolormesh(columns, rows, values, cmap=colors, vmin=low, vmax=high)
    if values.size <= CELLS:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = value < (low + high) / 2
                axes.annotate(
                    f"{value:.2f}",
                    (column, row),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="#ffffff" if dark else "#000000",
                )
    axes.set_yticks(np.arange(len(profile.clients)), [short_name(client) for client in profile.clients])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    figure.colorbar(mesh, ax=axes, label=profile.label, pad=0.02, aspect=30)


def _accuracy(axes: Axes, run: RunRecord, color: Any, name: str) -> None:
    """A line for the mean and a dashed one for the worst client; round 0 is the untouched model."""
    for of, style, label in (("mean", "-", "mean"), ("worst", "--", "worst client")):
        rounds, values = run.curve("preference_accuracy", of)
        if not rounds:
            continue
        before = run.figures.get("baseline_accuracy")
        if before is not None:
            value = before.values["mean"] if of == "mean" else before.values["worst"]
            rounds, values = [0, *rounds], [value, *values]
        run_label = name if of == "mean" else None
        draw_line(axes, rounds, values, color=color, style=style, label=run_label if name else label)
