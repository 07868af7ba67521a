"""Figures as text: the tables of the terminal, and how numbers are written everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefed.core.text import duration, printable, size
from prefed.core.tree import flatten
from prefed.metrics import FederatedMetric, Spread, spread
from prefed.runs.figures import REWARDED, Figure
from prefed.runs.record import RunRecord

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "SPREAD",
    "UNSEEN",
    "clients_table",
    "comparison_table",
    "differences",
    "differences_table",
    "disagreements",
    "labels",
    "reward_table",
    "unseen_rows",
    "unseen_table",
    "written",
]

SHOWN = 40
"""Clients that a table lists at most."""

SPREAD: Mapping[str, Callable[[Spread], float]] = {
    "mean": lambda s: s.mean,
    "worst client": lambda s: s.worst,
    "worst tenth": lambda s: s.worst_decile,
    "best client": lambda s: s.best,
    "standard deviation": lambda s: s.std,
    "Jain index": lambda s: s.jain,
}
"""What is said of a figure over clients: name → number."""


def written(value: Any) -> str:
    """A setting as an experiment file has it.

    >>> written(True), written(["c_attn"]), written(1e-05), written("dpo")
    ('true', '["c_attn"]', '1e-05', 'dpo')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(f'"{v}"' if isinstance(v, str) else written(v) for v in value) + "]"
    return str(value)


def clients_table(
    title: str, figures: Sequence[Figure], pairs: Callable[[str], int | None], shown: int = SHOWN
) -> Table:
    """Clients against figures, and each figure's spread; of many clients the lowest are listed.

    Args:
        title: above the table.
        figures: one column each; the clients are those of the last of them that is a preference accuracy,
            lowest first where not all are shown.
        pairs: client → pairs it was judged on.
        shown: how many clients are listed at most.
    """
    leading = next((f for f in figures if f.name == "preference_accuracy"), figures[-1])
    values = leading.values["per_client"]
    clients = sorted(values)
    listed = sorted(clients, key=lambda c: values[c])[:shown] if len(clients) > shown else clients
    table = _table(title, "client", "pairs", *(figure.label for figure in figures))
    for client in listed:
        count = pairs(client)
        held = (figure.values["per_client"].get(client) for figure in figures)
        table.add_row(
            _literal(client),
            "" if count is None else f"{count:,}",
            *("" if value is None else f"{value:.3f}" for value in held),
        )
    if len(listed) < len(clients):
        table.add_row(f"… and {len(clients) - len(listed):,} clients that do better")
    table.add_section()
    spreads = [spread(figure.values) for figure in figures]
    for name, of in SPREAD.items():
        table.add_row(name, "", *(f"{of(s):.3f}" for s in spreads), style="bold" if name == "mean" else "")
    return table


UNSEEN = ("clients", "mean", "worst", "worst tenth")


def unseen_rows(unseen: Mapping[str, FederatedMetric]) -> list[tuple[str, list[str]]]:
    """Local steps before clients that never took part were judged, and how they did.

    Args:
        unseen: number of steps → accuracy over those clients.
    """
    rows = []
    for steps, values in unseen.items():
        figures = (values["mean"], values["worst"], values["worst_decile"])
        count = len(values["per_client"]) + values.get("mean_alone", 0)
        rows.append((steps, [f"{count:,}", *(f"{figure:.3f}" for figure in figures)]))
    return rows


def unseen_table(unseen: Mapping[str, FederatedMetric]) -> Table:
    """:func:`unseen_rows` for the terminal."""
    table = _table(
        "clients that never took part, after some local steps from what was published", "steps", *UNSEEN
    )
    for steps, figures in unseen_rows(unseen):
        table.add_row(steps, *figures)
    return table


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A short name for each run, no two alike: the directory's, with as many parents as it takes."""
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def comparison_table(runs: Sequence[RunRecord]) -> Table:
    """Runs against what they came to and what they cost; a mark where a run was judged on other data."""
    table = _table(
        "share of held-out pairs ordered rightly, over clients; and what it cost",
        "run",
        "method",
        "rounds",
        "mean",
        "worst",
        "worst tenth",
        "before",
        "up",
        "down",
        "time",
    )
    other = disagreements(runs)
    best = max(run.spread("preference_accuracy").mean for run in runs)
    for index, (name, run) in enumerate(zip(labels(runs), runs, strict=True)):
        figure = run.spread("preference_accuracy")
        before = run.spread("baseline_accuracy").mean if "baseline_accuracy" in run.figures else None
        mean = f"{figure.mean:.3f}"
        table.add_row(
            _literal(name) + (" [yellow]*[/]" if index in other else ""),
            _literal(run.method),
            str(run.summary["rounds"]),
            f"[bold]{mean}[/]" if figure.mean == best and not other else mean,
            f"{figure.worst:.3f}",
            f"{figure.worst_decile:.3f}",
            "" if before is None else f"{before:.3f}",
            size(run.summary["bytes"]["up"]),
            size(run.summary["bytes"]["down"]),
            duration(run.summary["seconds"]),
        )
    return table


