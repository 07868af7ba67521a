"""``prefed run FILE``."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from prefed.cli.arguments import CellName, File, Overrides, Track
from prefed.cli.errors import UsageError
from prefed.cli.output import AsJson, print_json, progress_console, terminal

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
    if dry_run and resume:
        raise UsageError("give --dry-run or --resume, not both: only a new run can be tried")
    overrides = [*(overrides or []), *([f"track.to={json.dumps(track)}"] if track else [])]
    words = ["prefed", "run", str(file), *(["--cell", cell] if cell else [])]
    words += [word for text in overrides for word in ("--set", text)]
    words += ["--dry-run"] if dry_run else []
    with interruptible(words, out, resume) as paths:
        from prefed.config.table import load_cell

        # Errors in the file are found before PyTorch is imported, which takes seconds.
        experiment = load_cell(file, cell, overrides)
        from prefed.core.text import pluralize
        from prefed.models.notices import silence_transformers
        from prefed.runs.run import default_out
        from prefed.store.directory import refuse_foreign

        silence_transformers()
        console = progress_console(as_json)
        stem = f"{file.stem}-{cell.replace('/', '-')}" if cell else file.stem
        path = out or default_out(experiment, stem)
        if path.is_file():
            raise ValueError(f"{path} is a file, not a folder; choose another --out")
        if not dry_run:
            paths.append(path)
        refuse_foreign(path, resume)
        rounds = pluralize(experiment.rounds, "round", "rounds")
        console.print(f"{experiment.method.name}, {rounds} → {path}", markup=False)
        if dry_run:
            _try(experiment, path, as_json, console)
        else:
            _run(experiment, path, resume, as_json, console)


def _run(experiment: Experiment, path: Path, resume: bool, as_json: bool, console: Console) -> None:
    """Run, and tell the result."""
    from prefed.report.public import public_page
    from prefed.report.result import print_result, result_line
    from prefed.runs.groupings import groupings_of
    from prefed.runs.record import read_run
    from prefed.runs.run import run as run_experiment

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
    from prefed.report.dry_run import estimate_line, print_dry_run
    from prefed.runs.dry_run import dry_run

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


@contextmanager
def interruptible(
    words: list[str],
    out: Path | None,
    resume: bool,
    kept: str = "whole rounds are kept",
    again: Sequence[str] = ("--resume",),
) -> Iterator[list[Path]]:
    """End on Ctrl-C or SIGTERM with the command that resumes.

    Args:
        words: the command, without ``out`` and ``resume``.
        out: the run directory, if the user names one.
        resume: whether the user resumes a run.
        kept: what an interrupted command leaves, in words.
        again: what is added to the command so that it goes on.

    Yields:
        A list; the run directory is appended to it before the run uses it.
    """
    received = [signal.SIGINT]

    def stop(number: int, frame: object) -> NoReturn:
        received[0] = signal.Signals(number)
        raise KeyboardInterrupt

    paths: list[Path] = []
    # A shell ignores SIGINT for what it starts in the background; here it ends the run there too.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield paths
    except KeyboardInterrupt:
        # Without a path the signal came early, for instance while PyTorch was imported.
        path = paths[0] if paths else out
        begun = resume or (bool(paths) and (paths[0] / "checkpoint").is_dir())
        options = [*(["--out", str(path)] if path else []), *(again if begun else [])]
        state = f"{kept}. To go on" if begun else "nothing was begun. To start again"
        typer.echo(f"\nstopped; {state}:\n  {shlex.join([*words, *options])}", err=True)
        # A shell gives 130 and 143 for a program that the signal itself ended.
        raise typer.Exit(128 + received[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
