"""Output of the commands: results on standard output, progress on standard error."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefed.ui.cli.errors import UsageError, user_errors

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.core import Callback


class Volume(IntEnum):
    """How much a command prints."""

    QUIET = 0
    USUAL = 1
    VERBOSE = 2


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors and the final line.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log each phase, and how long each part takes.")
]
_volume: ContextVar[Volume] = ContextVar("volume", default=Volume.USUAL)


def volume() -> Volume:
    """The verbosity of the running command."""
    return _volume.get()


def set_volume(quiet: bool, verbose: bool) -> None:
    """Set the verbosity until the command has ended.

    Raises:
        UsageError: both are asked for.
    """
    if quiet and verbose:
        raise UsageError("give --quiet or --verbose, not both")
    _volume.set(Volume.QUIET if quiet else Volume.VERBOSE if verbose else Volume.USUAL)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as a command: with ``-q`` and ``-v``, errors for a person and the exit codes of all."""

    @wraps(function)
    def run(*args: Any, quiet: bool = False, verbose: bool = False, **kwargs: Any) -> None:
        with user_errors():
            if quiet or verbose:
                set_volume(quiet, verbose)
            try:
                with _told():
                    function(*args, **kwargs)
            finally:
                _volume.set(Volume.USUAL)

    signature = inspect.signature(function, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, kind, default=False, annotation=annotation)
        for name, annotation in (("quiet", Quiet), ("verbose", Verbose))
    ]
    parameters = [*signature.parameters.values(), *more]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class _Told(logging.Handler):
    """Writes what the library logs on standard error, and adds up the times of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def emit(self, record: logging.LogRecord) -> None:
        from prefed.core.text import printable

        if hasattr(record, "part"):
            self.seconds[record.part] += getattr(record, "seconds", 0.0)
        typer.echo(printable(record.getMessage()), err=True)


@contextmanager
def _told() -> Iterator[None]:
    """Set the level of the library's log."""
    log, told = logging.getLogger("prefed"), _Told()
    before, handler = log.level, told if volume() is Volume.VERBOSE else logging.NullHandler()
    if volume() is not Volume.USUAL:
        # Where a handler is, Python does not write warnings on standard error by itself.
        log.addHandler(handler)
    if volume() is Volume.VERBOSE:
        log.setLevel(logging.INFO)
    try:
        yield
        if told.seconds:
            from prefed.core.text import duration

            whole = sum(told.seconds.values())
            longest = sorted(told.seconds.items(), key=lambda item: -item[1])
            parts = (f"{part} {duration(seconds)} ({seconds / whole:.0%})" for part, seconds in longest)
            typer.echo(f"where the time went: {', '.join(parts)}", err=True)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")
]


def progress_console(as_json: bool = False) -> Console:
    """The console for progress, and for results that are not JSON; with ``-q`` it writes nothing.

    Args:
        as_json: standard output is for JSON only, so this is standard error.
    """
    from rich.console import Console

    from prefed.trackers.terminal import stdout_console

    console = Console(stderr=True, highlight=False) if as_json else stdout_console()
    console.quiet = volume() is Volume.QUIET
    return console


def terminal(console: Console) -> list[Callback]:
    """Shows a run's progress on ``console``: nothing with ``-q``, a line for each round with ``-v``."""
    from prefed.trackers.terminal import Terminal

    return [] if console.quiet else [Terminal(console, lines=volume() is Volume.VERBOSE)]


def bar_console() -> Console:
    """The console of a progress bar, shown on a terminal and not with ``-q``."""
    from rich.console import Console

    return Console(stderr=True, quiet=volume() is Volume.QUIET)


def print_json(content: Any) -> None:
    """Print ``content`` as JSON on standard output, without ASCII escapes."""
    from prefed.core.text import printable_json

    typer.echo(printable_json(content))
