"""``prefed forget``: remove a client, or single pairs, from a finished run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefed.ui.cli.arguments import AsJson, Fields, RunFolder, given_words
from prefed.ui.cli.errors_and_interrupts import UsageError, interruptible
from prefed.ui.cli.output import print_json, print_progress, progress_console, terminal

if TYPE_CHECKING:
    from prefed.core import Callback
    from prefed.runs.descendants import Plan


def forget(
    context: typer.Context,
    run: RunFolder,
    client: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The client; again for each other name that it has."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Forget only these pairs of the client: a file in the format of the run's data.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=PATH", help="Where data or a model of the run are now."),
    ] = None,
    hub: Annotated[
        Path | None, typer.Option(help="For a run over sites, with --yes: the hub's folder.")
    ] = None,
    *,
    terms: Annotated[
        dict[str, Any],
        Fields(
            "networks.federation.config:Terms",
            "wait at_least visit",
            {
                "wait": "For a run over sites: seconds to wait for all to connect.",
                "at_least": "For a run over sites: replay it after --wait with at least so many.",
                "visit": "For a run over sites: timeout of a site's task in seconds.",
            },
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without, only the plan is printed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget a client of a finished run, exactly: replay the run without it, and replace it.

    Prints first what descends from the client, and what cannot be reached.
    """
    words = ["prefed", "forget", str(run), *given_words(context, ("as_json",))]
    with interruptible(words, None, True, kept="the run is as before", again=()):
        names, changes = client or [], overrides or []
        over_sites = hub is not None or (run / "federation.json").exists()
        if over_sites and (rows or changes):
            raise UsageError("--rows and --set are for runs in one place: the hub has no pairs")
        if not yes:
            planned = _plan(run, names, rows, changes, over_sites=over_sites)
            if as_json:
                print_json(asdict(planned))
            else:
                _print(planned)
                typer.echo("nothing was changed; to do it, add --yes")
            return
        console = progress_console(as_json)
        if over_sites:
            made = _over_sites(run, names, hub, terms, terminal(console))
        else:
            from prefed.runs.forget import forget as forget_clients

            made = forget_clients(run, names, rows, overrides=changes, callbacks=terminal(console))
        if as_json:
            print_json({"certificates": [str(path) for path in made]})
        else:
            for path in made:
                typer.echo(f"certificate: {path}")


def _plan(run: Path, names: list[str], rows: str | None, changes: list[str], *, over_sites: bool) -> Plan:
    if over_sites:
        from prefed.networks.federation import forget as over

        return over.plan(run, names)
    from prefed.runs import forget as here

    return here.plan(run, names, rows, changes)


def _over_sites(
    run: Path,
    names: list[str],
    hub: Path | None,
    terms: dict[str, Any],
    callbacks: list[Callback],
) -> list[Path]:
    if hub is None:
        raise UsageError(f"{run} ran over sites, which replay it: --yes requires --hub, the hub's folder")
    from prefed.networks.federation.flare import check_installed

    check_installed()
    from prefed.networks.federation.config import Terms
    from prefed.networks.federation.flare.kits import Kits
    from prefed.networks.federation.flare.transport import FlareTransport
    from prefed.networks.federation.forget import forget as forget_clients

    kits = Kits.open(hub)
    with FlareTransport(kits) as transport:
        asked = Terms(kits.federation, kits.sites, **terms)
        return forget_clients(run, names, transport, asked, callbacks=callbacks, report=print_progress)


def _print(planned: Plan) -> None:
    from prefed.core.text import listed, pluralize, printable, size

    who = listed(planned.clients) if planned.clients else "pairs"
    train, validation, test = planned.pairs
    held = f"{pluralize(train, 'training pair', 'training pairs')}, {validation} validation, {test} test"
    if planned.digests:
        held = pluralize(len(planned.digests), "pair", "pairs")
    start = f"from round {planned.after + 1}" if planned.after else "from the start"
    lines = [
        f"{planned.run}: forget {who} ({held})",
        f"replay {pluralize(planned.rounds, 'round', 'rounds')} {start}"
        + (f": {planned.why}" if planned.why else ""),
        f"the result is {planned.guarantee}",
        "",
    ]
    width = max(len(each.where) for each in planned.descendants)
    for each in planned.descendants:
        note = f"  {each.note}" if each.note else ""
        amount = size(each.bytes) if each.bytes else ""
        lines.append(f"{each.action:11}  {each.where:{width}}  {amount:>9}{note}".rstrip())
    if planned.similar:
        lines += ["", f"may be the same client: {listed(planned.similar)}; add --client for each that is"]
    typer.echo("\n".join(map(printable, lines)))
