"""Output of a sweep: Markdown tables or, for a grid, the selection as JSON and a page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.core.text import markdown_text, pluralize
from prefed.runs.finished_run import read_run
from prefed.runs.seed_groups import fold
from prefed.runs.sweep import Chosen, SweepCell, all_equal, commits_of
from prefed.train.metrics import broken_text
from prefed.ui.pages.compare_page import write_comparison
from prefed.ui.pages.comparison_data import ChosenCase, plus_minus
from prefed.ui.pages.comparison_tables import COLUMNS
from prefed.ui.pages.tables import Table, markdown

SELECTED = "best round, selected on test"
HEALTHY = "healthy text"
"""Heading of the number of seeds whose text is not broken."""
FEW = 5
"""Maximum number of clients with separate values."""
_COLUMNS = [
    (head, f"{name}.{of}")
    for head, name, of in COLUMNS
    if name != "baseline_accuracy" and of != "worst_decile"
]

Outcome = Mapping[str, Any]
"""Results of a finished cell, see :class:`prefed.runs.sweep.SweepCell`."""


def keep(cell: SweepCell, names: Sequence[str], outcome: Outcome) -> None:
    """Add or replace a finished cell in ``TABLE.json`` and ``TABLE.md``.

    ``names`` are the names of all cells of the table, in order.
    """
    file = cell.folder.with_name(f"{cell.folder.name}.json")
    with files.locked(file.parent):
        before = json.loads(file.read_text("utf-8")) if file.exists() else []
        outcomes = {each["method"]: each for each in [*before, outcome]}
        rows = [outcomes[name] for name in names if name in outcomes]
        files.write(file, json.dumps(rows, indent=1).encode())
        best = [each for each in rows if _rate_was_chosen(each)]
        own = [each for each in rows if not _rate_was_chosen(each)]
        parts = [_best_rate_table(best)] if best else []
        parts += [_own_rate_table(own)] if own else []
        about = ": ".join(filter(None, (cell.table.source, cell.table.figures)))
        if about and any("paper" in each for each in rows):
            parts.append(f"paper: {about}\n")
        files.write(file.with_suffix(".md"), "\n".join(parts).encode())


def _rate_was_chosen(outcome: Outcome) -> bool:
    """Whether ``outcome`` is a ``best_rate_outcome``, not an ``own_rate_outcome``."""
    return "lr" in outcome


def _best_rate_table(outcomes: Sequence[Outcome]) -> str:
    columns = [(name, key) for name, key in _COLUMNS if any(each.get(key) for each in outcomes)]
    paper = ["paper"] if any("paper" in each for each in outcomes) else []
    text = [HEALTHY] if any("health" in each for each in outcomes) else []
    head = ["method", "learning rate", "rates tried", *paper, *(name for name, _ in columns), *text]
    first = ["base model", "", "", *("" for _ in paper)]
    for _, key in columns:
        before = key.replace("preference_accuracy", "baseline_accuracy")
        first.append("" if before == key else plus_minus(outcomes[0][before]))
    lines = [[*first, *("" for _ in text), "", ""]]
    for each in sorted(outcomes, key=lambda each: -statistics.mean(each["preference_accuracy.mean"])):
        figures = [plus_minus(each.get(key, ())) for _, key in columns]
        theirs = [_paper(each) for _ in paper]
        health = [healthy_texts(each) for _ in text]
        cells = [*rate(each), *theirs, *figures, *health, sent(each["bytes"]), code(each)]
        lines.append([each["text"], *cells])
    return _table([*head, "MB sent", "commit"], lines)


def _own_rate_table(outcomes: Sequence[Outcome]) -> str:
    """Table of cells with their own learning rate, in the table's order; accuracies in percent.

    The best round is selected on the test pairs, as in the papers. It is biased upwards, increasingly with
    the number of rounds; the last round is not selected and not biased.
    """
    paper = ["paper"] if any("paper" in each for each in outcomes) else []
    head = ["cell", *paper, SELECTED, "last round", f"worst client, {SELECTED}", f"clients, {SELECTED}"]
    lines = []
    for each in outcomes:
        figures = [_percent([run[key] for run in each["runs"]]) for key in ("best", "last", "worst")]
        traffic = sent([run["bytes"] for run in each["runs"]])
        theirs = [_paper(each) for _ in paper]
        lines.append([each["text"], *theirs, *figures, _clients(each), traffic, code(each)])
    return _table([*head, "MB sent", "commit"], lines)


def _clients(outcome: Outcome) -> str:
    """Each client's value, with the paper's in brackets; empty with many clients."""
    names, paper = list(outcome["runs"][0]["clients"]), outcome.get("paper", {}).get("clients", {})
    if len(names) > FEW:
        return ""
    own = {name: _percent([run["clients"][name] for run in outcome["runs"]]) for name in names}
    return ", ".join(
        f"{markdown_text(name)} {own[name]}" + (f" ({paper[name]})" if name in paper else "")
        for name in names
    )


def rate(outcome: Outcome) -> tuple[str, str]:
    """The selected rates, with ``≤`` or ``≥`` at an end of the range tried, and these ranges."""
    separate = outcome.get("separate", {})
    several = [(f"{key} ", each["value"], each["validation"]) for key, each in separate.items()]
    texts = [
        (name + value, name + span)
        for name, *tried in [("", outcome["lr"], outcome["validation"]), *several]
        for value, span in [_one_rate(*tried)]
    ]
    return ", ".join(value for value, _ in texts), ", ".join(span for _, span in texts)


def _one_rate(selected: float, validation: Mapping[Any, float]) -> tuple[str, str]:
    figures = {float(lr): figure for lr, figure in validation.items()}
    lowest, highest = min(figures), max(figures)
    if len(figures) == 1:
        return _short(selected), _short(selected)
    span = f"{_short(lowest)} to {_short(highest)}"
    if all_equal(figures):
        return "any", f"{span}, all alike"
    return {lowest: "≤", highest: "≥"}.get(selected, "") + _short(selected), span


def _short(lr: float) -> str:
    """Format a learning rate.

    >>> [_short(lr) for lr in (3e-5, 0.0025, 0.03, 0.1, 3.0)]
    ['3e-5', '2.5e-3', '3e-2', '0.1', '3']
    """
    if lr >= 0.1:
        return f"{lr:g}"
    number, _, power = f"{lr:e}".partition("e")
    return f"{float(number):g}e{int(power)}"


def _percent(values: Sequence[float | None]) -> str:
    """Format mean ± sample standard deviation in percent; empty if a run has no value.

    >>> _percent([0.8, 0.82, 0.78]), _percent([0.8]), _percent([None])
    ('80.00±2.00', '80.00', '')
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return ""
    mean = f"{100 * statistics.mean(known):.2f}"
    return f"{mean}±{100 * statistics.stdev(known):.2f}" if len(known) > 1 else mean


