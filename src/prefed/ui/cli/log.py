"""What the commands report on standard error: lines of text or, with ``--log json``, JSON."""

from __future__ import annotations

import json
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
_format: LogFormat = "text"  # no context variable: threads of a command log too


def set_log_format(format_: LogFormat) -> None:
    """Set the format for the rest of the command."""
    global _format
    _format = format_


def in_json() -> bool:
    """Return whether the running command logs in JSON."""
    return _format == "json"


def report(event: str, text: str, level: str = "info", **fields: Any) -> None:
    """Write an event to standard error: as ``text`` or, in JSON, with the time and ``fields``."""
    if not in_json():
        typer.echo(text, err=True)
        return
    time = datetime.now().astimezone().isoformat(timespec="milliseconds")
    entry = {"time": time, "level": level, "event": event, "message": text.strip(), **fields}
    typer.echo(json.dumps(entry), err=True)
