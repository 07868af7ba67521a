"""``prefed evaluate RUN``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prefed.cli.errors import reported

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.runs.evaluate import Evaluation


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Judge a finished run's models: each client's on its own pairs, or on other ones."""
    with reported():
        if test is not None and split is not None:
            raise ValueError("give either --split, of the run's own pairs, or --test FILE")
        if everyone and test is None:
            raise ValueError("--everyone belongs to --test FILE")
        import torch

        from prefed.runs.evaluate import evaluate as evaluate_run
        from prefed.runs.evaluate import evaluate_file
        from prefed.runs.loaded import load_run
        from prefed.store import plain
        from prefed.trackers.terminal import quiet, standard_output

        quiet()
        opened = load_run(run, data=test is None)
        # The run's own number of threads: its figures come out again to the digit.
        torch.set_num_threads(opened.experiment.engine.threads or torch.get_num_threads())
        with _bar() as tell:
            if test is None:
                judged = evaluate_run(opened, split or opened.experiment.evaluate.split, client, tell)
            else:
                judged = evaluate_file(opened, test, client, everyone=everyone, progress=tell)
        if as_json:
            typer.echo(json.dumps(plain(judged.plain()), indent=2, ensure_ascii=False))
        else:
            _print(judged, opened.record.name, standard_output())


def _print(judged: Evaluation, name: str, console: Console) -> None:
    from prefed.metrics import MEAN_METRICS
    from prefed.report.tables import clients_table, unseen_table
    from prefed.runs.figures import REWARDED, figures_of

    if judged.figures:
        held = {n: figure for n, figure in figures_of(judged.figures).items() if n not in MEAN_METRICS}
        title = f"{name}: share of {judged.what} ordered rightly"
        usual = [figure for n, figure in held.items() if n not in REWARDED]
        console.print(clients_table(title, usual, judged.pairs.get))
        rewarded = [held[n] for n in ("preference_accuracy", *REWARDED) if n in held]
        if len(rewarded) > 1:
            title = f"{name}: with the reward head"
            console.print(clients_table(title, rewarded, judged.pairs.get))
        margin, loss = judged.figures["margin"], judged.figures["dpo_loss"]
        console.print(f"mean margin {margin['mean']:.3f} nats, mean DPO loss {loss['mean']:.4f}")
        if "explicit_margin" in judged.figures:
            console.print(f"mean margin of the reward head {judged.figures['explicit_margin']['mean']:.3f}")
    if judged.unseen:
        console.print(unseen_table(judged.unseen))
    for note in judged.notes:
        console.print(note, markup=False, soft_wrap=True)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal's error output, where there is one."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("clients")
        yield lambda done, of: bar.update(task, completed=done, total=of)
