"""``prefed evaluate RUN``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from prefed.ui.cli.arguments import RoundName
from prefed.ui.cli.errors import UsageError
from prefed.ui.cli.output import bar_console, print_json


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    split: Annotated[
        Literal["train", "validation", "test"] | None,
        typer.Option(help="Which of each client's pairs; left out: those that the run was judged on."),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Judge on the pairs of another file, folder or hub set instead."),
    ] = None,
    everyone: Annotated[
        bool, typer.Option("--everyone", help="With --test: all rows for each client, whoever's they are.")
    ] = False,
    client: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this client; may be given again.")
    ] = None,
    taste: Annotated[
        str | None,
        typer.Option(
            metavar="TASTE",
            help="For selectors with a latent taste, whose taste judges: own, population, a client's id, "
            "prototype:K, infer:8, what 8 of a client's training pairs tell, or infer:FILE, what a new "
            "user's pairs tell.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    which: RoundName = "last",
) -> None:
    """Judge a finished run's models: each client's on its own pairs, or on other ones."""
    if test is not None and split is not None:
        raise UsageError("give either --split, of the run's own pairs, or --test FILE")
    if everyone and test is None:
        raise UsageError("--everyone belongs to --test FILE")
    import torch

    from prefed.models.notices import silence_transformers
    from prefed.runs.evaluate import evaluate as evaluate_run
    from prefed.runs.evaluate import evaluate_file
    from prefed.runs.loaded import load_run
    from prefed.runs.record import read_run
    from prefed.runs.tastes import at_taste
    from prefed.store import plain
    from prefed.trackers.terminal import stdout_console
    from prefed.ui.pages.result import print_evaluation

    silence_transformers()
    # At the hub of a federation no taste comes from the run's own pairs.
    own_pairs = test is None or (taste is not None and not read_run(run).sites)
    loaded_run = load_run(run, data=own_pairs, best=which == "best")
    if taste is not None:
        loaded_run = at_taste(loaded_run, taste, test, split or loaded_run.experiment.evaluate.split)
    # With the run's own number of threads its figures come out again to the digit.
    torch.set_num_threads(loaded_run.experiment.engine.threads or torch.get_num_threads())
    with _progress() as tell:
        if test is None:
            evaluation = evaluate_run(loaded_run, split or loaded_run.experiment.evaluate.split, client, tell)
        else:
            evaluation = evaluate_file(loaded_run, test, client, everyone=everyone, progress=tell)
    if as_json:
        print_json(plain(evaluation.plain()))
    else:
        number = loaded_run.reader.commit.round
        name = loaded_run.record.name + (f", best round {number}" if which == "best" else "")
        print_evaluation(evaluation, name, stdout_console())


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error if that is a terminal; it is told how many of how many clients are done."""
    from rich.progress import Progress

    console = bar_console()
    with Progress(console=console, transient=True, disable=console.quiet or not console.is_terminal) as bar:
        task = bar.add_task("clients")
        yield lambda done, of: bar.update(task, completed=done, total=of)
