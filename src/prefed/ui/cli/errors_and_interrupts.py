"""Error messages, interrupts and exit codes of the commands."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from prefed.ui.cli.log import report


def exit_code(number: int) -> int:
    """The exit code that shells report for a signal.

    >>> exit_code(signal.SIGINT), exit_code(signal.SIGTERM)
    (130, 143)
    """
    return 128 + number


FAILED, MISUSED, INTERRUPTED = 1, 2, exit_code(signal.SIGINT)
"""Exit codes: the command failed; the command line is invalid; Ctrl-C."""


class UsageError(ValueError):
    """Invalid command line, e.g. options that exclude each other. The exit code is :data:`MISUSED`."""


@contextmanager
def usage() -> Iterator[None]:
    """Convert a ``ValueError`` to a :class:`UsageError`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def user_errors() -> Iterator[None]:
    """Exit with a message, without a traceback, on errors that the user can fix.

    ``PREFED_TRACEBACK=1`` in the environment shows the traceback.
    """
    from prefed.core.text import is_ours, printable_lines

    try:
        yield
    except KeyboardInterrupt:
        report("stopped", "\nstopped", "error", code=INTERRUPTED)
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, OSError, RuntimeError) as error:
        from pydantic import ValidationError

        ours = not isinstance(error, RuntimeError) or is_ours(error)
        if os.environ.get("PREFED_TRACEBACK") or not ours or isinstance(error, ValidationError):
            raise
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        # A message may quote file contents, so control characters are escaped.
        code = MISUSED if isinstance(error, UsageError) else FAILED
        report("error", printable_lines(f"error: {error}{notes}"), "error", code=code)
        raise typer.Exit(code) from None


@contextmanager
def interruptible(
    words: list[str],
    out: Path | None,
    resume: bool,
    kept: str = "complete rounds are kept",
    again: Sequence[str] = ("--resume",),
) -> Iterator[list[Path]]:
    """On Ctrl-C or SIGTERM, exit and print the command that resumes.

    Args:
        words: the command, without the options for ``out`` and ``again``.
        resume: whether the user resumes a run.
        kept: what an interrupted run keeps, for the message.
        again: options that make the command resume.

    Yields:
        A list, to which the caller appends the run directory before using it.
    """
    received = [signal.SIGINT]

    def stop(number: int, frame: object) -> NoReturn:
        received[0] = signal.Signals(number)
        raise KeyboardInterrupt

    paths: list[Path] = []
    # Shells make background processes ignore SIGINT; a run should stop there too.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield paths
    except KeyboardInterrupt:
        # The list is empty if the signal came early, e.g. during the import of PyTorch.
        path = paths[0] if paths else out
        started = (paths[0] / "checkpoint" / "COMMIT.json").exists() if paths else resume
        options = [*(["--out", str(path)] if path else []), *(again if started else [])]
        none = bool(paths) and not (paths[0] / "rounds.jsonl").exists()
        kept = "no round is complete yet" if none else kept
        state = f"{kept}. To continue" if started else "the run had not started. To start it again"
        code = exit_code(received[0])
        text = f"\nstopped; {state}:\n  {shlex.join([*words, *options])}"
        report("stopped", text, "error", code=code)
        raise typer.Exit(code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM raise ``KeyboardInterrupt``, like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
