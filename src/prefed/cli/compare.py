"""``prefed compare RUN RUN …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefed.cli.errors import reported


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Run directories.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The plot: a .png, .svg or .pdf file.")] = Path("compare.png"),
) -> None:
    """Set finished runs side by side: a table, what they do differently, and a plot."""
    with reported():
        from prefed.report import plots
        from prefed.report.tables import (
            comparison_table,
            differences_table,
            disagreements,
            labels,
            reward_table,
        )
        from prefed.runs.record import read_run
        from prefed.trackers.terminal import standard_output

        if len({run.resolve() for run in runs}) < 2:
            raise ValueError("name at least two different runs")
        plots.kind_of(out)
        records = [read_run(run) for run in dict.fromkeys(runs)]
        console = standard_output()
        console.print(comparison_table(records))
        for table in (reward_table(records), differences_table(records)):
            if table is not None:
                console.print(table)
        names = labels(records)
        for name, record in zip(names, records, strict=True):
            if record.unlisted:
                console.print(f"{name}: {record.unlisted}", markup=False, soft_wrap=True)
        for index, why in disagreements(records).items():
            text = f"* {names[index]} cannot be set beside {names[0]}: {why}"
            console.print(text, style="yellow", markup=False, soft_wrap=True)
        plots.save(lambda theme: plots.comparison(records, theme), out)
        console.print(f"plot: {out}", markup=False, soft_wrap=True)
