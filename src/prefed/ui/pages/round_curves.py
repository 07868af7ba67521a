"""Charts and tables over rounds: accuracies, losses, clients, costs, gradients, method metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from prefed.core.text import duration, pluralize, size
from prefed.runs.finished_run import RunRecord
from prefed.train.metrics import LEADING_METRICS, REWARD_SHARES, SHIFT_ERROR, SHIFT_METRICS, TABLE, words_of
from prefed.ui.pages.chart_data import (
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
"""Maximum number of clients with one curve each; beyond it, quantiles are drawn."""
QUANTILES = {"lowest": 0.0, "lower quarter": 0.25, "median": 0.5, "upper quarter": 0.75, "highest": 1.0}
GRADIENTS = ("global_loss", "gradient_norm", "paper_gap")
"""Diagnostic metrics with panels."""
OWN_CHARTS = frozenset({*GRADIENTS, "consensus_before", "consensus_after"})
"""Metrics with a separate chart in the section on gradients, consensus and delays."""
DASHED = "7 4"


@dataclass(frozen=True)
class Numbers:
    """Metrics over rounds.

    Attributes:
        plot: chart of the metrics that change; ``None`` if none does.
        constant: a sentence for each of the others.
    """

    plot: Chart | None
    constant: Sequence[str]


def accuracies(run: RunRecord) -> dict[str, str]:
    """The accuracies of a run: name → title. A selector has only preference accuracy."""
    names = LEADING_METRICS[: 1 if "choice_loss" in run.summary else 2]
    return {name: TABLE[name].label for name in names if name in run.figures}


def _measured(run: RunRecord) -> dict[str, str]:
    return {name: title for name, title in accuracies(run).items() if run.curve(name)[0]}


def accuracy_charts(run: RunRecord) -> list[Chart]:
    """Charts of the accuracies, the training loss and, if the model has one, the reward head."""
    charts = [accuracy(run)] if run.curve("preference_accuracy")[0] else []
    rounds, losses = run.curve("loss")
    if len(set(losses)) > 1:
        line = over_rounds("", rounds, losses, Look(3), number)
        charts.append(
            Chart(
                "loss",
                f"Training loss over rounds, from {losses[0]:.4g} to {losses[-1]:.4g}.",
                "Mean loss on the clients' training batches, weighted by numbers of pairs.",
                [Panel(ROUNDS, Axis("training loss"), [line], height=240)],
            )
        )
    return [*charts, *shifts(run), *reward_head(run)]


def shifts(run: RunRecord) -> list[Chart]:
    """Chart of the log-probabilities of chosen and rejected responses; empty if they were not measured."""
    curves = {name: run.curve(name) for name in SHIFT_METRICS if name in run.own_figures}
    if len(curves) < len(SHIFT_METRICS):
        return []
    lines, ends = [], []
    for index, (name, (rounds, values)) in enumerate(curves.items()):
        label, look = name.removesuffix("_shift"), Look(color_of(index), mark=index)
        lines.append(over_rounds(label, [0, *rounds], [0.0, *values], look, number))
        ends.append(f"{values[-1]:+.1f} nats ({label})")
    text = f"Log-probability of responses compared with the base model; it ends at {' and '.join(ends)}."
    caption = "Means per response. If chosen responses fall below 0, answers may loop or become nonsense."
    panel = Panel(ROUNDS, Axis("change in log-probability, nats"), lines, height=240)
    return [Chart("shift", text, caption, [panel])]


def reward_head(run: RunRecord) -> list[Chart]:
    """Chart of an explicit reward head's metrics, means over clients; empty without a reward head."""
    curves = {name: run.curve(name) for name in REWARD_SHARES if name in run.figures and run.curve(name)[1]}
    if not curves:
        return []
    labels = {name: run.figures[name].label for name in curves}
    lines = [
        over_rounds(labels[name], *curve, Look(color_of(index), mark=index), "{:.1%}".format)
        for index, (name, curve) in enumerate(curves.items())
    ]
    text = "; ".join(f"{labels[name]} ends at {values[-1]:.1%}" for name, (_, values) in curves.items())
    caption = "Metrics of the explicit reward head, means over clients; defined under Metric definitions."
    return [
        Chart("reward_head", f"{text}.", caption, [Panel(ROUNDS, Axis("share of pairs", percent), lines)])
    ]


