"""Self-contained HTML comparison of runs.

This module collects the values; ``templates/compare.html`` lays them out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from prefed.core import files
from prefed.core.text import pluralize
from prefed.runs.finished_run import RunRecord
from prefed.runs.seed_groups import by_seed
from prefed.runs.track import logged_settings
from prefed.train.metrics import COMPARED_METRICS, LEADING_METRICS, TABLE
from prefed.ui.pages import compare_charts as charts
from prefed.ui.pages.chart_data import Chart
from prefed.ui.pages.compare_charts import Shown, clients_of, gains_of
from prefed.ui.pages.comparison_data import ChosenCase, Compared, few_seeds, plus_minus
from prefed.ui.pages.comparison_tables import cases_table, runs_table, settings_table, tests_table
from prefed.ui.pages.html import render_template
from prefed.ui.pages.metric_text import WORST_TENTH
from prefed.ui.pages.tables import Facts, Table

CURVES = 24
"""Maximum number of cases in charts; the tables list all."""


def write_comparison(runs: Sequence[RunRecord], path: Path, chosen: Sequence[ChosenCase] = ()) -> None:
    """Write the comparison page of runs to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, render_comparison(runs, chosen).encode())


def render_comparison(runs: Sequence[RunRecord], chosen: Sequence[ChosenCase] = ()) -> str:
    """Render the comparison page, with the cases ``chosen`` by a sweep."""
    compared = Compared(tuple(runs))
    drawn = _drawn(compared)
    cases = [
        Shown(key, name + ("" if k < len(compared.comparable) else " *"), k)
        for k, (key, name) in enumerate(zip(compared.keys, compared.names, strict=True))
    ]
    # The two accuracies of a selector are equal.
    names = LEADING_METRICS[:1] if all(compared.selectors) else LEADING_METRICS
    drawings = _charts(compared, drawn, names)
    called = [case.name for case in cases]
    settings = settings_table(compared, called)
    sections = {
        **({"choice": "Selected settings"} if chosen else {}),
        "results": "Results",
        **({"settings": "Differing settings"} if settings else {}),
        **{key: title for key, (title, _) in drawings.items()},
        "clients": "Clients",
        "seeds": "Seeds",
        "meanings": "Metric definitions",
    }
    return render_template(
        "compare.html",
        sections=sections,
        title=f"{pluralize(len(runs), 'run', 'runs')} side by side",
        lead=_lead(compared),
        warnings=_warnings(compared),
        chosen=[(each.text, _test(each)) for each in chosen],
        chosen_cases=_chosen_cases(compared, chosen),
        results=cases_table(compared, called),
        settings=settings,
        cases=cases,
        drawn=[cases[k] for k in drawn],
        left_out=len(compared.comparable) - len(drawn),
        charts={key: some for key, (_, some) in drawings.items()},
        gains=gains_of(compared, cases, names),
        clients=[clients_of(compared, drawn, name) for name in names],
        tested=[case for case in cases[: len(compared.comparable)] if case.index != compared.reference],
        seeds=[tests_table(compared, name, called) for name in names] if compared.several_seeds else [],
        seeds_note=few_seeds(compared.comparable),
        runs=_runs(compared),
        meanings=_meanings(compared),
    )


def _drawn(compared: Compared) -> list[int]:
    """Indices of the cases in charts: all comparable ones, or the reference case and the best."""
    means = [statistics.fmean(by_seed(case, LEADING_METRICS[0]).values()) for case in compared.comparable]
    best = sorted(range(len(means)), key=lambda k: (k != compared.reference, -means[k]))
    return sorted(best[:CURVES])


def _lead(compared: Compared) -> str:
    first = compared.runs[0]
    counts = sorted({len(case.runs) for case in compared.cases})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else pluralize(counts[0], "seed", "seeds")
    counts_of = [run.pairs(client) for run in compared.runs for client in run.clients]
    pairs = [count for count in counts_of if count is not None]
    model = logged_settings(first.config)["model"]["name"]
    text = f"{pluralize(len(compared.cases), 'case', 'cases')} with {seeds}; {model}; "
    text += f"{pluralize(first.evaluated, 'client', 'clients')} evaluated on {first.split} pairs"
    if pairs:
        low, high = min(pairs), max(pairs)
        text += f", {low:,} each" if low == high else f", {low:,} to {high:,} each"
    return f"{text}."


def _warnings(compared: Compared) -> list[str]:
    first = compared.labels[0]
    warnings = [
        f"{name} is not comparable with {first}: {why}. It is marked * in the tables and excluded from "
        "charts and tests."
        for name, why in compared.marked.items()
    ]
    if any(compared.selectors) and not all(compared.selectors):
        warnings.append(
            "Some runs train selectors, which judge responses, and others policies, which generate them: "
            "their accuracies are not comparable."
        )
    for name, run in zip(compared.labels, compared.runs, strict=True):
        if run.unlisted:
            warnings.append(f"{name}: {run.unlisted}.")
        if run.summary.get("not_finite"):
            diverged = pluralize(len(run.summary["not_finite"]), "client", "clients")
            warnings.append(f"{name}: the models of {diverged} diverged.")
    return warnings


def _chosen_cases(compared: Compared, chosen: Sequence[ChosenCase]) -> list[int]:
    paths = {path.resolve() for each in chosen for path in each.runs}
    return [k for k, case in enumerate(compared.cases) if case.runs[0].path.resolve() in paths]


def _test(chosen: ChosenCase) -> Facts:
    return [
        (TABLE[name].label, f"{plus_minus(values.values())} over {pluralize(len(values), 'seed', 'seeds')}")
        for name, values in chosen.test.items()
        if name in COMPARED_METRICS and values
    ]


def _charts(
    compared: Compared, drawn: Sequence[int], names: Sequence[str]
) -> dict[str, tuple[str, list[Chart]]]:
    clock = "time" if all("time" in run.rounds[-1] for run in compared.runs) else "seconds"
    sections: dict[str, tuple[str, Callable[[Compared, Sequence[int], str], Chart | None]]] = {
        "rounds": ("Accuracy over rounds", charts.over_rounds),
        "bytes": ("Accuracy against traffic", partial(charts.over_spent, what="bytes")),
        "time": ("Accuracy against time", partial(charts.over_spent, what=clock)),
        "worst": ("Worst client", charts.worst_against_mean),
    }
    found = {}
    for key, (title, draw) in sections.items():
        if some := [chart for name in names if (chart := draw(compared, drawn, name))]:
            found[key] = (title, some)
    return found


def _runs(compared: Compared) -> Table:
    table = runs_table(compared, compared.labels)
    rows = [
        (name, [*cells, str(run.seed), str(run.path)])
        for (name, cells), run in zip(table.rows, compared.runs, strict=True)
    ]
    return replace(table, heads=[*table.heads, "seed", "directory"], rows=rows)


def _meanings(compared: Compared) -> Facts:
    known: dict[str, str] = {}
    for run in compared.runs:
        for name, figure in run.figures.items():
            if name in COMPARED_METRICS:
                known.setdefault(TABLE[name].label, f"{figure.meaning}.")
    return [*known.items(), WORST_TENTH, ("±", "sample standard deviation over seeds.")]
