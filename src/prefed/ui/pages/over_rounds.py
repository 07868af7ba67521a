"""What a run's page says of its rounds: accuracies, losses, other figures, costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from prefed.core.text import duration, size
from prefed.runs.figures import REWARD_MEANING, REWARDED
from prefed.runs.record import RunRecord
from prefed.ui.pages import curves
from prefed.ui.pages.parts import ROWS, Facts, Plot, Table, number, plot
from prefed.ui.pages.shares import interval_of_mean, share


@dataclass(frozen=True)
class Numbers:
    """Figures over rounds.

    Attributes:
        plot: of those that change; ``None`` if none does.
        constant: a line for each of the others.
    """

    plot: Plot | None
    constant: Sequence[str]


def accuracy_plots(run: RunRecord) -> list[Plot]:
    """Accuracies, the training loss, and the figures of a reward head if the model has one."""
    plots = [_accuracy(run)] if run.curve("preference_accuracy")[0] else []
    _, losses = run.curve("loss")
    if len(set(losses)) > 1:
        text = f"Training loss over rounds, from {losses[0]:.4g} to {losses[-1]:.4g}."
        caption = "Loss on the clients' training batches, weighted by their numbers of pairs."
        plots.append(plot(partial(curves.loss, run), text, caption))
    ends = {name: run.curve(name)[1] for name in REWARDED if name in run.figures}
    if any(ends.values()):
        text = "; ".join(
            f"{run.figures[name].label} ends at {values[-1]:.1%}" for name, values in ends.items() if values
        )
        caption = "The explicit reward head, means over clients; what each figure means is said below."
        plots.append(plot(partial(curves.reward_head, run), f"{text}.", caption))
    return plots


def _accuracy(run: RunRecord) -> Plot:
    _, means = run.curve("preference_accuracy")
    _, worst = run.curve("preference_accuracy", "worst")
    end = share(means[-1], interval_of_mean(run, run.figures["preference_accuracy"].values))
    text = f"Preference accuracy on {run.split} pairs over rounds. "
    if "baseline_accuracy" in run.figures:
        before = run.figures["baseline_accuracy"].values
        text += f"The mean over clients begins at {share(before['mean'], interval_of_mean(run, before))} and "
        text += f"ends at {end}"
        text += f"; the worst client goes from {before['worst']:.1%} to {worst[-1]:.1%}." if worst else "."
    else:
        text += f"The mean over clients ends at {end}."
    caption = "Round 0 is the untouched model. The worst client may be another one in each round."
    _, rewards = run.curve("reward_accuracy")
    if rewards and len(curves.accuracies(run)) > 1:
        text += f" Reward accuracy ends at {rewards[-1]:.1%}, mean over clients."
        caption += (
            " Preference accuracy: share of pairs whose chosen response the model assigns a higher "
            f"probability. Reward accuracy: {REWARD_MEANING}."
        )
    if interval_of_mean(run, run.figures["preference_accuracy"].values) is not None:
        caption += " The band is the 95% interval of the mean, for other pairs of the same clients."
    return plot(partial(curves.accuracy, run), text, caption)


def rounds_table(run: RunRecord) -> Table:
    """Every round's loss, means over clients, bytes and time."""
    names = [name for name in run.figures if name != "baseline_accuracy" and run.curve(name)[0]]
    heads = ["round", "loss", *(run.figures[name].label for name in names), "up", "down", "seconds"]
    rows = []
    for record in run.rounds[-ROWS:]:
        means = [record.get("evaluation", {}).get(name, {}).get("mean") for name in names]
        figures = [number(record.get("loss"), ".4f"), *map(number, means)]
        traffic = [size(record[way]) for way in ("bytes_up", "bytes_down")]
        rows.append((str(record["round"]), [*figures, *traffic, number(record.get("seconds"), ".1f")]))
    more = f"The last {ROWS:,} of {len(run.rounds):,} rounds. " if len(run.rounds) > ROWS else ""
    return Table(f"{more}Means over clients where they were measured.", heads, rows)


def costs(run: RunRecord) -> Facts:
    """Bytes, parameters, time and memory."""
    summary = run.summary
    traffic, parameters = summary["bytes"], summary.get("parameters", {})
    visits = sum(len(record.get("cohort", ())) for record in run.rounds)
    facts = [("sent by clients", size(traffic["up"])), ("sent to clients", size(traffic["down"]))]
    if visits:
        each = (f"{size(traffic[way] / visits)} {way}" for way in ("up", "down"))
        facts.append(("for each client and round", ", ".join(each)))
    if parameters:
        facts.append(("parameters trained by a client", f"{parameters['trainable']:,}"))
        facts.append(("parameters in an upload", f"{parameters['communicated']:,}"))
    facts.append(("time", duration(summary["seconds"])))
    if "peak_memory_mb" in summary:
        facts.append(("peak memory", f"{summary['peak_memory_mb']:,.0f} MiB"))
    return facts


def costs_plot(run: RunRecord) -> Plot:
    """Bytes and seconds over rounds."""
    traffic = run.summary["bytes"]
    text = f"In all {size(traffic['up'])} went up and {size(traffic['down'])} down."
    return plot(partial(curves.cost, run), text, "Bytes are those of the messages as sent.")


def numbers(run: RunRecord, names: Sequence[str]) -> Numbers | None:
    """Figures of the round log: those that change as a plot, each of the others as a line."""
    if not names:
        return None
    moving, constant = curves.moving(run, names)
    ends = []
    for name in moving:
        _, values = run.curve(name)
        if values:
            ends.append(f"{name.replace('_', ' ')} from {values[0]:.4g} to {values[-1]:.4g}")
    drawn = plot(partial(curves.figures, run, moving), "; ".join(ends[:12]) + ".") if moving else None
    return Numbers(drawn, [_constant(run, name, value) for name, value in constant.items()])


def _constant(run: RunRecord, name: str, value: float) -> str:
    rounds, _ = run.curve(name)
    when = f"in round {rounds[0]}" if len(rounds) == 1 else f"in all {len(rounds):,} rounds that tell it"
    return f"{name.replace('_', ' ')}: {value:.4g} {when}."
