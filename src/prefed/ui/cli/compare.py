"""``prefed compare RUN RUN …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.output import print_json


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...",
            help="Run directories, or folders of them such as those of prefed sweep.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The plot: a .png, .svg or .pdf file; left out: compare.png, or none with --html or --json."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="A page over all runs, complete in itself.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Set finished runs side by side: a table, what they do differently, and a plot or a page."""
    from prefed.runs.record import read_run
    from prefed.runs.replicates import find_runs
    from prefed.ui.pages import plot_file

    if out is None and html is None and not as_json:
        out = Path("compare.png")
    if out is not None:
        plot_file.file_format(out)
    if html is not None and html.is_dir():
        raise ValueError(f"{html} is a folder; name a file for the page")
    for path in runs:
        if not any(path.rglob("summary.json")):
            read_run(path)  # says what is wrong with it
    records = find_runs(runs)
    if len(records) < 2:
        raise ValueError("name at least two different runs")
    if as_json:
        from prefed.store.reader import plain
        from prefed.ui.pages.compared import Compared

        print_json(plain(Compared(tuple(records)).plain()))
    else:
        from prefed.trackers.terminal import stdout_console
        from prefed.ui.pages.comparison import print_comparison

        print_comparison(records, stdout_console())
    made = []
    if out is not None:
        from prefed.ui.pages.compare_charts import comparison

        plot_file.save(comparison(records), out)
        made.append(f"plot: {out}")
    if html is not None:
        from prefed.ui.pages.compare_page import write_comparison

        write_comparison(records, html)
        made.append(f"page: {html}")
    for line in made:
        typer.echo(line, err=as_json)
