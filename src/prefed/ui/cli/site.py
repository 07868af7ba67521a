"""``prefed site CONFIG``, ``prefed site status CONFIG`` and ``prefed site export CONFIG``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from prefed.ui.cli.arguments import Merge
from prefed.ui.cli.errors import INTERRUPTED, UsageError

WORDS = ("status", "export")


def site(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[status|export] CONFIG", help="The site's file, site.toml.", show_default=False
        ),
    ],
    last: Annotated[int, typer.Option(min=0, help="With status: so many entries of the log.")] = 20,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="With export: the beginning of the run's name; left out: the run that ended last.",
        ),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(metavar="ID", help="With export: whose model; left out: of the site's only client."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="With export: the folder.")] = None,
    merge: Merge = False,
    force: Annotated[
        bool, typer.Option("--force", help="With export: replace the folder if it is an earlier export.")
    ] = False,
) -> None:
    """Take part in a federation until stopped.

    With status: tell what the site was asked for and sent. With export: write the model of one of the site's
    clients, after a run's last round, as a folder that PEFT, or transformers alone, loads.
    """
    word, path = words[0] if len(words) == 2 and words[0] in WORDS else "", Path(words[-1])
    if len(words) > 1 and not word:
        raise UsageError("write `prefed site CONFIG`, or with status or export before CONFIG")
    options = {"--run": run, "--client": client, "--out": out, "--merge": merge, "--force": force}
    if word != "export" and (given := [name for name, value in options.items() if value]):
        raise UsageError(f"{given[0]} belongs to `prefed site export CONFIG`")
    if word == "export" and out is None:
        raise UsageError("prefed site export: name a folder for the model with --out DIR")
    from prefed.networks.federation.config import SiteConfig

    config = SiteConfig.load(path)
    if out is not None:
        from prefed.networks.federation.personal import export_client
        from prefed.ui.cli.export import check_folder

        check_folder(
            out, {"site's state": Path(config.state), "base model": Path(config.model.name)}, replace=force
        )
        exported = export_client(config, out, run=run or "", client=client, merge=merge)
        code = (f"  {line}" for line in exported.code(str(out)))
        typer.echo("\n".join([exported.heading(out), "to load it:", *code]))
        return
    if word == "status":
        from prefed.networks.federation.status import status_lines

        for line in status_lines(config, last):
            typer.echo(line)
        return
    from prefed.networks.federation.flare import check_installed

    check_installed()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        from prefed.models.notices import silence_transformers
        from prefed.networks.federation.flare.site import take_part

        silence_transformers()
        take_part(config, typer.echo)
    except KeyboardInterrupt:
        typer.echo("stopped; private states are kept", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
