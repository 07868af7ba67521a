"""The ``prefed`` command and its subcommands, in the order of ``--help``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from prefed.ui.cli.calculators import privacy, theory
from prefed.ui.cli.collect import collect
from prefed.ui.cli.demo import demo
from prefed.ui.cli.doctor import doctor
from prefed.ui.cli.errors_and_interrupts import user_errors
from prefed.ui.cli.federation import ends_at_once, federate, federation, peer, site
from prefed.ui.cli.forget import forget
from prefed.ui.cli.log import Log, set_log_format
from prefed.ui.cli.models import export, generate, push
from prefed.ui.cli.new import new
from prefed.ui.cli.output import Quiet, Verbose, command, set_volume
from prefed.ui.cli.prepare import data, init, methods
from prefed.ui.cli.results import compare, evaluate, judge, report
from prefed.ui.cli.training import align, run, sweep


class _Commands(TyperGroup):
    """Only the command that is called gets the options of settings, so ``prefed --help`` imports none."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None:
            alone = typer.Typer(add_completion=False, rich_markup_mode=app.rich_markup_mode)
            alone.command(name)(complete_command(name))
            command = get_command(alone)
        return name, command, rest


app = typer.Typer(
    name="prefed",
    cls=_Commands,
    help="Federated alignment of language models on preferences that never leave their owners.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # "rich" would drop words in brackets, such as [stop], as markup
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TRAINING = (run, sweep, demo, peer, federate)
"""Commands that run the code that an experiment file names. All others only look at it, or load what a run
recorded.
"""

_COMMANDS = (
    run,
    align,
    judge,
    collect,
    sweep,
    init,
    new,
    methods,
    data,
    doctor,
    demo,
    evaluate,
    compare,
    report,
    export,
    push,
    generate,
    forget,
    theory,
    privacy,
    peer,
    federation,
    site,
    federate,
)


def complete_command(name: str, *, settings: bool = True) -> Callable[..., None]:
    """A command with all its options, or without those of ``settings``, which are imported."""
    function = next(each for each in _COMMANDS if each.__name__ == name)
    wrapped = command(function, trains=function in _TRAINING, settings=settings)
    return ends_at_once(wrapped) if function is peer else wrapped


for _command in _COMMANDS:
    app.command()(complete_command(_command.__name__, settings=False))


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log: Log = None,
) -> None:
    set_log_format(log or "text")
    with user_errors():
        set_volume(quiet, verbose)
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"prefed {installed('prefed')}")
        raise typer.Exit


def main() -> None:
    """The ``prefed`` command."""
    from prefed.core.openmp import openmp_settings
    from prefed.core.proxies import direct_here

    os.environ.update({**openmp_settings(), **direct_here()})
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks stops no command.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    app()
