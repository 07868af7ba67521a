"""``prefed align RUN``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.arguments import Overrides, set_words
from prefed.ui.cli.interrupts import interruptible
from prefed.ui.cli.output import progress_console, terminal
from prefed.ui.cli.run import next_commands


def align(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The server's prompts: a file, folder or hub set; left out: align.prompts."
        ),
    ] = None,
    overrides: Overrides = None,
    stage: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Do this stage and those after it again: prompts, policy, …"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the alignment in the directory, with its settings.")
    ] = False,
) -> None:
    """Align a model with a finished run's selectors, on prompts alone."""
    overrides = [*([f"align.prompts.path={json.dumps(prompts)}"] if prompts else []), *(overrides or [])]
    words = ["prefed", "align", str(run), *set_words(overrides)]
    with interruptible(words, None, resume=True, kept="what was done is kept"):
        from prefed.runs.record import read_run

        record = read_run(run)
        from prefed.align.run import begun
        from prefed.core.text import pluralize
        from prefed.runs.align import FOLDER, read_settings
        from prefed.runs.align import align as align_run
        from prefed.runs.labels import check_selectors

        check_selectors(record)
        folder = record.path / FOLDER
        anew = not (resume or stage)
        if anew and begun(folder):
            raise ValueError(
                f"{folder} holds an alignment: go on with it with --resume, or do a stage and those after it "
                "again with --stage NAME (--stage prompts: all of it)"
            )
        config = read_settings(record, overrides, anew=anew)
        from prefed.models.notices import silence_transformers

        silence_transformers()
        console = progress_console()
        console.print(f"{config.prompts.path} → {folder}", markup=False, soft_wrap=True)
        training = align_run(run, config, stage=stage, callbacks=terminal(console))["train"]
        kept = training["epochs"][training["kept"] - 1]
        generation = f", generation {kept['generation']}" if "generation" in kept else ""
        agreement = ""
        if kept["agreement"] is not None:
            pairs = pluralize(training["held_out"], "held-out pair", "held-out pairs")
            agreement = f", agreement {kept['agreement']:.3f} on {pairs}"
        for line in (
            f"kept: epoch {kept['epoch']} of {len(training['epochs'])}{generation}{agreement}",
            f"adapter: {folder / 'adapter'}",
            f"summary: {folder / 'summary.json'}",
            *next_commands(run, selectors=True, aligned=True),
        ):
            console.print(line, markup=False, soft_wrap=True)
        if console.quiet:
            typer.echo(f"adapter: {folder / 'adapter'}")
