"""``prefed push RUN REPO``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from prefed.cli.arguments import LicenseName
from prefed.cli.errors import UsageError


def push(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    repo: Annotated[str, typer.Argument(help="The repository, OWNER/NAME.", show_default=False)],
    client: Annotated[
        str | None, typer.Option(metavar="ID", help="A client's own model; left out: the one that all share.")
    ] = None,
    selector: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="One of several selectors, 0 for the first.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="A whole model with the adapter in its weights, not an adapter.")
    ] = False,
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
) -> None:
    """Publish a model of a finished run on the Hugging Face hub, with a model card."""
    if client is not None and selector is not None:
        raise UsageError("give --client or --selector, not both")
    from prefed.runs.publish import check_target
    from prefed.runs.record import read_run

    check_target(repo)
    record = read_run(run)
    from prefed import files
    from prefed.report.card import CARD, hub_name, model_card
    from prefed.runs.export import write_model
    from prefed.runs.publish import name_base, publish

    name = record.config["model"]["name"]
    known = base or hub_name(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        exported = write_model(run, folder, client=client, selector=selector, merge=merge)
        name_base(folder, known or Path(name).name)
        card = model_card(record, exported, repo=repo, base=known, license=license)
        files.write(folder / CARD, card.encode())
        whose = "the model that all clients share" if selector is None else f"selector {selector}"
        if client is not None:
            whose = (
                f"the own model of client {client!r}: it was trained on its pairs and may repeat them; "
                "publish it only if this client agrees"
            )
        readers = "everybody may read it" if public else "private"
        typer.echo(f"publishing {whose}\nto {repo} ({readers}): {', '.join(sorted(_names(folder)))}")
        if known is None:
            typer.echo(
                f"its base model is a folder of this machine, {name}; on the hub? --base NAME", err=True
            )
        typer.echo(f"published: {publish(folder, repo, public=public, update=update)}")


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
