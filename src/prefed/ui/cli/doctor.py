"""``prefed doctor``: what is missing on this machine for an experiment or a site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefed.ui.cli.arguments import AsJson, CellName, Overrides, RunOut, run_name
from prefed.ui.cli.errors_and_interrupts import FAILED
from prefed.ui.cli.log import in_json, report
from prefed.ui.cli.output import Volume, print_json, volume

if TYPE_CHECKING:
    from prefed.runs.machine_requirements import Finding


def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(help="An experiment file, or a site's site.toml (default: only this machine)."),
    ] = None,
    overrides: Overrides = None,
    cell: CellName = None,
    hub: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check the hub of a federation in this folder, too.")
    ] = None,
    out: RunOut = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine has what an experiment or a site needs.

    Downloads nothing, and does not run your own code unless it was used on this machine before.
    """
    findings = list(_findings(file, overrides or [], cell, hub, out))
    missing = [finding for finding in findings if finding.missing]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    elif volume() is not Volume.QUIET and not in_json():
        from prefed.core.text import printable

        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            mark = "missing" if finding.missing else "ok"
            typer.echo(printable(f"{mark:7}  {finding.what:{width}}  {finding.text}"))
    verdict = f"{len(missing)} of {len(findings)} checks failed" if missing else "nothing is missing"
    if not as_json:
        typer.echo(verdict)
    if missing:
        if in_json():
            report("error", verdict, "error", code=FAILED)
        raise typer.Exit(FAILED)


def _findings(
    file: Path | None, overrides: list[str], cell: str | None, hub: Path | None, out: Path | None
) -> Iterator[Finding]:
    if file is None:
        from prefed.runs.machine_requirements import environment

        yield from environment(out or Path())
    else:
        yield from _of_file(file, overrides, cell, hub, out)
    if hub is not None:
        from prefed.networks.federation.machine_requirements import hub_needs

        yield from hub_needs(hub)


def _of_file(
    file: Path, overrides: list[str], cell: str | None, hub: Path | None, out: Path | None
) -> Iterator[Finding]:
    from prefed.config.file import read_toml

    if "federation" in read_toml(file):
        from prefed.networks.federation.config import SiteConfig

        config = SiteConfig.load(file)
        from prefed.networks.federation.machine_requirements import site_needs
        from prefed.runs.machine_requirements import environment

        yield from environment(Path(config.state), [file])
        yield from site_needs(config)
        return
    from prefed.config.experiment_table import load_cell
    from prefed.networks.federation.experiment import load_federated

    load = load_cell if hub is None else load_federated
    experiment = load(file, cell, overrides)
    from prefed.runs.machine_requirements import environment, needs
    from prefed.runs.run import default_out

    place = out or default_out(experiment, run_name(file, cell))
    yield from environment(place, [file])
    yield from needs(experiment, place, own_data=hub is None)
