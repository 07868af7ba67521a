"""``prefed report RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The page; left out: report.html in the run directory.")
    ] = None,
) -> None:
    """Write one HTML page about a finished run, complete in itself."""
    from prefed.report.page import write_page
    from prefed.runs.record import read_run

    path = out or run / "report.html"
    write_page(read_run(run), path)
    typer.echo(f"report: {path}")
