"""What a run's page says of Distributed DPO's quantities: gradients, consensus, late uploads."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from prefed.core.text import duration, pluralize
from prefed.runs.record import RunRecord
from prefed.ui.pages.drawing import Theme, canvas, draw_line, legend, percent_axis, round_axis
from prefed.ui.pages.parts import Plot, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRADIENTS = {
    "global_loss": "loss of the global objective",
    "gradient_norm": "norm of its gradient",
    "paper_gap": "the paper's gap",
}
"""Figures of a diagnosis that are drawn over rounds, and the titles of their plots."""
OWN_PLOTS = frozenset({*GRADIENTS, "consensus_before", "consensus_after"})
"""Those that have plots of their own on the page of a run that was diagnosed or has a graph."""


def distributed(run: RunRecord) -> list[Plot]:
    """The plots that a run has: gradients if it was diagnosed, consensus with a graph, delays on a clock."""
    made = []
    if "paper_gap" in run.own_figures:
        curves = {name: run.curve(name)[1] for name in _gradients(run)}
        text = "; ".join(f"{n.replace('_', ' ')} from {v[0]:.4g} to {v[-1]:.4g}" for n, v in curves.items())
        caption = "At the published model, or at the clients' mean model where there is no server."
        made.append(plot(partial(_stationarity, run), f"Over rounds: {text}.", caption))
    if "consensus_after" in run.own_figures:
        before, after = (run.curve(f"consensus_{when}")[1][-1] for when in ("before", "after"))
        text = f"Consensus error over rounds; in the last one {before:.4g} before the mix, {after:.4g} after."
        caption = "Mean squared distance of clients' models from their mean, before and after each mix."
        made.append(plot(partial(_consensus, run), text, caption))
    if any(record.get("visits") for record in run.rounds):
        late = _delays(run)
        text = ", ".join(
            f"{pluralize(count, 'upload', 'uploads')} {pluralize(delay, 'round', 'rounds')} late"
            for delay, count in sorted(late.items())
        )
        end = run.rounds[-1].get("time")
        text += f"; the run took {duration(end)} on the virtual clock" if end else ""
        caption = "How old the models were that uploads started from, and accuracy by simulated time."
        made.append(plot(partial(_lateness, run), f"{text}.", caption))
    return made


def _gradients(run: RunRecord) -> list[str]:
    """The figures of its diagnoses; a method that shares nothing has no gradient of a global objective."""
    return [name for name in GRADIENTS if name in run.own_figures]


def _stationarity(run: RunRecord, theme: Theme) -> Figure:
    names = _gradients(run)
    figure, panels = canvas(7.2, 2.6, 1, len(names))
    for axes, name, color in zip(panels, names, theme.lines, strict=False):
        rounds, values = run.curve(name)
        told = [f"round {number}: {value:.4g}" for number, value in zip(rounds, values, strict=True)]
        draw_line(axes, rounds, values, color=color, told=told)
        axes.set(title=GRADIENTS[name], xlabel="round")
        round_axis(axes)
    return figure


def _consensus(run: RunRecord, theme: Theme) -> Figure:
    figure, (axes,) = canvas(7.2, 2.6)
    for when, color in zip(("before", "after"), theme.lines, strict=False):
        rounds, values = run.curve(f"consensus_{when}")
        told = [f"{when} the mix, round {r}: {value:.4g}" for r, value in zip(rounds, values, strict=True)]
        draw_line(axes, rounds, values, color=color, label=f"{when} the mix", told=told)
    # On a complete graph nothing is left after the mix, and zero has no logarithm.
    axes.set_yscale("log", nonpositive="mask")
    axes.set(xlabel="round", ylabel="consensus error")
    round_axis(axes)
    legend(axes)
    return figure


def _lateness(run: RunRecord, theme: Theme) -> Figure:
    figure, (left, right) = canvas(7.2, 2.6, 1, 2)
    late = _delays(run)
    left.bar([*late], [*late.values()], color=theme.lines[0])
    left.set(xlabel="rounds late", title="uploads")
    round_axis(left)
    line = _timeline(run)
    right.plot([at for at, _ in line], [value for _, value in line], "o-", color=theme.lines[1])
    right.set(xlabel="simulated seconds", title="accuracy, mean over clients")
    percent_axis(right.yaxis)
    return figure


def _delays(run: RunRecord) -> Counter[int]:
    return Counter(visit["late"] for record in run.rounds for visit in record.get("visits", ()))


def _timeline(run: RunRecord) -> list[tuple[float, float]]:
    """Simulated seconds and mean accuracy of each evaluation; empty without a clock."""
    return [
        (float(record["time"]), float(record["evaluation"]["preference_accuracy"]["mean"]))
        for record in run.rounds
        if record.get("time") and "evaluation" in record
    ]
