"""Errors for a person at a terminal, interrupts, and the exit codes of every command."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer


def exit_code(number: int) -> int:
    """The exit code after a signal, as a shell has it for a program that the signal itself ended.

    >>> exit_code(signal.SIGINT), exit_code(signal.SIGTERM)
    (130, 143)
    """
    return 128 + number


FAILED, MISUSED, INTERRUPTED = 1, 2, exit_code(signal.SIGINT)
"""Exit codes besides 0: the run or the data is wrong; the command line alone is wrong; Ctrl-C."""


class UsageError(ValueError):
    """A command line that is wrong in itself, e.g. options that exclude each other.

    It ends the command as the errors do that the command line's grammar finds.
    """


@contextmanager
def usage() -> Iterator[None]:
    """A ``ValueError`` from inside is a :class:`UsageError`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors that a user can fix end the command with only their message.

    ``PREFED_TRACEBACK=1`` in the environment shows where in the code they arose.
    """
    from prefed.core.text import is_ours, printable_lines

    try:
        yield
    except KeyboardInterrupt:
        typer.echo("\nstopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, OSError, RuntimeError) as error:
        from pydantic import ValidationError

        ours = not isinstance(error, RuntimeError) or is_ours(error)
        if os.environ.get("PREFED_TRACEBACK") or not ours or isinstance(error, ValidationError):
            raise
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        # A message may quote what files hold: only its own line breaks reach the terminal as such.
        typer.echo(printable_lines(f"error: {error}{notes}"), err=True)
        raise typer.Exit(MISUSED if isinstance(error, UsageError) else FAILED) from None


@contextmanager
def interruptible(
    words: list[str],
    out: Path | None,
    resume: bool,
    kept: str = "complete rounds are kept",
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
        kept = "no round is complete yet" if none else kept
        state = f"{kept}. To continue" if begun else "nothing was started. To start again"
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
