"""What a run's page shows over rounds: accuracies, losses, clients, costs, gradients, own metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from prefed.core.text import duration, pluralize, size
from prefed.runs.metrics import REWARD_MEANING, REWARDED
from prefed.runs.record import RunRecord
from prefed.ui.pages.chart import (
    ROUNDS,
    Axis,
    Bars,
    Chart,
    Line,
    Look,
    Panel,
    color_of,
    number,
    over_rounds,
    percent,
    short_name,
)
from prefed.ui.pages.metric_text import interval_of_mean, share
from prefed.ui.pages.tables import ROWS, Facts, Table, cell

FEW = 10
"""Clients that have a curve of their own at most; of more, quantiles are drawn."""
QUANTILES = {"lowest": 0.0, "lower quarter": 0.25, "median": 0.5, "upper quarter": 0.75, "highest": 1.0}
TITLES = {"preference_accuracy": "preference accuracy", "reward_accuracy": "reward accuracy"}
"""The two accuracies of a policy, always next to each other."""
GRADIENTS = {
    "global_loss": "loss of the global objective",
    "gradient_norm": "norm of its gradient",
    "paper_gap": "the paper's gap",
}
"""Metrics of a diagnosis, and the titles of their panels."""
OWN_CHARTS = frozenset({*GRADIENTS, "consensus_before", "consensus_after"})
"""Metrics that have a chart of their own on the page of a run that was diagnosed or has a graph."""
DASHED = "7 4"


@dataclass(frozen=True)
class Numbers:
    """Metrics over rounds.

    Attributes:
        plot: of those that change; ``None`` if none does.
        constant: a line for each of the others.
    """

    plot: Chart | None
    constant: Sequence[str]


def accuracies(run: RunRecord) -> dict[str, str]:
    """The accuracies that a run has next to each other: name → title. Those of a selector are one."""
    if "choice_loss" in run.summary:
        return {"preference_accuracy": "preference accuracy"}
    return {name: title for name, title in TITLES.items() if name in run.figures}


def _measured(run: RunRecord) -> dict[str, str]:
    return {name: title for name, title in accuracies(run).items() if run.curve(name)[0]}


def accuracy_charts(run: RunRecord) -> list[Chart]:
    """Accuracies, the training loss, and the metrics of a reward head if the model has one."""
    charts = [accuracy(run)] if run.curve("preference_accuracy")[0] else []
    rounds, losses = run.curve("loss")
    if len(set(losses)) > 1:
        line = over_rounds("", rounds, losses, Look(3), number)
        charts.append(
            Chart(
                "loss",
                f"Training loss over rounds, from {losses[0]:.4g} to {losses[-1]:.4g}.",
                "Loss on the clients' training batches, weighted by their numbers of pairs.",
                [Panel(ROUNDS, Axis("training loss"), [line], height=240)],
            )
        )
    return [*charts, *reward_head(run)]


def reward_head(run: RunRecord) -> list[Chart]:
    """The metrics of an explicit reward head, means over clients; empty without one."""
    curves = {name: run.curve(name) for name in REWARDED if name in run.figures and run.curve(name)[1]}
    if not curves:
        return []
    labels = {name: run.figures[name].label for name in curves}
    lines = [
        over_rounds(labels[name], *curve, Look(color_of(index), mark=index), "{:.1%}".format)
        for index, (name, curve) in enumerate(curves.items())
    ]
    text = "; ".join(f"{labels[name]} ends at {values[-1]:.1%}" for name, (_, values) in curves.items())
    caption = "The explicit reward head, means over clients; what each metric means is explained below."
    return [
        Chart("reward_head", f"{text}.", caption, [Panel(ROUNDS, Axis("share of pairs", percent), lines)])
    ]


def accuracy(run: RunRecord) -> Chart:
    """Each accuracy over rounds: the mean over clients, its 95% interval, and the worst client.

    Preference accuracy starts in round 0, the untouched model. Reward accuracy has no value there: nothing
    has changed yet.
    """
    titles, panels = _measured(run), []
    for at, (name, title) in enumerate(titles.items()):
        lines = _mean_and_worst(run, name)
        if name == "preference_accuracy" and (shared := run.curve("shared_accuracy"))[0]:
            lines.append(over_rounds("shared model, mean", *shared, Look(2), "{:.1%}".format))
        y = Axis("" if at else "share of pairs", percent)
        panels.append(Panel(ROUNDS, y, lines, title if len(titles) > 1 else ""))
    _, means = run.curve("preference_accuracy")
    _, worst = run.curve("preference_accuracy", "worst")
    interval = interval_of_mean(run, run.figures["preference_accuracy"].values)
    end = share(means[-1], interval)
    text = f"Preference accuracy on {run.split} pairs over rounds. "
    if "baseline_accuracy" in run.figures:
        before = run.figures["baseline_accuracy"].values
        text += f"The mean over clients starts at {share(before['mean'], interval_of_mean(run, before))} and "
        text += f"ends at {end}"
        text += f"; the worst client goes from {before['worst']:.1%} to {worst[-1]:.1%}." if worst else "."
    else:
        text += f"The mean over clients ends at {end}."
    caption = "Round 0 is the untouched model. The worst client may be another one in each round."
    _, rewards = run.curve("reward_accuracy")
    if rewards and len(accuracies(run)) > 1:
        text += f" Reward accuracy ends at {rewards[-1]:.1%}, mean over clients."
        caption += (
            " Preference accuracy: share of pairs whose chosen response the model assigns a higher "
            f"probability. Reward accuracy: {REWARD_MEANING}."
        )
    if interval is not None:
        caption += " The band is the 95% interval of the mean, for other pairs of the same clients."
    return Chart("accuracy", text, caption, panels, same=True)


def _mean_and_worst(run: RunRecord, name: str) -> list[Line]:
    metrics = _evaluations(run, name)
    rounds = [at for at, _ in metrics]
    means, worst = ([metric[of] for _, metric in metrics] for of in ("mean", "worst"))
    intervals = [interval_of_mean(run, metric) for _, metric in metrics]
    band = [each or (mean, mean) for each, mean in zip(intervals, means, strict=True)]
    known = any(intervals)
    notes = [f"mean, round {r}: {share(v, i)}" for r, v, i in zip(rounds, means, intervals, strict=True)]
    points = list(zip(map(float, rounds), means, strict=True))
    low, high = ([ends[side] for ends in band] if known else [] for side in (0, 1))
    label = "mean, 95% interval" if known else "mean"
    look = Look(1, dash=DASHED, mark=2)
    return [
        Line(label, points, notes, Look(1), low, high),
        over_rounds("worst client", rounds, worst, look, "{:.1%}".format),
    ]


def _evaluations(run: RunRecord, name: str) -> list[tuple[int, Any]]:
    """The rounds in which a metric of every client was measured, with the metric."""
    logged = ((int(record["round"]), record.get("evaluation", {}).get(name)) for record in run.rounds)
    found = [(at, metric) for at, metric in logged if isinstance(metric, Mapping) and "per_client" in metric]
    before = run.figures.get("baseline_accuracy")
    start = [(0, before.values)] if before is not None and name == "preference_accuracy" else []
    return [*start, *found]


def clients(run: RunRecord) -> Chart | None:
    """Each client's accuracies; of more than :data:`FEW` clients quantiles. ``None`` of one evaluation."""
    rounds, _ = run.curve("preference_accuracy")
    if len(rounds) < 2:
        return None
    few = len(run.clients) <= FEW
    titles, panels = _measured(run), []
    for at, (name, title) in enumerate(titles.items()):
        metrics = _evaluations(run, name)
        lines = _each_client(run, metrics) if few else _quantiles(metrics)
        y = Axis("" if at else "share of pairs", percent)
        panels.append(Panel(ROUNDS, y, lines, title if len(titles) > 1 else "", 320))
    after = run.figures["preference_accuracy"].values["per_client"].values()
    text = f"Shares of {len(run.clients):,} clients over {len(rounds):,} evaluations; at the end they lie "
    text += f"between {min(after):.1%} and {max(after):.1%}."
    caption = "Each client over rounds."
    if not few:
        caption = "The clients over rounds: the lowest and the highest, the middle half, and the median."
    return Chart("clients_over_rounds", text, caption, panels, same=True)


