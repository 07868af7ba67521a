"""``prefed run FILE``."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from prefed.cli.arguments import CellName, File, Overrides
from prefed.cli.errors import reported


def run(
    file: File,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run directory; left out: runs/FILE-METHOD-seedSEED."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the directory, which must hold one.")
    ] = False,
    cell: CellName = None,
) -> None:
    """Run an experiment and write its run directory."""
    with reported():
        _run(file, cell, overrides or [], out, resume)


def _run(file: Path, cell: str | None, overrides: list[str], out: Path | None, resume: bool) -> None:
    named = ["--cell", cell] if cell else []
    words = ["prefed", "run", str(file), *named, *(word for text in overrides for word in ("--set", text))]
    with _interruptible(words, out, resume) as told:
        from prefed.config.table import load_cell

        # What is wrong with the file is said before PyTorch is imported, which takes seconds.
        experiment = load_cell(file, cell, overrides)
        from prefed.core.text import pluralize
        from prefed.report.result import print_result
        from prefed.runs.run import default_out
        from prefed.runs.run import run as run_experiment
        from prefed.trackers.terminal import Terminal, quiet, standard_output

        quiet()
        console = standard_output()
        name = f"{file.stem}-{cell.replace('/', '-')}" if cell else file.stem
        path = out or default_out(experiment, name)
        if path.is_file():
            raise ValueError(f"{path} is a file, not a folder; choose another --out")
        told.append(path)
        rounds = pluralize(experiment.rounds, "round", "rounds")
        console.print(f"{experiment.method.name}, {rounds} → {path}", markup=False)
        result = run_experiment(experiment, path, resume=resume, callbacks=[Terminal(console)])
        print_result(result.summary, console)
        adapter = result.adapter or "none: see `prefed export`"
        for name, value in (
            ("adapter", adapter),
            ("summary", path / "summary.json"),
            ("report", f"prefed report {shlex.quote(str(path))}"),
        ):
            console.print(f"{name}: {value}", markup=False, soft_wrap=True)


@contextmanager
def _interruptible(words: list[str], out: Path | None, resume: bool) -> Iterator[list[Path]]:
    """End on Ctrl-C or SIGTERM with the command that resumes; the directory is appended once it is used."""
    received = [signal.SIGINT]

    def stop(number: int, frame: object) -> NoReturn:
        received[0] = signal.Signals(number)
        raise KeyboardInterrupt

    told: list[Path] = []
    # Also where a shell that starts us in the background has SIGINT ignored: who sends it means it.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    except KeyboardInterrupt:
        # Before it is used, as while PyTorch is imported, what was asked for is all that is known.
        path = told[0] if told else out
        begun = resume or (bool(told) and (told[0] / "checkpoint").is_dir())
        asked = [*(["--out", str(path)] if path else []), *(["--resume"] if begun else [])]
        command = shlex.join([*words, *asked])
        kept = "whole rounds are kept. To go on" if begun else "nothing was begun. To start again"
        typer.echo(f"\nstopped; {kept}:\n  {command}", err=True)
        # 130 and 143: what a shell gives for a program that the signal itself ended.
        raise typer.Exit(128 + received[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
