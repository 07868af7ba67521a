"""Tables that compare runs, for the terminal and the page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefed.core.text import duration, size
from prefed.runs.finished_run import RunRecord, judged_of
from prefed.runs.seed_groups import by_seed
from prefed.train.metrics import (
    COMPARED_METRICS,
    LEADING_METRICS,
    REWARD_SHARES,
    SHIFT_METRICS,
    TABLE,
)
from prefed.ui.pages.comparison_data import (
    Compared,
    differences,
    few_seeds,
    letters,
    plus_minus,
    rows_of_tests,
)
from prefed.ui.pages.outcomes import judged_table
from prefed.ui.pages.tables import LISTED, Table, cell, split, terminal
from prefed.ui.pages.text_health import runs_text_table

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = (
    ("preference accuracy", "preference_accuracy", "mean"),
    ("worst client", "preference_accuracy", "worst"),
    ("worst tenth", "preference_accuracy", "worst_decile"),
    ("reward accuracy", "reward_accuracy", "mean"),
    ("worst reward accuracy", "reward_accuracy", "worst"),
    *((TABLE[name].label, name, "mean") for name in COMPARED_METRICS if name not in LEADING_METRICS),
)
"""Columns of accuracies: heading, metric, and statistic over clients. Empty columns are left out."""
MEANS = {
    "Mean change in the log-probability of responses over the base model, in nats.": SHIFT_METRICS,
    "Explicit reward heads, means over clients.": (*REWARD_SHARES, "margin", "explicit_margin"),
}
"""Caption of a table of means → its metrics."""


def print_comparison(runs: Sequence[RunRecord], console: Console) -> None:
    """Print tables and notes. On a narrow terminal, letters replace the runs' names, and tables are split."""
    compared = Compared(tuple(runs))
    names, shown = compared.labels, compared.names
    endless = console.options.update(max_width=10_000)

    def fits(table: Table) -> bool:
        return console.measure(terminal(table), options=endless).maximum <= console.width

    def room(tables: Sequence[Table]) -> bool:
        return all(map(fits, tables))

    if not room(_of_runs(compared, names)):
        whole, names = names, letters(len(names))
        for letter, name in zip(names, whole, strict=True):
            console.print(f"{letter:>2}  {name}", markup=False, highlight=False, soft_wrap=True)
        if len(compared.cases) == len(runs) or not room(_over_seeds(compared, shown)):
            of_path = {run.path: letter for run, letter in zip(runs, names, strict=True)}
            shown = [of_path[case.runs[0].path] for case in compared.cases]
    firsts = [case.runs[0] for case in compared.cases]
    together = len(firsts) < len(runs)
    differing = differences_table(firsts, shown) if together else differences_table(runs, names)
    for each in _of_runs(compared, names):
        for part in split(each, fits):
            console.print(terminal(part))
    for table in (differing, *_over_seeds(compared, shown)):
        if table is not None:
            console.print(terminal(table))
    if any(len(case.runs) > 1 for case in compared.comparable):
        console.print(few_seeds(compared.comparable), markup=False, soft_wrap=True)
    for name, run in zip(names, runs, strict=True):
        if run.unlisted:
            console.print(f"{name}: {run.unlisted}", markup=False, soft_wrap=True)
    for index, why in compared.disagreements.items():
        text = f"* {names[index]} is not comparable with {names[0]} and excluded from tests: {why}"
        console.print(text, style="yellow", markup=False, soft_wrap=True)


def _of_runs(compared: Compared, names: Sequence[str]) -> list[Table]:
    judged = [(n, e.summary) for n, run in zip(names, compared.runs, strict=True) for e in judged_of(run)]
    some = (
        runs_table(compared, names),
        *(means_table(compared.runs, names, *each) for each in MEANS.items()),
        selectors_table(compared.runs, names),
        runs_text_table(compared.runs, names),
        judged_table([summary for _, summary in judged], [name for name, _ in judged]),
    )
    return [table for table in some if table is not None]


def _over_seeds(compared: Compared, names: Sequence[str]) -> list[Table]:
    if not compared.several_seeds:
        return []
    whole = cases_table(compared, names, brief=True)
    rows = whole.rows[: len(compared.comparable)]
    tests = [tests_table(compared, name, names) for name in LEADING_METRICS]
    return [
        replace(whole, rows=rows),
        *(table for table in tests if table.rows),
    ]


def runs_table(compared: Compared, names: Sequence[str]) -> Table:
    """Accuracies and costs of each run; * marks runs that are not comparable with the first."""
    metrics = _columns(compared)
    heads = ["run", "method", "rounds", *(head for head, _, _ in metrics), "up", "down", "time"]
    rows = []
    for index, (name, run) in enumerate(zip(names, compared.runs, strict=True)):
        values = [_value(run, metric, of) for _, metric, of in metrics]
        cells = [run.method, str(run.summary["rounds"]), *map(cell, values)]
        cells += [size(run.summary["bytes"][way]) for way in ("up", "down")]
        mark = " *" if index in compared.disagreements else ""
        rows.append((f"{name}{mark}", [*cells, duration(run.summary["seconds"])]))
    return Table("Accuracies on held-out pairs after the last round, and costs, by run.", heads, rows)


