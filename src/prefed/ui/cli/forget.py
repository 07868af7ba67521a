"""``prefed forget``: remove a client, or single pairs, from a finished run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefed.ui.cli.arguments import AsJson, RunFolder, given_words
from prefed.ui.cli.errors import interruptible
from prefed.ui.cli.output import print_json, progress_console, terminal

if TYPE_CHECKING:
    from prefed.runs.forget import Plan


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
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without, only the plan is printed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget a client of a finished run, exactly: replay the run without it, and replace it.

    Prints first what descends from the client, and what cannot be reached.
    """
    words = ["prefed", "forget", str(run), *given_words(context, ("as_json",))]
    with interruptible(words, None, True, kept="the run is as before", again=()):
        from prefed.runs import forget as forgetting

        names, changes = client or [], overrides or []
        if not yes:
            planned = forgetting.plan(run, names, rows, changes)
            if as_json:
                print_json(asdict(planned))
            else:
                _print(planned)
                typer.echo("nothing was changed; to do it, add --yes")
            return
        console = progress_console(as_json)
        made = forgetting.forget(run, names, rows, overrides=changes, callbacks=terminal(console))
        if as_json:
            print_json({"certificates": [str(path) for path in made]})
        else:
            for path in made:
                typer.echo(f"certificate: {path}")


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
