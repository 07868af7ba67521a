"""``prefed figures RUN …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def figures(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, or folders of them such as those of prefed sweep.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The plots.")] = Path("figures"),
    kind: Annotated[
        Literal["png", "svg", "pdf"], typer.Option("--format", help="Kind of the files.")
    ] = "png",
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Accuracy of the plot of simulated times; left out: the highest that all of its runs reach.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Plot what finished runs show together of the theory of distributed DPO, and print the numbers."""
    from prefed.runs.replicates import find_runs
    from prefed.trackers.terminal import stdout_console
    from prefed.ui.pages import drawing
    from prefed.ui.pages.studies import drawings

    made, console = drawings(find_runs(runs), target), stdout_console()
    if not made:
        raise ValueError(
            "these runs have no figure together: it takes runs with [evaluate] diagnose, a graph, or "
            "synchronous and buffered fleets, which are alike in all other settings"
        )
    for each in made:
        path = out / f"{each.name}.{kind}"
        if each.draw is not None:
            drawing.save(each.draw, path)
        for line in (str(path) if each.draw else each.name, *(f"  {text}" for text in each.lines)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
