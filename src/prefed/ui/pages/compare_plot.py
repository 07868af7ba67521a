"""The plot of several runs against each other, as a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.core.text import size
from prefed.runs.record import RunRecord
from prefed.ui.pages.differences import disagreements, labels
from prefed.ui.pages.drawing import (
    BARS,
    Theme,
    canvas,
    color_of,
    draw_bars,
    draw_distributions,
    draw_line,
    percent_axis,
    round_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    _share_over_rounds(curves, "preference accuracy")
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
