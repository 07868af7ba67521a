"""Errors for a person at a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors that a user can do something about end the command with their message alone.

    ``PREFED_TRACEBACK=1`` in the environment shows where in the code they arose.
    """
    from pydantic import ValidationError

    from prefed.core.text import printable_lines

    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        ours = not isinstance(error, RuntimeError) or type(error).__module__.startswith("prefed.")
        if os.environ.get("PREFED_TRACEBACK") or not ours or isinstance(error, ValidationError):
            raise
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        # A message may quote what files hold: only its own line breaks reach the terminal as such.
        typer.echo(printable_lines(f"error: {error}{notes}"), err=True)
        raise typer.Exit(1) from None
