"""``prefed site CONFIG`` and ``prefed site status CONFIG``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from prefed.cli.errors import INTERRUPTED, UsageError


def site(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[status] CONFIG", help="The site's file, site.toml.", show_default=False),
    ],
    last: Annotated[int, typer.Option(min=0, help="With status: so many entries of the log.")] = 20,
) -> None:
    """Take part in a federation until stopped; with status: tell what the site was asked for and sent."""
    status, path = words[0] == "status" and len(words) == 2, Path(words[-1])
    if len(words) > 1 and not status:
        raise UsageError("write `prefed site CONFIG` or `prefed site status CONFIG`")
    from prefed.federation.config import SiteConfig

    config = SiteConfig.load(path)
    if status:
        from prefed.federation.status import status_lines

        for line in status_lines(config, last):
            typer.echo(line)
        return
    from prefed.federation.flare import check_installed

    check_installed()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        from prefed.federation.flare.site import take_part
        from prefed.models.notices import silence_transformers

        silence_transformers()
        take_part(config, typer.echo)
    except KeyboardInterrupt:
        typer.echo("stopped; private states are kept", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
