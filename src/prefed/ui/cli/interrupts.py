"""Ctrl-C and a termination signal: what a command says, and how it ends."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from prefed.ui.cli.errors import exit_code


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
        kept: what an interrupted command leaves, in words, once there is a round.
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
        begun = (paths[0] / "checkpoint" / "COMMIT.json").exists() if paths else resume
        options = [*(["--out", str(path)] if path else []), *(again if begun else [])]
        none = bool(paths) and not (paths[0] / "rounds.jsonl").exists()
        kept = "no round is whole yet" if none else kept
        state = f"{kept}. To go on" if begun else "nothing was begun. To start again"
        typer.echo(f"\nstopped; {state}:\n  {shlex.join([*words, *options])}", err=True)
        raise typer.Exit(exit_code(received[0])) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def terminable() -> Iterator[None]:
    """Within it SIGTERM raises ``KeyboardInterrupt``, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
