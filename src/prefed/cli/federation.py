"""``prefed federation init PROJECT``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

federation = typer.Typer(help="Set up a federation of organisations.", no_args_is_help=True)


def init(
    project: Annotated[Path, typer.Argument(help="The project file (TOML).", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The folder of the kits; left out: the federation's name.")
    ] = None,
) -> None:
    """Make the kits of a hub and its sites: certificates, keys and settings."""
    from prefed.federation.flare import check_installed

    check_installed()
    from prefed.federation.flare.kits import Project, make_kits

    described = Project.load(project)
    folder = out or Path(described.name)
    make_kits(described, folder)
    typer.echo(f"hub: {folder / 'hub'}, for `prefed federate EXPERIMENT --hub {folder / 'hub'}`")
    for name in described.sites:
        typer.echo(f"{name}: {folder / name}, for this site alone: fill in its site.toml, then `prefed site`")
    typer.echo(f"{folder / 'authority'} signs for new sites: keep it offline, and give it to nobody")
