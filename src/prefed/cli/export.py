"""``prefed export RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefed.cli.arguments import LicenseName, RoundName
from prefed.cli.errors import UsageError

if TYPE_CHECKING:
    from prefed.runs.record import RunRecord


def export(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    client: Annotated[
        str | None, typer.Option(metavar="ID", help="A client's own model; left out: the one that all share.")
    ] = None,
    selector: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="One of several selectors, 0 for the first."),
    ] = None,
    taste: Annotated[
        str | None,
        typer.Option(
            metavar="TASTE",
            help="The aligned model that takes a taste, at this one, as prefed generate --taste names it.",
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="A whole model with the adapter in its weights, not an adapter.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder; left out: one in RUN/adapters or RUN/merged."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the folder if it is an earlier export.")
    ] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Write a model card beside the model, for the Hugging Face hub.")
    ] = False,
    license: LicenseName = None,
    which: RoundName = "last",
) -> None:
    """Write a model of a finished run as a folder that PEFT, or transformers alone, loads."""
    from prefed.runs.record import read_run
    from prefed.store import client_file

    if client is not None and selector is not None:
        raise UsageError("give --client or --selector, not both")
    if selector is not None and taste is not None:
        raise UsageError("give --selector or --taste, not both")
    if license is not None and not card:
        raise UsageError("--license stands on a card: add --card")
    record = read_run(run)
    name = "shared" if selector is None else f"selector-{selector}"
    if client is not None:
        name = f"client-{client_file(client)}"
    if taste is not None:
        name = f"taste-{client_file(taste)}" + ("" if client is None else f"-{client_file(client)}")
    folder = name if which == "last" else f"best-{name}"
    path = out or run / ("merged" if merge else "adapters") / folder
    _check(path, record, replace=force or out is None)
    from prefed.runs.export import write_model

    best = which == "best"
    exported = write_model(run, path, client=client, selector=selector, taste=taste, merge=merge, best=best)
    if card:
        from prefed import files
        from prefed.report.card import CARD, model_card

        files.write(
            path / CARD, model_card(record.at_best() if best else record, exported, license=license).encode()
        )
    code = (f"  {line}" for line in exported.code(str(path)))
    typer.echo("\n".join([exported.heading(path), "to load it:", *code]))


def _check(path: Path, record: RunRecord, *, replace: bool) -> None:
    """Refuse a folder that an export must not replace: it replaces nothing but an earlier export."""
    from prefed.models.adapters import unexpected_files

    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file, not a folder; choose another --out")
    folder, base = path.resolve(), Path(record.config["model"]["name"])
    for what, place in (("run", record.path), ("run's base model", base)):
        if place.is_dir() and folder in (place.resolve(), *place.resolve().parents):
            raise ValueError(f"{path} holds the {what}; choose another --out")
    foreign = unexpected_files(path)
    if foreign:
        raise ValueError(
            f"{path} holds {foreign[0]!r}, which no export writes: it is not replaced; choose another --out"
        )
    if any(path.iterdir()) and not replace:
        raise ValueError(f"{path} is there already; choose another --out, or --force to replace it")
