"""Plots of clients before and after, and of the blocks that they personalise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from prefed.runs.figures import Profile
from prefed.runs.record import RunRecord
from prefed.ui.pages.drawing import (
    BARS,
    Theme,
    canvas,
    draw_bars,
    draw_distributions,
    draw_line,
    legend,
    short_name,
    tell,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 400
"""A heat map of more cells has no numbers in them."""
TICKS = 16
"""Block numbers below an axis at most."""


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
        told = [
            f"median, block {block}: {value:.2f}" for block, value in zip(profile.blocks, median, strict=True)
        ]
        draw_line(axes, numbers.tolist(), median.tolist(), color=color, label="median client", told=told)
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
    if "choice_loss" not in run.summary:
        colors["reward_accuracy"] = theme.lines[2]
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
    plot.legend(loc="outside upper left", ncols=len(groups))
    return plot


def _heat_map(figure: Figure, axes: Axes, profile: Profile) -> None:
    from matplotlib import colormaps

    values = profile.values
    low, high = profile.range
    # With more colours matplotlib would draw the scale as an image, and a page's plots hold none.
    colors = colormaps["cividis"].resampled(40)
    rows, columns = (np.arange(count + 1) - 0.5 for count in values.shape)
    mesh = axes.pcolormesh(columns, rows, values, cmap=colors, vmin=low, vmax=high)
    cells = ((client, block) for client in profile.clients for block in profile.blocks)
    pairs = zip(cells, values.flat, strict=True)
    shown = (
        f"{client}, block {block}: {value:.2f}" if np.isfinite(value) else f"{client}, block {block}: none"
        for (client, block), value in pairs
    )
    tell(mesh, list(shown))
    if values.size <= CELLS:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = value < (low + high) / 2
                axes.annotate(
                    f"{value:.2f}",
                    (column, row),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="#ffffff" if dark else "#000000",
                )
    axes.set_yticks(np.arange(len(profile.clients)), [short_name(client) for client in profile.clients])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    figure.colorbar(mesh, ax=axes, label=profile.label, pad=0.02, aspect=30)
