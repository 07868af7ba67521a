"""Where a command writes: its result on standard output, its progress beside or above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefed.ui.cli.volume import Volume, volume

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.core import Callback

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")
]


def progress_console(as_json: bool = False) -> Console:
    """The console for progress, and for a result that is no JSON; with ``-q`` it writes nothing.

    Args:
        as_json: standard output is for JSON alone, and this is standard error.
    """
    from rich.console import Console

    from prefed.trackers.terminal import stdout_console

    console = Console(stderr=True, highlight=False) if as_json else stdout_console()
    console.quiet = volume() is Volume.QUIET
    return console


def terminal(console: Console) -> list[Callback]:
    """What shows on ``console`` how a run goes on: with ``-q`` nothing, with ``-v`` a line for each round."""
    from prefed.trackers.terminal import Terminal

    return [] if console.quiet else [Terminal(console, lines=volume() is Volume.VERBOSE)]


def bar_console() -> Console:
    """Standard error for a bar, which is drawn where that is a terminal and not with ``-q``."""
    from rich.console import Console

    return Console(stderr=True, quiet=volume() is Volume.QUIET)


def print_json(content: Any) -> None:
    """Print ``content`` as JSON on standard output, with every letter as itself."""
    from prefed.core.text import printable_json

    typer.echo(printable_json(content))