def _value(run: RunRecord, name: str, of: str) -> float | None:
    values: Mapping[str, Any] = run.figures[name].values if name in run.figures else {}
    return values.get(of)


def cases_table(compared: Compared, names: Sequence[str], *, brief: bool = False) -> Table:
    """Accuracies and costs of each case over its seeds; with ``brief``, only the two accuracies."""
    metrics = [each for each in _columns(compared) if not brief or each[1] in LEADING_METRICS]
    rows = []
    for name, case in zip(names, compared.cases, strict=True):
        cells = [plus_minus(by_seed(case, metric, of).values()) for _, metric, of in metrics]
        if brief:
            rows.append((name, [str(len(case.runs)), *cells]))
            continue
        sent = statistics.fmean(
            run.summary["bytes"]["up"] + run.summary["bytes"]["down"] for run in case.runs
        )
        took = statistics.fmean(run.summary["seconds"] for run in case.runs)
        seeds = ", ".join(map(str, case.seeds))
        rows.append((name, [case.runs[0].method, seeds, *cells, size(sent), duration(took)]))
    deviation = ", ± standard deviation over seeds" if compared.several_seeds else ""
    caption = f"Accuracies after the last round{deviation}"
    accuracies = [head for head, _, _ in metrics]
    if brief:
        return Table(f"{caption}.", ["case", "seeds", *accuracies], rows)
    heads = ["case", "method", "seeds", *accuracies, "sent", "time"]
    return Table(f"{caption}; traffic and time per run.", heads, rows)


def _columns(compared: Compared) -> list[tuple[str, str, str]]:
    return [each for each in COLUMNS if any(each[1] in run.figures for run in compared.runs)]


def tests_table(compared: Compared, name: str, names: Sequence[str]) -> Table:
    """Paired tests of each comparable case against the reference case."""
    first, tests = compared.reference, compared.paired(name)
    others = [k for k in range(len(tests)) if k != first]
    rows = rows_of_tests([tests[k] for k in others])
    heads = ["case", "seeds in common", "mean difference, 95% interval", "paired t-test, p", "Wilcoxon, p"]
    caption = f"{TABLE[name].label.capitalize()}, mean over clients: each case against {names[first]}."
    return Table(caption, heads, [(names[k], cells) for k, cells in zip(others, rows, strict=True)])


def means_table(
    runs: Sequence[RunRecord], names: Sequence[str], caption: str, metrics: Sequence[str]
) -> Table | None:
    """Means over clients of the runs that have the first of ``metrics``; ``None`` if none has it."""
    rows = []
    for name, run in zip(names, runs, strict=True):
        if metrics[0] in run.summary:
            values = (run.summary.get(metric) for metric in metrics)
            rows.append((name, [cell(v["mean"] if isinstance(v, Mapping) else v) for v in values]))
    return Table(caption, ["run", *(TABLE[metric].label for metric in metrics)], rows) if rows else None


def selectors_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table | None:
    """Agreement of selectors with clients, and clusters; ``None`` if no run has several selectors."""
    rows = []
    for name, run in zip(names, runs, strict=True):
        if not run.agreements:
            continue
        *selectors, vote = run.agreements
        shares = [
            run.spread("preference_accuracy").mean,
            *(pick(each.mean for each in selectors) for pick in (min, max)),
        ]
        cells = [f"{len(selectors)}", *map(cell, (*shares, vote.mean, vote.worst)), f"{len(run.groupings):,}"]
        rows.append((name, [*cells, f"{sum(len(grouping.moved) for grouping in run.groupings):,}"]))
    heads = ["run", "selectors", "own", "lowest selector", "highest selector", "vote", "worst by vote"]
    title = "Selectors: preference accuracy over clients."
    return Table(title, [*heads, "groupings", "moves"], rows) if rows else None


def differences_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table | None:
    """Differing settings and the runs with each value; ``None`` if there are none."""
    settings = differences(runs)
    settings.pop("method.name", None)
    if not settings:
        return None
    rows = []
    for name, values in list(settings.items())[:LISTED]:
        runs_of: dict[str, list[str]] = {}
        for run, value in zip(names, values, strict=True):
            if value is not None or not name.startswith("method."):
                runs_of.setdefault("unset" if value is None else value, []).append(run)
        rows.append((name, ["; ".join(f"{value} {', '.join(some)}" for value, some in runs_of.items())]))
    if len(settings) > LISTED:
        rows.append((f"… and {len(settings) - LISTED} more", []))
    return Table("Differing settings.", ["setting", "values"], rows, left=1)


def settings_table(compared: Compared, names: Sequence[str]) -> Table | None:
    """Differing settings for a page: one row per case, one column per setting."""
    settings = compared.settings
    rows = [(name, [values[k] or "–" for values in settings.values()]) for k, name in enumerate(names)]
    caption = "Only settings that differ. –: unset, or not a setting of the case's method."
    return Table(caption, ["case", *settings], rows) if settings else None
