"""``prefed sweep TABLE …``."""

from __future__ import annotations

import asyncio
import signal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefed.cli.arguments import Overrides

if TYPE_CHECKING:
    from prefed.runs.sweep import SweepCell


def sweep(
    tables: Annotated[
        list[Path], typer.Argument(metavar="TABLE...", help="Table files (TOML).", show_default=False)
    ],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="The folder of the runs and of the finished tables.")] = Path(
        "runs/tables"
    ),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CELL", help="Only this cell, or those that fit a pattern such as 'imdb-3/*'."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, of one thread each.")] = 2,
) -> None:
    """Carry out the cells of a table, or go on with them, and print the results beside the paper's."""
    from prefed.runs.sweep import Sweep, sweep_cells

    cells = [cell for table in tables for cell in sweep_cells(table, out, overrides or [])]
    order: dict[Path, list[str]] = {}
    for cell in cells:
        order.setdefault(cell.folder, []).append(cell.definition.name)
    if len(order) < len(tables):
        raise ValueError("two tables have one file name; give each an --out of its own")
    cells = _select(cells, only or [])
    # Errors in the tables are found before the data's libraries are imported.
    from prefed.report.sweep import keep
    from prefed.runs.sweep_check import check_cells

    check_cells(cells)

    def done(cell: SweepCell, outcome: dict[str, Any]) -> None:
        keep(cell, order[cell.folder], outcome)

    work = Sweep(jobs, done, typer.echo)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no run outlives this process
    try:
        asyncio.run(work.carry_out(cells))
    except KeyboardInterrupt:
        typer.echo("\nstopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    for folder, table in {cell.folder: cell.table for cell in cells}.items():
        path = folder.with_name(f"{folder.name}.md")
        if path.exists():
            typer.echo(f"\n{table.title} ({path})\n\n{path.read_text('utf-8')}", nl=False)
    if work.failed:
        raise ValueError("some cells failed:\n" + "\n".join(work.failed))


def _select(cells: list[SweepCell], only: list[str]) -> list[SweepCell]:
    """The cells that ``only`` names, or all of them."""
    from prefed.core.text import did_you_mean

    names = [cell.definition.name for cell in cells]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(pattern, names) or f" (cells: {', '.join(names)})"
            files = ", ".join(dict.fromkeys(str(cell.definition.path) for cell in cells))
            raise ValueError(f"{files}: no cell is called {pattern!r}{hint}")
    return [
        cell
        for cell in cells
        if not only or any(fnmatchcase(cell.definition.name, pattern) for pattern in only)
    ]
