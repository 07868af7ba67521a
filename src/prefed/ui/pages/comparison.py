"""Finished runs side by side on the terminal: what they came to, what differs, which cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefed.core.text import duration, size
from prefed.runs.figures import REWARDED
from prefed.runs.outcomes import judged_of
from prefed.runs.record import RunRecord
from prefed.ui.pages.differences import case_names, cases_apart, differences, disagreements, labels, letters
from prefed.ui.pages.judged import interval, judge_of, sides
from prefed.ui.pages.seeds import few_seeds, seeds_tables
from prefed.ui.pages.tables import LISTED, literal, new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_comparison(runs: Sequence[RunRecord], console: Console) -> None:
    """All that this file says of runs: tables, and a line for each thing that a reader must know.

    Where the terminal has no room for the runs' names, letters stand for them.
    """
    names, (tested, others) = labels(runs), cases_apart(runs)
    known = [*tested, *others]
    shown = case_names(known)
    endless = console.options.update(max_width=10_000)

    def room(tables: Sequence[Table]) -> bool:
        return all(console.measure(each, options=endless).maximum <= console.width for each in tables)

    if not room(_of_runs(runs, names)):
        whole, names = names, letters(len(names))
        for letter, name in zip(names, whole, strict=True):
            console.print(f"{letter:>2}  {name}", markup=False, highlight=False, soft_wrap=True)
        if len(known) == len(runs) or not room(seeds_tables(tested, shown[: len(tested)])):
            of_path = {run.path: letter for run, letter in zip(runs, names, strict=True)}
            shown = [of_path[case.runs[0].path] for case in known]
    firsts = [case.runs[0] for case in known]
    differing = differences_table(firsts, shown) if len(known) < len(runs) else differences_table(runs, names)
    for table in (*_of_runs(runs, names), differing, *seeds_tables(tested, shown[: len(tested)])):
        if table is not None:
            console.print(table)
    if any(len(case.runs) > 1 for case in tested):
        console.print(few_seeds(tested), markup=False, soft_wrap=True)
    for name, run in zip(names, runs, strict=True):
        if run.unlisted:
            console.print(f"{name}: {run.unlisted}", markup=False, soft_wrap=True)
    for index, why in disagreements(runs).items():
        text = f"* {names[index]} is not comparable with {names[0]}, and in no test: {why}"
        console.print(text, style="yellow", markup=False, soft_wrap=True)


def _of_runs(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Table]:
    """The tables with a row for each run."""
    some = (
        comparison_table(runs, names),
        reward_table(runs, names),
        selectors_table(runs, names),
        judged_table(runs, names),
    )
    return [table for table in some if table is not None]


def comparison_table(runs: Sequence[RunRecord], names: Sequence[str] = ()) -> Table:
    """Each run's accuracy and costs; a mark where a run cannot be compared with the first."""
    title = "preference accuracy on held-out pairs over clients, and cost"
    rewarded = any("reward_accuracy" in run.figures for run in runs)
    rewards = ("reward accuracy", "worst reward accuracy") if rewarded else ()
    heads = ("method", "rounds", "mean", "worst", "worst tenth", "before", *rewards, "up", "down", "time")
    table = new_table(title, "run", *heads)
    marked = disagreements(runs)
    best = max(run.spread("preference_accuracy").mean for run in runs)
    for index, (name, run) in enumerate(zip(names or labels(runs), runs, strict=True)):
        figure = run.spread("preference_accuracy")
        before = run.spread("baseline_accuracy").mean if "baseline_accuracy" in run.figures else None
        reward = run.spread("reward_accuracy") if "reward_accuracy" in run.figures else None
        cells = (f"{reward.mean:.3f}", f"{reward.worst:.3f}") if reward else ("", "")
        mean = f"{figure.mean:.3f}"
        table.add_row(
            literal(name) + (" [yellow]*[/]" if index in marked else ""),
            literal(run.method),
            str(run.summary["rounds"]),
            f"[bold]{mean}[/]" if figure.mean == best and not marked else mean,
            f"{figure.worst:.3f}",
            f"{figure.worst_decile:.3f}",
            "" if before is None else f"{before:.3f}",
            *(cells if rewarded else ()),
            size(run.summary["bytes"]["up"]),
            size(run.summary["bytes"]["down"]),
            duration(run.summary["seconds"]),
        )
    return table