def accuracy(run: RunRecord) -> Chart:
    """Each accuracy over rounds: mean over clients, its 95% interval, and the worst client.

    Preference accuracy starts in round 0, the base model. Reward accuracy is undefined there.
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
    caption = f"Round 0 is the base model.{' The worst client may differ between rounds.' if worst else ''}"
    _, rewards = run.curve("reward_accuracy")
    if rewards and len(accuracies(run)) > 1:
        text += f" Reward accuracy ends at {rewards[-1]:.1%}, mean over clients."
        caption += "".join(f" {title.capitalize()}: {run.figures[n].meaning}." for n, title in titles.items())
    if interval is not None:
        caption += " The band is the 95% interval of the mean, for the same clients with other pairs."
    return Chart("accuracy", text, caption, panels, same=True)


def _mean_and_worst(run: RunRecord, name: str) -> list[Line]:
    metrics = _evaluations(run, name)
    rounds = [at for at, _ in metrics]
    means = [metric["mean"] for _, metric in metrics]
    worst = [metric["worst"] for _, metric in metrics if "worst" in metric]
    intervals = [interval_of_mean(run, metric) for _, metric in metrics]
    band = [each or (mean, mean) for each, mean in zip(intervals, means, strict=True)]
    known = any(intervals)
    notes = [f"mean, round {r}: {share(v, i)}" for r, v, i in zip(rounds, means, intervals, strict=True)]
    points = list(zip(map(float, rounds), means, strict=True))
    low, high = ([ends[side] for ends in band] if known else [] for side in (0, 1))
    label = "mean, 95% interval" if known else "mean"
    look = Look(1, dash=DASHED, mark=2)
    mean = Line(label, points, notes, Look(1), low, high)
    return [mean, over_rounds("worst client", rounds, worst, look, "{:.1%}".format)] if worst else [mean]


def _evaluations(run: RunRecord, name: str) -> list[tuple[int, Any]]:
    """Rounds with per-client values of a metric, and the metric."""
    logged = ((int(record["round"]), record.get("evaluation", {}).get(name)) for record in run.rounds)
    found = [(at, metric) for at, metric in logged if isinstance(metric, Mapping) and "per_client" in metric]
    before = run.figures.get("baseline_accuracy")
    start = [(0, before.values)] if before is not None and name == "preference_accuracy" else []
    return [*start, *found]


def clients(run: RunRecord) -> Chart | None:
    """Each client's accuracies over rounds, or quantiles if there are more than :data:`FEW` clients.

    Returns:
        ``None`` if there was only one evaluation, or no client is listed.
    """
    rounds, _ = run.curve("preference_accuracy")
    if len(rounds) < 2 or not run.clients:
        return None
    few = len(run.clients) <= FEW
    titles, panels = _measured(run), []
    for at, (name, title) in enumerate(titles.items()):
        metrics = _evaluations(run, name)
        lines = _each_client(run, metrics) if few else _quantiles(metrics)
        y = Axis("" if at else "share of pairs", percent)
        panels.append(Panel(ROUNDS, y, lines, title if len(titles) > 1 else "", 320))
    after = run.figures["preference_accuracy"].values["per_client"].values()
    text = f"Accuracies of {pluralize(len(run.clients), 'client', 'clients')} over {len(rounds):,} "
    text += f"evaluations; at the end between {min(after):.1%} and {max(after):.1%}."
    caption = "Each client over rounds."
    if not few:
        caption = "Median, quartiles, minimum and maximum over clients, by round."
    return Chart("clients_over_rounds", text, caption, panels, same=True)


def _each_client(run: RunRecord, metrics: Sequence[tuple[int, Any]]) -> list[Line]:
    lines = []
    for index, client in enumerate(run.clients):
        own = [(r, each["per_client"][client]) for r, each in metrics if client in each["per_client"]]
        # Decreasing widths keep overlapping curves visible.
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
    return Table(f"{more}Metrics are means over clients; blank in rounds without an evaluation.", heads, rows)


def costs(run: RunRecord) -> Facts:
    """Bytes, parameters, time and memory."""
    summary = run.summary
    traffic, parameters = summary["bytes"], summary.get("parameters", {})
    visits = sum(len(record.get("cohort", ())) for record in run.rounds)
    facts = [("total upload", size(traffic["up"])), ("total download", size(traffic["down"]))]
    if visits:
        each = (f"{size(traffic[way] / visits)} {way}" for way in ("up", "down"))
        facts.append(("per client and round", ", ".join(each)))
    if parameters:
        facts.append(("trainable parameters per client", f"{parameters['trainable']:,}"))
        facts.append(("parameters per upload", f"{parameters['communicated']:,}"))
    facts.append(("time", duration(summary["seconds"])))
    if "peak_memory_mb" in summary:
        facts.append(("peak memory", f"{summary['peak_memory_mb']:,.0f} MiB"))
    return facts


def cost(run: RunRecord) -> Chart:
    """Cumulative uploads and downloads, and the duration of each round."""
    sent = []
    for index, way in enumerate(("up", "down")):
        rounds, values = run.curve(f"bytes_{way}")
        at, sums = [0, *rounds], [0.0, *accumulate(values)]
        notes = [f"{way} by round {r}: {size(value)}" for r, value in zip(at, sums, strict=True)]
        look = Look(index + 1, dash=DASHED if index else "", mark=index)
        sent.append(Line(way, list(zip(map(float, at), sums, strict=True)), notes, look))
    took = over_rounds("", *run.curve("seconds"), Look(3), duration)
    traffic = run.summary["bytes"]
    text = f"Total traffic: {size(traffic['up'])} up, {size(traffic['down'])} down."
    panels = [
        Panel(ROUNDS, Axis(write=size), sent, "cumulative traffic", 240),
        Panel(ROUNDS, Axis(zero=True), [took], "seconds per round", 240),
    ]
    return Chart("cost", text, "Traffic is the size of the messages as sent.", panels)


def evaluated_metrics(run: RunRecord) -> list[str]:
    """Further metrics from evaluations on held-out pairs, such as ``margin``."""
    measured = {name for record in run.rounds for name in record.get("evaluation", {})}
    return [name for name in run.own_figures if name in measured - {*SHIFT_METRICS, SHIFT_ERROR}]


def own_metrics(run: RunRecord) -> list[str]:
    """Metrics of the method and its merge rule that no other chart shows."""
    shown = {*OWN_CHARTS, *SHIFT_METRICS, SHIFT_ERROR, *evaluated_metrics(run)}
    return [name for name in run.own_figures if name not in shown]


def numbers(run: RunRecord, names: Sequence[str]) -> Numbers | None:
    """Metrics of the round log: changing ones as a chart, constant ones as sentences."""
    if not names:
        return None
    changing, constant = moving(run, names)
    ends = []
    for name in changing:
        _, values = run.curve(name)
        if values:
            ends.append(f"{words_of(name, {})[0]} from {values[0]:.4g} to {values[-1]:.4g}")
    chart = None
    if changing:
        chart = Chart("metrics", "; ".join(ends[:12]) + ".", "", _panels(run, changing))
    return Numbers(chart, [_constant(run, name, value) for name, value in constant.items()])


def moving(run: RunRecord, names: Sequence[str]) -> tuple[list[str], dict[str, float]]:
    """Split metrics into those that change over rounds and constant ones with their value.

    Metrics with the same text before a slash, such as ``gate/0`` and ``gate/1``, stay together.
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
        panels.append(Panel(ROUNDS, Axis(whole=whole), lines, words_of(title, {})[0], 220))
    return panels