def reward_table(runs: Sequence[RunRecord]) -> Table | None:
    """What the reward heads of runs come to, means over clients; ``None`` where no run has one."""
    having = [(name, run) for name, run in zip(labels(runs), runs, strict=True) if REWARDED[0] in run.figures]
    if not having:
        return None
    words = [having[0][1].figures[name].label for name in REWARDED]
    table = _table("explicit reward heads, means over clients", "run", *words, "margin", "its margin")
    for name, run in having:
        shares = (run.spread(figure).mean for figure in REWARDED)
        margins = (run.summary[figure] for figure in ("margin", "explicit_margin"))
        table.add_row(_literal(name), *(f"{value:.3f}" for value in (*shares, *margins)))
    return table


def disagreements(runs: Sequence[RunRecord]) -> dict[int, str]:
    """The runs whose figures cannot be set beside the first run's: index → why.

    Other data, other pairs or clients to be judged on, or another base model.
    """
    first, found = runs[0], {}
    for index, run in enumerate(runs[1:], 1):
        reasons = []
        mine, theirs = run.fingerprint.get("data"), first.fingerprint.get("data")
        if mine and theirs:
            if mine != theirs:
                reasons.append("other data")
        elif run.config["data"] != first.config["data"]:
            reasons.append("other [data] settings")
        if run.split != first.split:
            reasons.append(f"judged on {run.split} pairs, not {first.split} pairs")
        elif not reasons and run.clients != first.clients:
            reasons.append("judged on other clients")
        if run.config["model"]["name"] != first.config["model"]["name"]:
            reasons.append("another base model")
        if reasons:
            found[index] = ", ".join(reasons)
    return found


def differences(runs: Sequence[RunRecord]) -> dict[str, list[str | None]]:
    """The settings in which runs differ: dotted name → each run's value, ``None`` where it has none.

    A method's own settings are compared between the runs that have them. Where the work was done,
    ``[engine]``, is left out: it decides nothing.
    """
    settings = [flatten(run.config) for run in runs]
    names = list(dict.fromkeys(name for held in settings for name in held))
    found = {}
    for name in names:
        values = [written(held[name]) if name in held else None for held in settings]
        there = {
            value
            for value, run in zip(values, runs, strict=True)
            if value is not None or not _foreign(name, run, runs)
        }
        if len(there) > 1 and not name.startswith("engine."):
            found[name] = values
    return found


def _foreign(name: str, run: RunRecord, runs: Sequence[RunRecord]) -> bool:
    """Whether a run lacks a setting because its method has no such thing."""
    inside = name.startswith("method.")
    return inside and all(name not in flatten(other.config) for other in runs if other.method == run.method)


def differences_table(runs: Sequence[RunRecord], shown: int = SHOWN) -> Table | None:
    """The settings in which runs differ, or ``None`` where they do not: who has which value."""
    found, names = differences(runs), labels(runs)
    found.pop("method.name", None)
    if not found:
        return None
    table = _table("settings that differ", "setting")
    table.add_column("values")
    for setting, values in list(found.items())[:shown]:
        holders: dict[str, list[str]] = {}
        for name, value in zip(names, values, strict=True):
            if value is not None or not setting.startswith("method."):
                holders.setdefault("left out" if value is None else value, []).append(name)
        said = "; ".join(f"[bold]{_literal(v)}[/] {_literal(', '.join(who))}" for v, who in holders.items())
        table.add_row(_literal(setting), said)
    if len(found) > shown:
        table.add_row(f"… and {len(found) - shown} more")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=_literal(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column(_literal(first), overflow="fold", min_width=10)
    for name in others:
        table.add_column(_literal(name).replace(" ", "\n"), justify="right", no_wrap=True)
    return table


def _literal(text: str) -> str:
    """``text`` for a table: neither rich nor the terminal obeys what it holds."""
    from rich.markup import escape

    return escape(printable(text))