def reward_table(runs: Sequence[RunRecord], names: Sequence[str] = ()) -> Table | None:
    """The figures of runs' explicit reward heads, means over clients; ``None`` where no run has one."""
    rewarded = [
        (name, run)
        for name, run in zip(names or labels(runs), runs, strict=True)
        if REWARDED[0] in run.figures
    ]
    if not rewarded:
        return None
    heads = [rewarded[0][1].figures[figure].label for figure in REWARDED]
    title = "explicit reward heads, means over clients"
    table = new_table(title, "run", *heads, "margin", "its margin")
    for name, run in rewarded:
        shares = (run.spread(figure).mean for figure in REWARDED)
        margins = (run.summary["margin"], run.summary["explicit_margin"])
        table.add_row(literal(name), *(f"{value:.3f}" for value in (*shares, *margins)))
    return table


def selectors_table(runs: Sequence[RunRecord], names: Sequence[str] = ()) -> Table | None:
    """How the selectors of runs agree with clients, and the clusters; ``None`` where no run has several."""
    several = [(name, run) for name, run in zip(names or labels(runs), runs, strict=True) if run.agreements]
    if not several:
        return None
    heads = (
        "selectors",
        "own",
        "lowest alone",
        "highest alone",
        "vote",
        "worst by vote",
        "groupings",
        "moves",
    )
    table = new_table("selectors: preference accuracy over clients", "run", *heads)
    for name, run in several:
        *alone, vote = run.agreements
        shares = [run.spread("preference_accuracy").mean, *(f(a.mean for a in alone) for f in (min, max))]
        table.add_row(
            literal(name),
            f"{len(alone)}",
            *(f"{share:.3f}" for share in (*shares, vote.mean, vote.worst)),
            f"{len(run.groupings):,}",
            f"{sum(len(grouping.moved) for grouping in run.groupings):,}",
        )
    return table


def judged_table(runs: Sequence[RunRecord], names: Sequence[str] = ()) -> Table | None:
    """The win rates that runs have; ``None`` where no run has any."""
    named = zip(names or labels(runs), runs, strict=True)
    judged = [(name, outcome.summary) for name, run in named for outcome in judged_of(run.path)]
    if not judged:
        return None
    heads = ("compared", "judge", "win rate", "95% interval", "wins", "judged")
    title = (
        "win rates: a tie counts half; wins: a tie counts nothing; intervals: of each run, for other prompts"
    )
    table = new_table(title, "run", *heads)
    for name, summary in judged:
        rate = summary["win_rate"]
        table.add_row(
            literal(name),
            literal(sides(summary)),
            literal(judge_of(summary)),
            f"{rate['mean']:.1%}",
            interval(rate),
            f"{summary['wins']:.1%}",
            f"{summary['judged']:,}",
        )
    return table


def differences_table(runs: Sequence[RunRecord], names: Sequence[str] = ()) -> Table | None:
    """The settings in which runs differ and which run has which value; ``None`` where they do not differ."""
    settings, names = differences(runs), names or labels(runs)
    settings.pop("method.name", None)
    if not settings:
        return None
    table = new_table("settings that differ", "setting")
    table.add_column("values")
    for name, values in list(settings.items())[:LISTED]:
        runs_of: dict[str, list[str]] = {}
        for run, value in zip(names, values, strict=True):
            if value is not None or not name.startswith("method."):
                runs_of.setdefault("left out" if value is None else value, []).append(run)
        cells = (f"[bold]{literal(value)}[/] {literal(', '.join(some))}" for value, some in runs_of.items())
        table.add_row(literal(name), "; ".join(cells))
    if len(settings) > LISTED:
        table.add_row(f"… and {len(settings) - LISTED} more")
    return table
