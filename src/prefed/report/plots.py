"""Plots: accuracy over rounds, clients before and after, what travelled, the method's own figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.core.text import size
from prefed.report.drawing import (
    BARS,
    DARK,
    LIGHT,
    Theme,
    canvas,
    color_of,
    draw_bars,
    draw_distribution,
    draw_line,
    kind_of,
    legend,
    percent_axis,
    round_axis,
    save,
    short,
    size_axis,
    svg,
)
from prefed.report.tables import disagreements, labels
from prefed.runs.figures import REWARDED
from prefed.runs.profiles import Profile
from prefed.runs.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "DARK",
    "LIGHT",
    "Theme",
    "accuracy",
    "blocks",
    "clients",
    "comparison",
    "cost",
    "figures",
    "kind_of",
    "loss",
    "reward_head",
    "save",
    "svg",
]

WRITTEN = 400
"""Cells of a heat map that have their numbers written in them at most."""
TICKS = 16
"""Blocks whose numbers stand below an axis at most."""


def accuracy(run: RunRecord, theme: Theme) -> Figure:
    """Preference accuracy over rounds: the mean over clients, the worst client, where it began."""
    figure, (axes,) = canvas(7.2, 3.4)
    _accuracy(axes, run, theme.lines[0], "")
    shared = run.curve("shared_accuracy")
    if shared[0]:
        draw_line(axes, *shared, color=theme.lines[1], label="shared model, mean")
    axes.set(xlabel="round", ylabel="share of pairs ordered rightly")
    percent_axis(axes, "y")
    round_axis(axes)
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
    """What an explicit reward head comes to over rounds, means over clients."""
    figure, (axes,) = canvas(7.2, 3.0)
    names = [name for name in REWARDED if name in run.figures]
    for name, color in zip(names, theme.lines, strict=False):
        draw_line(axes, *run.curve(name), color=color, label=run.figures[name].label)
    axes.set(xlabel="round", ylabel="share of pairs")
    percent_axis(axes, "y")
    round_axis(axes)
    legend(axes)
    return figure


def blocks(run: RunRecord, name: str, theme: Theme) -> Figure:
    """A figure of every client's blocks as colours, a row for each client.

    Of more than :data:`BARS` clients the median in each block, where their middle half lies, and all of them.
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


def clients(run: RunRecord, theme: Theme) -> Figure:
    """Every judged client before and after; of more than :data:`BARS`, how the accuracies are spread."""
    names = [n for n in ("baseline_accuracy", "shared_accuracy", "preference_accuracy") if n in run.figures]
    colors = dict(zip(("baseline_accuracy", "shared_accuracy", "preference_accuracy"),
                       (theme.quiet, theme.lines[1], theme.lines[0]), strict=True))  # fmt: skip
    held = run.figures["preference_accuracy"].values["per_client"]
    order = sorted(run.clients, key=lambda c: held[c])
    if len(order) > BARS:
        figure, (axes,) = canvas(7.2, 3.4)
        for name in names:
            label = run.figures[name].label
            draw_distribution(axes, run.figures[name].values["per_client"], colors[name], label)
        axes.set(xlabel="share of pairs ordered rightly", ylabel="clients with at most so much")
        percent_axis(axes, "x")
        percent_axis(axes, "y")
        legend(axes)
        return figure
    figure, (axes,) = canvas(7.2, 0.9 + (0.16 + 0.16 * len(names)) * len(order))
    groups = [
        (run.figures[n].label, colors[n], [run.figures[n].values["per_client"].get(c) for c in order])
        for n in names
    ]
    draw_bars(axes, order, groups)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(groups))
    return figure


def cost(run: RunRecord, theme: Theme) -> Figure:
    """What has travelled up and down by each round, and how long each round took."""
    figure, (left, right) = canvas(7.2, 2.6, 1, 2)
    for name, label, color in (("bytes_up", "up", theme.lines[0]), ("bytes_down", "down", theme.lines[1])):
        rounds, values = run.curve(name)
        sums = [0.0, *np.cumsum(values).tolist()]
        draw_line(left, [0, *rounds], sums, color=color, look="-" if label == "up" else "--", label=label)
    left.set(xlabel="round", title="sent so far")
    size_axis(left, "y")
    legend(left)
    draw_line(right, *run.curve("seconds"), color=theme.lines[2])
    right.set(xlabel="round", title="seconds a round")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        round_axis(axes)
    return figure


