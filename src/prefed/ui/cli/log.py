"""What the commands report on standard error: lines of text or, with ``--log json``, JSON."""

from __future__ import annotations

import json
from contextvars import ContextVar
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

import typer

LogFormat: TypeAlias = Literal["text", "json"]
Log = Annotated[
    LogFormat | None,
    typer.Option(
        "--log",
        help="Format of progress, warnings and errors: text (default), or json with one object per line on "
        "standard error.",
    ),
]
log_format: ContextVar[LogFormat] = ContextVar("log_format", default="text")
"""The format of the running command."""


def in_json() -> bool:
    """Return whether the running command logs in JSON."""
    return log_format.get() == "json"


def report(event: str, text: str, level: str = "info", **fields: Any) -> None:
    """Write an event to standard error: as ``text`` or, in JSON, with the time and ``fields``."""
    if not in_json():
        typer.echo(text, err=True)
        return
    time = datetime.now().astimezone().isoformat(timespec="milliseconds")
    entry = {"time": time, "level": level, "event": event, "message": text.strip(), **fields}
    typer.echo(json.dumps(entry), err=True)