def _each_client(run: RunRecord, metrics: Sequence[tuple[int, Any]]) -> list[Line]:
    lines = []
    for index, client in enumerate(run.clients):
        own = [(r, each["per_client"][client]) for r, each in metrics if client in each["per_client"]]
        # Of curves that run over each other every one shows.
        width = 1.5 + 0.5 * (len(run.clients) - 1 - index)
        look = Look(color_of(index), width, "5 4" if index % 2 else "", index % 7)
        name, rounds, values = short_name(client, 16), [r for r, _ in own], [value for _, value in own]
        lines.append(over_rounds(name, rounds, values, look, "{:.1%}".format))
    return lines


def _quantiles(metrics: Sequence[tuple[int, Any]]) -> list[Line]:
    rounds = [at for at, _ in metrics]
    shares = [list(metric["per_client"].values()) for _, metric in metrics]
    rows = np.array([np.quantile(each, list(QUANTILES.values())) for each in shares]).T.tolist()
    lines = []
    for (name, at), values in zip(QUANTILES.items(), rows, strict=True):
        dash = {0.5: "", 0.25: DASHED, 0.75: DASHED}.get(at, "2 3")
        line = over_rounds(name, rounds, values, Look(1, 2.4 if at == 0.5 else 1.5, dash), "{:.1%}".format)
        lines.append(line)
    lowest, quarter, median, most, highest = lines
    median = _banded(median, rows[1], rows[3])
    return [_banded(lowest, rows[0], rows[4]), quarter, median, most, highest]


