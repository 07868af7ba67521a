"""``prefed report RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.errors import INTERRUPTED
from prefed.ui.cli.interrupts import terminable


def report(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The page; left out: report.html in the run directory.")
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Write it anew after every round, until the run ends or Ctrl-C."),
    ] = False,
) -> None:
    """Write one HTML page about a finished run, complete in itself, or about one that goes on."""
    from prefed.runs.record import read_run
    from prefed.ui.pages.page import write_page
    from prefed.ui.pages.watch import watch as keep_fresh

    path = out or run / "report.html"
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file for the page")
    if not watch:
        write_page(read_run(run), path)
        typer.echo(f"report: {path}")
        return
    try:
        with terminable():
            keep_fresh(run, path, typer.echo)
    except KeyboardInterrupt:
        typer.echo(f"report: {path}", err=True)
        raise typer.Exit(INTERRUPTED) from None
