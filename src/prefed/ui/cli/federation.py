"""``prefed federation init PROJECT``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.errors import UsageError


def federation(
    action: Annotated[str, typer.Argument(metavar="init", help="What to do: init.", show_default=False)],
    project: Annotated[Path, typer.Argument(help="The project file (TOML).", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The folder of the kits; left out: the federation's name.")
    ] = None,
) -> None:
    """Make the kits of a federation: certificates, keys and settings of a hub and its sites.

    Again with more sites in the project file, it makes the kits of those; the others' stay as they are.
    """
    if action != "init":
        raise UsageError(f"prefed federation {action}: write `prefed federation init PROJECT`")
    from prefed.networks.federation.flare import check_installed

    check_installed()
    from prefed.config import ConfigError
    from prefed.networks.federation.flare.kits import Project, make_kits

    described = Project.load(project)
    folder = out or Path(described.name)
    try:
        make_kits(described, folder)
    except ConfigError as error:
        raise ConfigError(f"{project}: {error}") from None
    typer.echo(f"hub: {folder / 'hub'}, for `prefed federate EXPERIMENT --hub {folder / 'hub'}`")
    for name in described.sites:
        typer.echo(f"{name}: {folder / name}, for this site alone: fill in its site.toml, then `prefed site`")
    typer.echo(f"{folder / 'authority'} signs for new sites: keep it offline, and give it to nobody")
