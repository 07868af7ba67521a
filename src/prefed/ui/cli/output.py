"""Output of the commands: results on standard output, progress on standard error."""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from enum import IntEnum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from prefed.ui.cli.arguments import Fields
from prefed.ui.cli.errors_and_interrupts import FAILED, UsageError, user_errors
from prefed.ui.cli.log import Log, LogFormat, in_json, report, set_log_format

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.core import Callback


class Volume(IntEnum):
    """Verbosity of a command."""

    QUIET = 0
    USUAL = 1
    VERBOSE = 2


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors and the final line.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log each phase, and how long each part takes.")
]
_volume = Volume.USUAL  # for all threads of a command


def volume() -> Volume:
    """The verbosity of the running command."""
    return _volume


def set_volume(quiet: bool, verbose: bool) -> None:
    """Set the verbosity for the rest of the command.

    Raises:
        UsageError: both ``quiet`` and ``verbose`` are true.
    """
    global _volume
    if quiet and verbose:
        raise UsageError("give --quiet or --verbose, not both")
    _volume = Volume.QUIET if quiet else Volume.VERBOSE if verbose else Volume.USUAL


def _everywhere(*, quiet: Quiet = False, verbose: Verbose = False, log: Log = None) -> None: ...


_EVERYWHERE = inspect.signature(_everywhere, eval_str=True).parameters.values()
"""Options of every command."""


def command(function: Callable[..., None], *, trains: bool, settings: bool) -> Callable[..., None]:
    """Wrap a command: add ``-q``, ``-v`` and ``--log``, and handle errors with :func:`user_errors`.

    Args:
        trains: whether code that an experiment file names may run; see :func:`prefed.core.plugins.looking`.
        settings: add the options of settings, which are imported.
    """
    signature = inspect.signature(function, eval_str=True)
    groups = {
        parameter.name: fields
        for parameter in signature.parameters.values()
        for fields in get_args(parameter.annotation)
        if isinstance(fields, Fields)
    }

    @wraps(function)
    def run(
        *args: Any, quiet: bool = False, verbose: bool = False, log: LogFormat | None = None, **kwargs: Any
    ) -> None:
        from prefed.core.plugins import looking

        if log:
            set_log_format(log)
        try:
            with user_errors():
                if quiet or verbose:
                    set_volume(quiet, verbose)
                with _library_log(), nullcontext() if trains else looking():
                    taken = {name: fields.take(kwargs) for name, fields in groups.items()}
                    function(*args, **kwargs, **taken)
        except Exception as error:
            if isinstance(error, typer.Exit) or not in_json():
                raise
            from prefed.core.text import printable_lines

            text = printable_lines(f"error: {type(error).__name__}: {error}")
            report("error", text, "error", code=FAILED, traceback=traceback.format_exc())
            raise typer.Exit(FAILED) from None

    parameters = list[inspect.Parameter]()
    for parameter in (*signature.parameters.values(), *_EVERYWHERE):
        if parameter.name not in groups:
            parameters.append(parameter)
        elif settings:
            parameters += groups[parameter.name].parameters()
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


_TRACEBACK = logging.Formatter()


class _StderrHandler(logging.Handler):
    """Writes log records to standard error, and sums the logged seconds by part."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def emit(self, record: logging.LogRecord) -> None:
        from prefed.core.text import printable

        fields = {}
        if hasattr(record, "part"):
            fields = {"part": record.part, "seconds": getattr(record, "seconds", 0.0)}
            self.seconds[record.part] += fields["seconds"]
        if in_json() and record.exc_info:
            fields["traceback"] = _TRACEBACK.formatException(record.exc_info)
        report("log", printable(record.getMessage()), record.levelname.lower(), **fields)


@contextmanager
def _library_log() -> Iterator[None]:
    """Configure the library's log for the verbosity; with ``-v``, print a summary of times.

    In JSON, the logs of other libraries and Python's warnings are events too.
    """
    log, stderr = logging.getLogger("prefed"), _StderrHandler()
    before, owner = log.level, logging.getLogger() if in_json() else log
    if volume() is Volume.QUIET:
        stderr.setLevel(logging.ERROR)
    if volume() is not Volume.USUAL or in_json():
        # With a handler, Python does not print warnings to standard error itself.
        owner.addHandler(stderr)
    logging.captureWarnings(in_json())
    if volume() is Volume.VERBOSE:
        log.setLevel(logging.INFO)
    try:
        yield
        if stderr.seconds and volume() is Volume.VERBOSE:
            from prefed.core.text import duration

            whole = sum(stderr.seconds.values())
            longest = sorted(stderr.seconds.items(), key=lambda item: -item[1])
            parts = (f"{part} {duration(seconds)} ({seconds / whole:.0%})" for part, seconds in longest)
            report("time", f"time by part: {', '.join(parts)}", seconds=dict(longest))
        if in_json():
            report("done", "done")
    finally:
        logging.captureWarnings(False)
        owner.removeHandler(stderr)
        log.setLevel(before)


def progress_console(as_json: bool = False) -> Console:
    """The console for progress and human-readable results; silent with ``-q`` and ``--log json``.

    Args:
        as_json: write to standard error, because standard output is for JSON.
    """
    from rich.console import Console

    from prefed.trackers.terminal import stdout_console

    console = Console(stderr=True, highlight=False) if as_json else stdout_console()
    console.quiet = volume() is Volume.QUIET or in_json()
    return console


def terminal(console: Console, label: str = "") -> list[Callback]:
    """The callback that shows progress on ``console``; none with ``-q``, one line per round with ``-v``.

    With ``--log json``, it logs events instead.

    Args:
        label: prefix of each line if several processes write to one terminal.
    """
    if volume() is Volume.QUIET:
        return []
    from prefed.trackers.log import JsonLog
    from prefed.trackers.terminal import Terminal

    if in_json():
        return [JsonLog(report)]
    return [Terminal(console, label, lines=volume() is Volume.VERBOSE)]


def print_progress(text: str) -> None:
    """Print a line of progress on standard output; nothing with ``-q``. With ``--log json``, log it."""
    if in_json() and volume() is not Volume.QUIET:
        report("note", text)
    elif volume() is not Volume.QUIET:
        typer.echo(text)


@contextmanager
def only_json(as_json: bool) -> Iterator[None]:
    """With ``as_json``, what code from outside prefed prints goes to standard error."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield


def print_json(content: Any) -> None:
    """Print ``content`` as JSON on standard output, without ASCII escapes."""
    from prefed.core.text import printable_json

    typer.echo(printable_json(content))
