"""A judge's win rates on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.report.tables import literal

if TYPE_CHECKING:
    from rich.console import Console


def print_judged(summary: Mapping[str, Any], run: Path, console: Console) -> None:
    """What ``summary.json`` of a comparison holds, and where the verdicts of ``run`` are."""
    from rich.table import Table

    rate, controlled = summary["win_rate"], summary["length_controlled"]
    title = literal(f"{summary['model']} against {summary['against']}, judged by {summary['judge']}")
    table = Table(title=title, title_justify="left")
    for name in ("win rate", "95% interval", "wins", "at equal lengths", "ties", "judged", "failed"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{rate['mean']:.1%}",
        f"{rate['low']:.1%} to {rate['high']:.1%}",
        f"{summary['wins']:.1%}",
        "–" if controlled is None else f"{controlled:.1%}",
        *(f"{summary[name]:,}" for name in ("ties", "judged", "failed")),
    )
    console.print(table)
    console.print("win rate: a tie counts half; wins: a tie counts nothing")
    if summary["note"]:
        console.print(summary["note"], markup=False, soft_wrap=True)
    path = run / "judge" / summary["name"] / "verdicts.jsonl"
    console.print(f"verdicts: {path}", markup=False, soft_wrap=True)
