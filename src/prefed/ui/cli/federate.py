"""``prefed federate FILE``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.arguments import AutoResume, CellName, File, Overrides, given_words, run_name
from prefed.ui.cli.interrupts import interruptible
from prefed.ui.cli.output import progress_console, terminal


def federate(
    context: typer.Context,
    file: File,
    overrides: Overrides = None,
    hub: Annotated[Path, typer.Option(help="The hub's folder, from `prefed federation init`.")] = Path("hub"),
    out: Annotated[
        Path | None, typer.Option(help="The run directory; left out: runs/FILE-METHOD-seedSEED.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the directory, which must hold one.")
    ] = False,
    auto_resume: AutoResume = False,
    sites: Annotated[
        str | None, typer.Option(metavar="A,B", help="Sites that take part; left out: all that have kits.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until all sites have come.")] = 120.0,
    at_least: Annotated[
        int | None, typer.Option(min=1, help="So many sites are enough to begin after --wait; left out: all.")
    ] = None,
    visit: Annotated[
        float, typer.Option(min=1, help="Seconds that a visit may take before its site is left out.")
    ] = 600.0,
    most_clients: Annotated[int, typer.Option(min=1, help="Clients that one site may say it has.")] = 10_000,
    most_pairs: Annotated[
        int, typer.Option(min=1, help="Pairs that a site may say one client has; a merge weighs by them.")
    ] = 10_000_000,
    cell: CellName = None,
) -> None:
    """Run an experiment over the sites of a federation."""
    words = ["prefed", "federate", str(file), *given_words(context, without=("out", "resume", "auto_resume"))]
    again = "--auto-resume" if auto_resume else "--resume"
    with interruptible(words, out, resume or auto_resume, again=(again,)) as paths:
        from prefed.networks.federation.flare import check_installed

        check_installed()
        from prefed.networks.federation.experiment import load_federated

        experiment = load_federated(file, cell, overrides or [])
        from prefed.core.text import pluralize
        from prefed.models.notices import silence_transformers
        from prefed.networks.federation.federate import Terms
        from prefed.networks.federation.federate import federate as federate_experiment
        from prefed.networks.federation.flare.kits import Kits
        from prefed.networks.federation.flare.transport import FlareTransport
        from prefed.runs.run import default_out
        from prefed.store.directory import holds_run, refuse_foreign
        from prefed.ui.pages.public import public_page
        from prefed.ui.pages.result import print_result, result_line

        silence_transformers()
        console, kits = progress_console(), Kits.open(hub)
        path = out or default_out(experiment, run_name(file, cell))
        paths.append(path)
        resume = holds_run(path) if auto_resume else resume
        refuse_foreign(path, resume)
        chosen = tuple(sites.split(",")) if sites else kits.sites
        if strangers := sorted(set(chosen) - set(kits.sites)):
            raise ValueError(f"--sites: {strangers[0]!r} has no kit; the sites are {', '.join(kits.sites)}")
        rounds = pluralize(experiment.rounds, "round", "rounds")
        console.print(f"{experiment.method.name}, {rounds}, {len(chosen)} sites → {path}", markup=False)
        terms = Terms(kits.federation, chosen, wait, at_least, visit, most_clients, most_pairs)
        with FlareTransport(kits) as transport:
            summary = federate_experiment(
                experiment,
                path,
                transport,
                terms,
                resume=resume,
                callbacks=terminal(console),
                page=public_page,
                tell=lambda text: console.print(text, markup=False),
            )
        print_result(summary, console)
        console.print(f"report: prefed report {shlex.quote(str(path))}", markup=False, soft_wrap=True)
        if console.quiet:
            typer.echo(f"{result_line(summary)} → {path}")
