"""``prefed push RUN REPO``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from prefed.ui.cli.export import check_choice

if TYPE_CHECKING:
    from prefed.runs.export import Export


def push(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    repo: Annotated[str, typer.Argument(help="The repository, OWNER/NAME.", show_default=False)],
    client: OwnModel = None,
    selector: SelectorNumber = None,
    aligned: Aligned = False,
    taste: TasteName = None,
    merge: Merge = False,
    public: Annotated[
        bool, typer.Option("--public", help="Everybody may read it; left out: a private repository.")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="The repository is there; replace the model in it.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The base model's name on the hub, if the run has it in a folder."),
    ] = None,
    license: LicenseName = None,
    which: RoundName = "last",
) -> None:
    """Publish a model of a finished run on the Hugging Face hub, with a model card."""
    check_choice(client, selector, aligned, taste, which)
    from prefed.runs.export import check_target
    from prefed.runs.record import read_run

    check_target(repo)
    record = read_run(run)
    from prefed.core import files
    from prefed.runs.export import name_base, publish, write_model
    from prefed.ui.pages.card import CARD, hub_name, model_card

    best = which == "best"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        exported = write_model(
            run,
            folder,
            client=client,
            selector=selector,
            taste=taste,
            aligned=aligned,
            merge=merge,
            best=best,
        )
        name = exported.model.name
        known = base or hub_name(name)
        name_base(folder, known or Path(name).name)
        of = record.at_best() if best else record
        card = model_card(of, exported, repo=repo, base=known, license=license)
        files.write(folder / CARD, card.encode())
        readers = "everybody may read it" if public else "private"
        typer.echo(
            f"publishing {_whose(exported)}\nto {repo} ({readers}): {', '.join(sorted(_names(folder)))}"
        )
        if known is None:
            typer.echo(
                f"its base model is a folder of this machine, {name}; on the hub? --base NAME", err=True
            )
        typer.echo(f"published: {publish(folder, repo, public=public, update=update)}")


def _whose(exported: Export) -> str:
    """Which model it is, and who must agree."""
    if exported.aligned and exported.client is None and exported.taste in (None, "population"):
        return "the aligned model"
    if exported.aligned:
        of = (
            exported.taste
            if exported.client in (None, exported.taste)
            else f"{exported.taste} of {exported.client}"
        )
        return (
            f"the aligned model at the taste {of!r}: if that is a client's, it answers as this client likes; "
            "publish it only if this client agrees"
        )
    if exported.client is not None:
        return (
            f"the own model of client {exported.client!r}: it was trained on its pairs and may repeat them; "
            "publish it only if this client agrees"
        )
    return exported.selector.replace("-", " ") if exported.selector else "the model that all clients share"


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