def _banded(line: Line, low: Sequence[float], high: Sequence[float]) -> Line:
    return Line(line.name, line.points, line.notes, line.look, low, high)


def rounds_table(run: RunRecord) -> Table:
    """Every round's loss, means over clients, bytes and time."""
    names = [name for name in run.figures if name != "baseline_accuracy" and run.curve(name)[0]]
    heads = ["round", "loss", *(run.figures[name].label for name in names), "up", "down", "seconds"]
    rows = []
    for record in run.rounds[-ROWS:]:
        means = [record.get("evaluation", {}).get(name, {}).get("mean") for name in names]
        metrics = [cell(record.get("loss"), ".4f"), *map(cell, means)]
        traffic = [size(record[way]) for way in ("bytes_up", "bytes_down")]
        rows.append((str(record["round"]), [*metrics, *traffic, cell(record.get("seconds"), ".1f")]))
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


def cost(run: RunRecord) -> Chart:
    """Bytes sent up and down by the end of each round, and how long each round took."""
    sent = []
    for index, way in enumerate(("up", "down")):
        rounds, values = run.curve(f"bytes_{way}")
        at, sums = [0, *rounds], [0.0, *accumulate(values)]
        notes = [f"{way} by round {r}: {size(value)}" for r, value in zip(at, sums, strict=True)]
        look = Look(index + 1, dash=DASHED if index else "", mark=index)
        sent.append(Line(way, list(zip(map(float, at), sums, strict=True)), notes, look))
    took = over_rounds("", *run.curve("seconds"), Look(3), duration)
    traffic = run.summary["bytes"]
    text = f"In all {size(traffic['up'])} went up and {size(traffic['down'])} down."
    panels = [
        Panel(ROUNDS, Axis(write=size), sent, "sent so far", 240),
        Panel(ROUNDS, Axis(zero=True), [took], "seconds a round", 240),
    ]
    return Chart("cost", text, "Bytes are those of the messages as sent.", panels)


def evaluated_metrics(run: RunRecord) -> list[str]:
    """The run's own numbers that come from evaluations on held-out pairs, such as ``margin``."""
    return [n for n in run.own_figures if any(n in record.get("evaluation", {}) for record in run.rounds)]


def own_metrics(run: RunRecord) -> list[str]:
    """The run's other own numbers, of the method and its merge rule, that no other chart shows."""
    return [name for name in run.own_figures if name not in {*OWN_CHARTS, *evaluated_metrics(run)}]


def numbers(run: RunRecord, names: Sequence[str]) -> Numbers | None:
    """Metrics of the round log: those that change as a chart, each of the others as a line."""
    if not names:
        return None
    changing, constant = moving(run, names)
    ends = []
    for name in changing:
        _, values = run.curve(name)
        if values:
            ends.append(f"{name.replace('_', ' ')} from {values[0]:.4g} to {values[-1]:.4g}")
    chart = None
    if changing:
        chart = Chart("metrics", "; ".join(ends[:12]) + ".", "", _panels(run, changing))
    return Numbers(chart, [_constant(run, name, value) for name, value in constant.items()])


def moving(run: RunRecord, names: Sequence[str]) -> tuple[list[str], dict[str, float]]:
    """Those of ``names`` that change over rounds, and the others with the one value that each has.

    Metrics with the same text before a slash, such as ``gate/0`` and ``gate/1``, change together.
    """
    values = {name: run.curve(name)[1] for name in names}
    changing = {name.split("/")[0] for name, own in values.items() if len(set(own)) > 1}
    moving = [name for name in names if name.split("/")[0] in changing]
    return moving, {name: own[0] for name, own in values.items() if own and name not in moving}