def _paper(outcome: Outcome) -> str:
    return str(outcome.get("paper", {}).get("figure", ""))


def healthy_texts(outcome: Outcome) -> str:
    """The number of seeds whose text is no worse than the base model's; empty if it was not measured.

    >>> healthy_texts({})
    ''
    """
    texts = outcome.get("health", ())
    return f"{sum(not broken_text(text) for text in texts)} of {len(texts)}" if texts else ""


def sent(counts: Sequence[float]) -> str:
    """The mean of counts of bytes, in MB."""
    return f"{statistics.mean(counts) / 1e6:.1f}"


def code(outcome: Outcome) -> str:
    """The commits of the runs."""
    return ", ".join(outcome["commits"])


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return markdown(Table("", head, [(name, cells) for name, *cells in lines]))


def keep_grid(cells: Sequence[SweepCell], chosen: Sequence[Chosen]) -> tuple[Path, Path] | None:
    """Write ``FOLDER.json`` and ``FOLDER.html`` for a grid; ``None`` without finished runs."""
    first = cells[0]
    runs = [run for cell in cells for seed in first.table.seeds if (run := cell.run_of(seed)).finished]
    if not runs:
        return None
    selection, page = (first.folder.with_name(f"{first.folder.name}.{kind}") for kind in ("json", "html"))
    combinations = [cell.combination for cell in cells]
    content = {
        "experiment": str(first.definition.path),
        "judge": first.table.judge,
        "seeds": first.table.seeds,
        "combinations": [{"name": each.name, "settings": dict(each.values)} for each in combinations],
        "chosen": [_plain(each) for each in chosen],
        "commits": commits_of(runs),
    }
    files.write(selection, json.dumps(content, indent=1, ensure_ascii=False).encode())
    write_comparison([read_run(run.out) for run in runs], page, chosen_cases(chosen))
    return selection, page


def chosen_cases(chosen: Sequence[Chosen]) -> list[ChosenCase]:
    """The selected combinations with their metrics on test pairs."""
    return [
        ChosenCase(
            sentence(each),
            [each.cell.run_of(seed).out for seed in each.cell.table.seeds],
            {
                name: {seed: value["mean"] for seed, value in own.items()}
                for name, own in _test(each.cell).items()
            },
        )
        for each in chosen
    ]


def sentence(chosen: Chosen) -> str:
    """Describe the selection: the best combination, its metric and the runner-up."""
    best, table, (_, metrics) = chosen.cell.combination, chosen.cell.table, chosen.among[0]
    where = f"With {', '.join(best.of_data)}: " if best.of_data else ""
    seeds = pluralize(len(table.seeds), "seed", "seeds")
    text = f"{where}{best.name} ({', '.join(f'{k} = {v}' for k, v in best.texts.items())}) was selected from "
    text += f"{pluralize(len(chosen.among), 'combination', 'combinations')}. "
    text += f"It has the highest {table.judge.replace('_', ' ')} on "
    text += f"validation pairs, mean over clients and {seeds}: {plus_minus(metrics.values())}."
    if len(chosen.among) > 1:
        second, others = chosen.among[1]
        text += f" The runner-up is {second.combination.name}: {plus_minus(others.values())}."
        if fold(list(others.values())).mean == fold(list(metrics.values())).mean:
            text += " They are equal, so the one given first was selected."
    if broken := [each.combination.name for each, _ in chosen.among if each.breaks_text]:
        text += f" Text is broken with {', '.join(broken)}."
    for key in chosen.at_end_of:
        text += f" Its {key} is at the end of the range tried; values beyond it may be better."
    return text


def _test(cell: SweepCell) -> dict[str, dict[int, dict[str, float]]]:
    """Metric → seed → mean and worst client on test pairs."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for seed in cell.table.seeds:
        for name, values in (cell.run_of(seed, test=True).figures or {}).items():
            found.setdefault(name, {})[seed] = values
    return found


def _plain(chosen: Chosen) -> dict[str, Any]:
    best = chosen.cell.combination
    among = {each.combination.name: own for each, own in chosen.among}
    return {
        "name": best.name,
        "settings": dict(best.values),
        "validation": among,
        "test": _test(chosen.cell),
    }
