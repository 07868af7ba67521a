"""Clients on a run's page: accuracies before and after, their spread, and personalised layers."""

from __future__ import annotations

import math

import numpy as np

from prefed.runs.finished_run import RunRecord
from prefed.runs.metrics import Profile
from prefed.train.metrics import LEADING_METRICS, spread
from prefed.ui.pages.chart_data import BARS, Axis, Cells, Chart, Line, Look, Panel, bars_of, distributions_of
from prefed.ui.pages.metric_text import Interval, interval_of, interval_of_mean
from prefed.ui.pages.tables import ROWS, SPREAD, Table, cell, unseen_table


def ranking(run: RunRecord) -> list[str]:
    """Evaluated clients by increasing preference accuracy."""
    accuracies = run.figures["preference_accuracy"].values["per_client"]
    return sorted(run.clients, key=lambda client: accuracies[client])


def ends(run: RunRecord) -> Chart:
    """Each client before and after, or distributions if there are more than :data:`BARS` clients."""
    colors = {"baseline_accuracy": 0, "shared_accuracy": 2, "preference_accuracy": 1}
    if "choice_loss" not in run.summary:
        colors["reward_accuracy"] = 3
    metrics = {name: run.figures[name] for name in colors if name in run.figures}
    groups = [(metric.label, colors[name], metric.values["per_client"]) for name, metric in metrics.items()]
    order, accuracies = ranking(run), run.figures["preference_accuracy"].values["per_client"]
    panel = distributions_of(groups) if len(order) > BARS else bars_of(order, groups)
    text = f"{len(order):,} clients: {accuracies[order[0]]:.1%} ({order[0]}) "
    text += f"to {accuracies[order[-1]]:.1%} ({order[-1]}) preference accuracy."
    caption = f"Accuracies on each client's {run.split} pairs, by increasing preference accuracy."
    return Chart("clients", text, caption, [panel])


def fairness(run: RunRecord) -> Table:
    """Spread of the metrics over clients."""
    metrics = run.figures.values()
    spreads = [spread(metric.values) for metric in metrics]
    intervals = [interval_of_mean(run, metric.values) for metric in metrics]
    rows = [(name, [f"{of(s):.3f}" for s in spreads]) for name, of in SPREAD.items()]
    if any(intervals):
        rows.insert(1, ("95% interval of the mean", [_between(each, ".3f") for each in intervals]))
    caption = "Distribution of the metrics over clients; all clients have equal weight."
    return Table(caption, ["over clients", *(metric.label for metric in metrics)], rows)


def unseen(run: RunRecord) -> Table | None:
    """Table of clients that never trained; ``None`` if there are none."""
    accuracies = run.summary.get("unseen_accuracy")
    return unseen_table(accuracies) if accuracies else None


def clients_table(run: RunRecord) -> Table:
    """Each client's metrics, by increasing preference accuracy."""
    order, metrics = ranking(run), run.figures
    clusters = run.groupings[-1].clusters if run.groupings else ()
    own = {client: f"selector-{u}" for u, clients in enumerate(clusters) for client in clients}
    rows = []
    for client in order[:ROWS]:
        pairs = run.pairs(client)
        values = [_cell(run, client, name) for name in metrics]
        cluster = [own.get(client, "")] if own else []
        rows.append((client, ["" if pairs is None else f"{pairs:,}", *cluster, *values]))
    more = f"The {ROWS:,} lowest of {len(order):,}; summary.json has the others. "
    caption = f"{more if len(order) > ROWS else ''}Lowest first; 95% intervals in brackets."
    labels = [metric.label for metric in metrics.values()]
    return Table(caption, ["client", "pairs", *(["cluster"] if own else []), *labels], rows)


def _cell(run: RunRecord, client: str, name: str) -> str:
    value = run.figures[name].values["per_client"].get(client)
    interval = interval_of(run, client, value) if value is not None and name in LEADING_METRICS else None
    return cell(value) + (f" ({_between(interval, '.2f')})" if interval else "")


def _between(interval: Interval | None, form: str) -> str:
    return f"{interval[0]:{form}} to {interval[1]:{form}}" if interval else ""


def blocks(run: RunRecord) -> list[tuple[str, Chart | str, Table]]:
    """Personalisation per metric: heading, chart and table.

    A sentence replaces the chart if all clients have the same value in every block.
    """
    return [(profile.label.capitalize(), *_block(profile)) for profile in run.profiles.values()]


def _block(profile: Profile) -> tuple[Chart | str, Table]:
    label, clients = profile.label.capitalize(), len(profile.clients)
    means = [f"{mean:.2f}" for mean in profile.means]
    text = ", ".join(f"block {block} {mean}" for block, mean in zip(profile.blocks, means, strict=True))
    low, high = profile.range
    private = (
        f"{label}: {profile.meaning}. The values come from the clients' private states, rounded to two "
        "decimals, so this page discloses them to its readers. Clients that never trained have no values."
    )
    rows = [("mean", means)]
    rows += [
        (client, ["" if value != value else f"{value:.2f}" for value in values])
        for client, values in zip(profile.clients[:ROWS], profile.values, strict=False)
    ]
    more = f" The first {ROWS:,} clients; summary.json has {clients - ROWS:,} more." if clients > ROWS else ""
    table = Table(f"{label} by transformer block.{more}", ["client", *map(str, profile.blocks)], rows)
    if low == high:
        return f"{label}: {low:.2f} in every block of every client. {private}", table
    caption = f"The scale ranges from {low:.2f} to {high:.2f}. {private}"
    alt = f"{label}, means over {clients:,} clients: {text}."
    return Chart("blocks", alt, caption, [_profile(profile)]), table


def _profile(profile: Profile) -> Panel:
    values, numbers = profile.values, [str(block) for block in profile.blocks]
    if len(profile.clients) <= BARS:
        cells = [(client, block) for client in profile.clients for block in profile.blocks]
        notes = [
            f"{client}, block {block}: {'none' if math.isnan(value) else f'{value:.2f}'}"
            for (client, block), value in zip(cells, values.flat, strict=True)
        ]
        shown = Cells(values.tolist(), notes, *profile.range)
        height = 90 + 24 * len(profile.clients)
        return Panel(
            Axis("block", names=numbers), Axis(names=profile.clients), [shown], profile.label, height
        )
    low, quarter, median, most, high = np.nanquantile(values, (0, 0.25, 0.5, 0.75, 1), axis=0).tolist()
    points = list(zip(map(float, profile.blocks), median, strict=True))
    notes = [f"median, block {block:.0f}: {value:.2f}" for block, value in points]
    lines = [
        Line("all clients", points, notes, Look(1, 0.5), low, high),
        Line("median and middle half", points, notes, Look(1), quarter, most),
    ]
    return Panel(Axis("block", whole=True), Axis(profile.label), lines)