def _constant(run: RunRecord, name: str, value: float) -> str:
    rounds, _ = run.curve(name)
    when = f"in round {rounds[0]}" if len(rounds) == 1 else f"in all {len(rounds):,} reported rounds"
    return f"{words_of(name, {})[0]}: {value:.4g} {when}."


def distributed(run: RunRecord) -> list[Chart]:
    """Charts of diagnostics, of consensus on a graph, and of delays in a simulated fleet."""
    made = []
    if "paper_gap" in run.own_figures:
        # A method that shares nothing has no gradient of a global objective.
        curves = {name: run.curve(name) for name in GRADIENTS if name in run.own_figures}
        panels = [
            Panel(ROUNDS, Axis(), [over_rounds("", *c, Look(color_of(k)), number)], TABLE[name].label, 240)
            for k, (name, c) in enumerate(curves.items())
        ]
        ends = ((TABLE[name].label, values) for name, (_, values) in curves.items())
        text = "; ".join(f"{name} from {v[0]:.4g} to {v[-1]:.4g}" for name, v in ends)
        caption = "Evaluated at the server's model or, without a server, at the mean of the clients' models."
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
        # The axis is logarithmic, and on a complete graph the error after mixing is zero.
        own = [(r, value) for r, value in zip(rounds, values, strict=True) if value > 0]
        look = Look(index + 1, mark=index)
        name = f"{when} mixing"
        lines.append(over_rounds(name, [r for r, _ in own], [value for _, value in own], look, number))
    before, after = (values[-1] for _, values in curves.values())
    text = f"Consensus error over rounds; in the last round {before:.4g} before mixing, {after:.4g} after."
    caption = "Mean squared distance of the clients' models from their mean, before and after mixing."
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
        title = "preference accuracy, mean over clients"
        panels.append(Panel(Axis("simulated seconds"), Axis(write=percent), [line], title, 240))
    caption = "Age of the models that uploads started from, and accuracy over simulated time."
    return Chart("delays", f"{text}.", caption, panels)
