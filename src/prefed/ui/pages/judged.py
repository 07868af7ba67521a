"""A judge's win rates as text, and on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.ui.pages.tables import literal

if TYPE_CHECKING:
    from rich.console import Console


def sides(summary: Mapping[str, Any]) -> str:
    """Which two a judge compared; ``summary`` is what ``summary.json`` of a comparison holds."""
    return f"{summary['model']} against {summary['against']}"


def judge_of(summary: Mapping[str, Any]) -> str:
    """The judge of a comparison, and the taste by which it judged if one was named.

    >>> judge_of({"judge": "utility", "taste": "ward-7"}), judge_of({"judge": "utility"})
    ('utility, taste ward-7', 'utility')
    """
    taste = summary.get("taste")
    return str(summary["judge"]) if taste is None else f"{summary['judge']}, taste {taste}"


def interval(rate: Mapping[str, float]) -> str:
    """The 95% interval of a win rate.

    >>> interval({"mean": 0.625, "low": 0.5, "high": 0.75})
    '50.0% to 75.0%'
    """
    return f"{rate['low']:.1%} to {rate['high']:.1%}"


def print_judged(summary: Mapping[str, Any], run: Path, console: Console) -> None:
    """What ``summary.json`` of a comparison holds, and where the verdicts of ``run`` are."""
    from rich.table import Table

    rate, controlled = summary["win_rate"], summary["length_controlled"]
    title = literal(f"{sides(summary)}, judged by {judge_of(summary)}")
    table = Table(title=title, title_justify="left")
    for name in ("win rate", "95% interval", "wins", "length-controlled", "ties", "judged", "failed"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{rate['mean']:.1%}",
        interval(rate),
        f"{summary['wins']:.1%}",
        "–" if controlled is None else f"{controlled:.1%}",
        *(f"{summary[name]:,}" for name in ("ties", "judged", "failed")),
    )
    console.print(table)
    console.print("win rate: a tie counts half; wins: a tie counts nothing")
    console.print("interval: of this run, for other prompts; it says nothing of other seeds")
    if summary["note"]:
        console.print(summary["note"], markup=False, soft_wrap=True)
    path = run / "judge" / summary["name"] / "verdicts.jsonl"
    console.print(f"verdicts: {path}", markup=False, soft_wrap=True)
