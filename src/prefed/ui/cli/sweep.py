"""``prefed sweep TABLE …``, and ``prefed sweep FILE --grid …``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from prefed.ui.cli.arguments import Overrides
from prefed.ui.cli.errors import INTERRUPTED, UsageError
from prefed.ui.cli.interrupts import terminable
from prefed.ui.cli.volume import volume

if TYPE_CHECKING:
    from prefed.runs.sweep import SweepCell

T = TypeVar("T")


def sweep(
    tables: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Table files (TOML); with --grid or --seeds one experiment file.",
            show_default=False,
        ),
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Run the experiment with each of these values of a key, e.g. method.lr=1e-4,1e-3; given "
            "again, with every combination. The best one on validation pairs is chosen.",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How many seeds every combination is run with, from the experiment's own on; or the seeds "
            "themselves, e.g. 1,2,5.",
            show_default=False,
        ),
    ] = None,
    judge: Annotated[
        Literal["preference_accuracy", "reward_accuracy"] | None,
        typer.Option(
            help="With --grid, the figure that chooses; left out: preference_accuracy.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option(help="The folder of the runs, and of the finished tables or pages.")
    ] = Path("runs/tables"),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CELL", help="Only this cell, or those that fit a pattern such as 'imdb-3/*'."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, of one thread each.")] = 2,
) -> None:
    """Carry out the cells of a table, or one experiment over a grid and seeds, or go on with them."""
    if grid or seeds is not None:
        if len(tables) > 1 or only:
            raise UsageError("--grid and --seeds are for one experiment file, without --only")
        _sweep_grid(tables[0], grid or [], seeds, judge or "preference_accuracy", overrides or [], out, jobs)
        return
    if judge is not None:
        raise UsageError("--judge belongs to --grid; a table names its own judge")
    from prefed.runs.sweep import Sweep, sweep_cells

    cells = [cell for table in tables for cell in sweep_cells(table, out, overrides or [])]
    order: dict[Path, list[str]] = {}
    for cell in cells:
        order.setdefault(cell.folder, []).append(cell.definition.name)
    if len(order) < len(tables):
        raise UsageError("two tables have one file name; give each an --out of its own")
    cells = _select(cells, only or [])
    # Errors in the tables are found before the data's libraries are imported.
    from prefed.runs.sweep_check import check_cells
    from prefed.ui.pages.sweep import keep

    check_cells(cells)

    def done(cell: SweepCell, outcome: dict[str, Any]) -> None:
        keep(cell, order[cell.folder], outcome)

    work = Sweep(jobs, done, typer.echo if volume() else lambda text: None)
    _to_the_end(work.carry_out(cells))
    for folder, table in {cell.folder: cell.table for cell in cells}.items():
        path = folder.with_name(f"{folder.name}.md")
        if path.exists():
            typer.echo(f"\n{table.title} ({path})\n\n{path.read_text('utf-8')}", nl=False)
    if work.failed:
        raise ValueError("some cells failed:\n" + "\n".join(work.failed))


def _sweep_grid(
    path: Path,
    grid: list[str],
    seeds: str | None,
    judge: Literal["preference_accuracy", "reward_accuracy"],
    overrides: list[str],
    out: Path,
    jobs: int,
) -> None:
    from prefed.config.file import read_toml
    from prefed.config.grid import parse_grid, parse_seeds
    from prefed.runs.grid import GridSweep

    if {"rows", "extends"} & read_toml(path).keys():
        raise ValueError(
            f"{path} is a table, with rows, rates and seeds of its own; --grid and --seeds are for one "
            "experiment"
        )
    combinations = parse_grid(grid, overrides)
    own = combinations[0].experiment(path, overrides, ()).seed
    sweep = GridSweep(
        path, combinations, parse_seeds(seeds, own), out / path.stem, tuple(overrides), judge, typer.echo
    )
    sweep.check()
    chosen = _to_the_end(sweep.carry_out(jobs))
    from prefed.ui.pages.grid import keep_grid, sentence

    kept = keep_grid(sweep, chosen)
    for each in chosen:
        typer.echo(sentence(sweep, each))
    for file in kept or ():
        typer.echo(file)
    if sweep.failed:
        raise ValueError("some runs failed, and nothing was chosen:\n" + "\n".join(sweep.failed))


def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives. Stopped before its end, no run outlives this process."""
    try:
        with terminable():
            return asyncio.run(work)
    except KeyboardInterrupt:
        typer.echo("\nstopped; the same command goes on from here", err=True)
        raise typer.Exit(INTERRUPTED) from None


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
