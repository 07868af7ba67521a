"""``prefed run FILE``."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefed.ui.cli.arguments import AutoResume, CellName, File, Overrides, Track, run_name, set_words
from prefed.ui.cli.errors import UsageError
from prefed.ui.cli.interrupts import interruptible
from prefed.ui.cli.output import AsJson, print_json, progress_console, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.config import Experiment


def run(
    file: File,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; left out: runs/FILE-METHOD-seedSEED.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the directory, which must hold one.")
    ] = False,
    auto_resume: AutoResume = False,
    cell: CellName = None,
    track: Track = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, and tell sizes and about how long a round would take; write nothing.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment and write its run directory."""
    if dry_run and (resume or auto_resume):
        raise UsageError("give --dry-run or --resume, not both: only a new run can be tried")
    overrides = [*(overrides or []), *([f"track.to={json.dumps(track)}"] if track else [])]
    words = ["prefed", "run", str(file), *(["--cell", cell] if cell else [])]
    words += set_words(overrides)
    words += ["--dry-run"] if dry_run else []
    again = "--auto-resume" if auto_resume else "--resume"
    with interruptible(words, out, resume or auto_resume, again=(again,)) as paths:
        from prefed.config.table import load_cell

        # Errors in the file are found before PyTorch is imported, which takes seconds.
        experiment = load_cell(file, cell, overrides)
        from prefed.core.text import pluralize
        from prefed.models.notices import silence_transformers
        from prefed.runs.run import default_out
        from prefed.store.directory import holds_run, refuse_foreign

        silence_transformers()
        console = progress_console(as_json)
        path = out or default_out(experiment, run_name(file, cell))
        if path.is_file():
            raise ValueError(f"{path} is a file, not a folder; choose another --out")
        if not dry_run:
            paths.append(path)
        resume = holds_run(path) if auto_resume else resume
        refuse_foreign(path, resume)
        rounds = pluralize(experiment.rounds, "round", "rounds")
        console.print(f"{experiment.method.name}, {rounds} → {path}", markup=False)
        if dry_run:
            _try(experiment, path, as_json, console)
        else:
            _run(experiment, path, resume, as_json, console)


def _run(experiment: Experiment, path: Path, resume: bool, as_json: bool, console: Console) -> None:
    """Run, and tell the result."""
    from prefed.runs.figures import groupings_of
    from prefed.runs.record import read_run
    from prefed.runs.run import run as run_experiment
    from prefed.ui.pages.public import public_page
    from prefed.ui.pages.result import print_result, result_line

    result = run_experiment(experiment, path, resume=resume, callbacks=terminal(console), page=public_page)
    if as_json:
        print_json(result.summary)
    elif console.quiet:
        typer.echo(f"{result_line(result.summary)} → {path}")
    else:
        told = read_run(path).tastes
        print_result(result.summary, console, groupings=groupings_of(result.rounds), tastes=told)
        adapters = ", ".join(map(str, result.adapters)) or "none: see `prefed export`"
        for line in (
            f"{'adapters' if len(result.adapters) > 1 else 'adapter'}: {adapters}",
            *([f"aligned: {path / 'align' / 'adapter'}"] if experiment.align else []),
            f"summary: {path / 'summary.json'}",
            f"report: prefed report {shlex.quote(str(path))}",
            *next_commands(path, experiment.method.kind.reads == "choice", experiment.align is not None),
        ):
            console.print(line, markup=False, soft_wrap=True)


def _try(experiment: Experiment, path: Path, as_json: bool, console: Console) -> None:
    """Check an experiment, and tell what a run of it would take."""
    from prefed.runs.dry_run import dry_run
    from prefed.ui.pages.dry_run import estimate_line, print_dry_run

    found = dry_run(experiment, path)
    if as_json:
        print_json(asdict(found))
    elif console.quiet:
        typer.echo(estimate_line(found))
    else:
        print_dry_run(found, console)


def next_commands(path: Path, selectors: bool, aligned: bool) -> list[str]:
    """Lines with the command that goes on from a run's selectors; none for a run without them."""
    run = shlex.quote(str(path))
    if aligned:
        return [f"judge: prefed judge {run} --judge NAME --prompts FILE"]
    return [f"align: prefed align {run} --prompts FILE"] if selectors else []
