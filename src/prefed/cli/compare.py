"""``prefed compare RUN RUN …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Run directories.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The plot: a .png, .svg or .pdf file.")] = Path("compare.png"),
) -> None:
    """Set finished runs side by side: a table, what they do differently, and a plot."""
    from prefed.report import drawing, plots
    from prefed.report.comparison import print_comparison
    from prefed.runs.record import read_run
    from prefed.trackers.terminal import stdout_console

    if len({run.resolve() for run in runs}) < 2:
        raise ValueError("name at least two different runs")
    drawing.file_format(out)
    records = [read_run(run) for run in dict.fromkeys(runs)]
    console = stdout_console()
    print_comparison(records, console)
    drawing.save(lambda theme: plots.comparison(records, theme), out)
    console.print(f"plot: {out}", markup=False, soft_wrap=True)
