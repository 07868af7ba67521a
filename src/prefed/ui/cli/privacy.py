"""``prefed privacy FILE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.arguments import CellName
from prefed.ui.cli.errors import UsageError


def privacy(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Put VALUE in the place of a setting."),
    ] = None,
    cell: CellName = None,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Clients that train; left out: as many as data.partition says.",
            show_default=False,
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="E",
            help="Look for the least noise_multiplier that keeps epsilon below E.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a run with [privacy] kind will promise its clients, or which noise a promise takes."""
    from dataclasses import replace

    from prefed.config import ConfigError
    from prefed.networks.federation.experiment import HELD, load_federated
    from prefed.runs.privacy import plan

    if epsilon is not None and epsilon <= 0:
        raise UsageError("--epsilon is a number above 0")
    experiment = load_federated(file, cell, overrides or ())
    if clients is None and getattr(experiment.data.train, "path", None) == HELD:
        raise ConfigError(f"{file}: the sites have the data, and their clients: say it with --clients")
    planned = plan(experiment, clients)
    if epsilon is not None:
        found = replace(planned.guarantee, noise_multiplier=planned.noise_for(epsilon))
        planned = replace(planned, guarantee=found)
    promised, spent = planned.guarantee, planned.epsilon()
    if as_json:
        content = {
            "noise_multiplier": promised.noise_multiplier,
            "epsilon": spent,
            "delta": planned.delta,
            "adjacency": promised.adjacency,
            "bound": promised.bound,
            "releases": planned.releases,
        }
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    told = "no bound: there is no noise" if spent is None else f"{spent:.4g} at delta {planned.delta:g}"
    typer.echo(f"noise_multiplier  {promised.noise_multiplier:.4f}")
    typer.echo(f"epsilon           {told}")
    typer.echo(f"neighbours        {promised.adjacency}")
    typer.echo(f"bound             {promised.bound}")
    typer.echo(f"releases          {planned.releases}, of the client that takes part most")
