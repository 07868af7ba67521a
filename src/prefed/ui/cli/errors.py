"""Errors for a person at a terminal, and the exit codes of every command."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

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
    """The words of a command do not go together, or an option has no such value: no file need be read to see.

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
    """Errors that a user can do something about end the command with their message alone.

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
