"""``prefed export RUN``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.arguments import (
    Aligned,
    LicenseName,
    Merge,
    OwnModel,
    RoundName,
    SelectorNumber,
    TasteName,
)
from prefed.ui.cli.errors import UsageError


def export(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    client: OwnModel = None,
    selector: SelectorNumber = None,
    aligned: Aligned = False,
    taste: TasteName = None,
    merge: Merge = False,
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

    check_choice(client, selector, aligned, taste, which)
    if license is not None and not card:
        raise UsageError("--license stands on a card: add --card")
    record = read_run(run)
    name = "shared" if selector is None else f"selector-{selector}"
    if client is not None:
        name = f"client-{client_file(client)}"
    if aligned:
        name = "aligned" if client is None else f"aligned-{client_file(client)}"
    if taste is not None:
        name = f"taste-{client_file(taste)}" + ("" if client is None else f"-{client_file(client)}")
    folder = name if which == "last" else f"best-{name}"
    path = out or run / ("merged" if merge else "adapters") / folder
    if out is None and not path.resolve().is_relative_to(run.resolve()):
        raise ValueError(f"{path} lies elsewhere: there is a link in {run}; choose an --out")
    base = Path(record.config["model"]["name"])
    check_folder(path, {"run": record.path, "run's base model": base}, replace=force or out is None)
    from prefed.runs.export import write_model

    best = which == "best"
    exported = write_model(
        run, path, client=client, selector=selector, taste=taste, aligned=aligned, merge=merge, best=best
    )
    if card:
        from prefed.core import files
        from prefed.ui.pages.card import CARD, model_card

        files.write(
            path / CARD, model_card(record.at_best() if best else record, exported, license=license).encode()
        )
    code = (f"  {line}" for line in exported.code(str(path)))
    typer.echo("\n".join([exported.heading(path), "to load it:", *code]))


def check_choice(
    client: str | None, selector: int | None, aligned: bool, taste: str | None, which: str
) -> None:
    """Refuse options that name two models.

    Raises:
        UsageError: they do not go together.
    """
    if client is not None and selector is not None:
        raise UsageError("give --client or --selector, not both")
    for option, given in (("--taste", taste is not None), ("--aligned", aligned)):
        if selector is not None and given:
            raise UsageError(f"give --selector or {option}, not both")
    if aligned and which == "best":
        raise UsageError("--aligned: the selectors of the last round aligned it; leave out --round best")


def check_folder(path: Path, places: Mapping[str, Path], *, replace: bool) -> None:
    """Refuse a folder that an export must not replace: it replaces nothing but an earlier export.

    Args:
        places: what it must not hold, by a word for it.

    Raises:
        ValueError: it must not be replaced.
    """
    from prefed.models.adapters import unexpected_files

    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file, not a folder; choose another --out")
    folder = path.resolve()
    for what, place in places.items():
        if place.is_dir() and folder in (place.resolve(), *place.resolve().parents):
            raise ValueError(f"{path} holds the {what}; choose another --out")
    foreign = unexpected_files(path)
    if foreign:
        raise ValueError(
            f"{path} holds {foreign[0]!r}, which no export writes: it is not replaced; choose another --out"
        )
    if any(path.iterdir()) and not replace:
        raise ValueError(f"{path} is there already; choose another --out, or --force to replace it")