def figures(run: RunRecord, theme: Theme) -> Figure | None:
    """The figures that the method and its merge rule report, over rounds; ``None`` if there are none.

    Figures whose names share what stands before a slash, such as ``gate/0`` and ``gate/1``, are drawn
    together.
    """
    from matplotlib.ticker import MaxNLocator

    panels: dict[str, list[str]] = {}
    for name in run.own_figures:
        panels.setdefault(name.split("/")[0], []).append(name)
    if not panels:
        return None
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
    """Runs against each other: accuracy over rounds, clients at the end, what travelled."""
    names = [name + (" *" if i in disagreements(runs) else "") for i, name in enumerate(labels(runs))]
    colors = [color_of(theme, index, len(runs)) for index in range(len(runs))]
    everybody = sorted({client for run in runs for client in run.clients})
    few = len(everybody) <= BARS and len(everybody) * len(runs) <= 4 * BARS
    height = 0.9 + (0.16 + 0.15 * len(runs)) * len(everybody) if few else 3.4
    below = 0.7 + 0.3 * len(runs)
    figure, (curves, bars, bytes_) = canvas(8.0, 4.2 + height + below, 3, 1, [4.2, height, below])
    for run, name, color in zip(runs, names, colors, strict=True):
        _accuracy(curves, run, color, name)
    curves.set(xlabel="round", ylabel="share of pairs ordered rightly")
    curves.set_title("over rounds: mean over clients, and the worst client dashed")
    percent_axis(curves, "y")
    round_axis(curves)
    handles, texts = curves.get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside upper left", ncols=3 if max(map(len, names)) < 24 else 1)
    held = [run.figures["preference_accuracy"].values["per_client"] for run in runs]
    if few:
        order = sorted(everybody, key=lambda c: held[0].get(c, -1.0))
        draw_bars(
            bars,
            order,
            [(n, k, [h.get(c) for c in order]) for n, k, h in zip(names, colors, held, strict=True)],
        )
    else:
        for name, color, values in zip(names, colors, held, strict=True):
            draw_distribution(bars, values, color, name)
        bars.set(xlabel="share of pairs ordered rightly", ylabel="clients with at most so much")
        percent_axis(bars, "x")
        percent_axis(bars, "y")
    bars.set_title("clients at the end" + (", * on other data or models" if disagreements(runs) else ""))
    at = np.arange(len(runs))[::-1]
    up, down = ([run.summary["bytes"][way] for run in runs] for way in ("up", "down"))
    bytes_.barh(at, up, color=colors)
    bytes_.barh(at, down, left=up, color=colors, alpha=0.45)
    for y, (u, d) in zip(at, zip(up, down, strict=True), strict=True):
        bytes_.annotate(f" {size(u)} up, {size(d)} down", (u + d, y), va="center", fontsize=8)
    bytes_.set_yticks(at, names)
    bytes_.margins(x=0.35)
    bytes_.set_xlim(left=0)
    bytes_.set_title("what travelled")
    bytes_.grid(visible=False)
    size_axis(bytes_, "x")
    return figure


def _heat_map(figure: Figure, axes: Axes, profile: Profile) -> None:
    from matplotlib import colormaps

    values = profile.values
    within = bool(np.nanmin(values) >= 0 and np.nanmax(values) <= 1)
    low, high = (0.0, 1.0) if within else (float(np.nanmin(values)), float(np.nanmax(values)))
    # Of more colours the scale beside it would be an image, and a page's plots are drawn in lines alone.
    colors = colormaps["cividis"].resampled(40)
    rows, columns = (np.arange(count + 1) - 0.5 for count in values.shape)
    mesh = axes.pcolormesh(columns, rows, values, cmap=colors, vmin=low, vmax=high)
    if values.size <= WRITTEN:
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
    axes.set_yticks(np.arange(len(profile.clients)), [short(client) for client in profile.clients])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    figure.colorbar(mesh, ax=axes, label=profile.label, pad=0.02, aspect=30)


def _accuracy(axes: Axes, run: RunRecord, color: Any, name: str) -> None:
    """The mean, drawn through, and the worst client, dashed; round 0 is the untouched model."""
    for of, look, label in (("mean", "-", "mean"), ("worst", "--", "worst client")):
        rounds, values = run.curve("preference_accuracy", of)
        if not rounds:
            continue
        before = run.figures.get("baseline_accuracy")
        if before is not None:
            value = before.values["mean"] if of == "mean" else before.values["worst"]
            rounds, values = [0, *rounds], [value, *values]
        shown = {"": label, "-": name, "--": None}[look if name else ""]
        draw_line(axes, rounds, values, color=color, look=look, label=shown)