def _panels(run: RunRecord, names: Sequence[str]) -> list[Panel]:
    """Metrics with the same text before a slash share a panel."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.split("/")[0], []).append(name)
    panels = []
    for title, own in groups.items():
        curves = {name: run.curve(name) for name in own}
        lines = [
            over_rounds(name.partition("/")[2], *curve, Look(color_of(index), mark=index % 7), number)
            for index, (name, curve) in enumerate(curves.items())
        ]
        whole = all(value.is_integer() for _, values in curves.values() for value in values)
        panels.append(Panel(ROUNDS, Axis(whole=whole), lines, title.replace("_", " "), 220))
    return panels


def _constant(run: RunRecord, name: str, value: float) -> str:
    rounds, _ = run.curve(name)
    when = f"in round {rounds[0]}" if len(rounds) == 1 else f"in all {len(rounds):,} rounds that report it"
    return f"{name.replace('_', ' ')}: {value:.4g} {when}."


def distributed(run: RunRecord) -> list[Chart]:
    """Gradients if the run was diagnosed, consensus with a graph, delays on a virtual clock."""
    made = []
    if "paper_gap" in run.own_figures:
        # A method that shares nothing has no gradient of a global objective.
        curves = {name: run.curve(name) for name in GRADIENTS if name in run.own_figures}
        panels = [
            Panel(ROUNDS, Axis(), [over_rounds("", *c, Look(color_of(k)), number)], GRADIENTS[name], 240)
            for k, (name, c) in enumerate(curves.items())
        ]
        ends = ((name.replace("_", " "), values) for name, (_, values) in curves.items())
        text = "; ".join(f"{name} from {v[0]:.4g} to {v[-1]:.4g}" for name, v in ends)
        caption = "At the published model, or at the clients' mean model where there is no server."
        made.append(Chart("gradients", f"Over rounds: {text}.", caption, panels))
    if "consensus_after" in run.own_figures:
        made.append(_consensus(run))
    if any(record.get("visits") for record in run.rounds):
        made.append(_delays(run))
    return made


def _consensus(run: RunRecord) -> Chart:
    curves = {when: run.curve(f"consensus_{when}") for when in ("before", "after")}
    lines = []
    for index, (when, (rounds, values)) in enumerate(curves.items()):
        # On a complete graph nothing is left after the mix, and zero has no logarithm.
        own = [(r, value) for r, value in zip(rounds, values, strict=True) if value > 0]
        look = Look(index + 1, mark=index)
        name = f"{when} the mix"
        lines.append(over_rounds(name, [r for r, _ in own], [value for _, value in own], look, number))
    before, after = (values[-1] for _, values in curves.values())
    text = f"Consensus error over rounds; in the last one {before:.4g} before the mix, {after:.4g} after."
    caption = "Mean squared distance of clients' models from their mean, before and after each mix."
    panel = Panel(ROUNDS, Axis("consensus error", log=True), lines, height=260)
    return Chart("consensus", text, caption, [panel])


def _delays(run: RunRecord) -> Chart:
    late = Counter(visit["late"] for record in run.rounds for visit in record.get("visits", ()))
    counts = sorted(late.items())
    notes = [
        f"{pluralize(count, 'upload', 'uploads')} {pluralize(delay, 'round', 'rounds')} late"
        for delay, count in counts
    ]
    end = run.rounds[-1].get("time")
    text = ", ".join(notes) + (f"; the run took {duration(end)} on the virtual clock" if end else "")
    bars = Bars("", [(delay, 0.0, count) for delay, count in counts], notes, lying=False)
    panels = [Panel(Axis("rounds late", whole=True), Axis(zero=True), [bars], "uploads", 240)]
    timed = [
        (float(record["time"]), float(record["evaluation"]["preference_accuracy"]["mean"]))
        for record in run.rounds
        if record.get("time") and "evaluation" in record
    ]
    if timed:
        line = Line("", timed, [f"after {duration(at)}: {value:.1%}" for at, value in timed], Look(2))
        title = "accuracy, mean over clients"
        panels.append(Panel(Axis("simulated seconds"), Axis(write=percent), [line], title, 240))
    caption = "How old the models were that uploads started from, and accuracy by simulated time."
    return Chart("delays", f"{text}.", caption, panels)
