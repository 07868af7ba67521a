"""``prefed export RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefed.cli.errors import reported

if TYPE_CHECKING:
    from prefed.runs.record import RunRecord

IN_ADAPTER = frozenset({"lora", "personal_lora", "gate", "residual"})
"""Parts of a model that an adapter folder holds; a residual is refused where it is not zero."""

SOURCES = {"PeftModel": "peft", "AutoModelForCausalLM": "transformers", "load_client": "prefed.models"}


def export(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    client: Annotated[
        str | None, typer.Option(metavar="ID", help="A client's own model; left out: the one that all share.")
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
) -> None:
    """Write a model of a finished run as a folder that PEFT, or transformers alone, loads."""
    with reported():
        from prefed.runs.record import read_run
        from prefed.store import client_file

        record = read_run(run)
        path = out or run / ("merged" if merge else "adapters") / (
            "shared" if client is None else f"client-{client_file(client)}"
        )
        _check(path, record, replace=force or out is None)
        from prefed.core import Owner
        from prefed.models import save_adapter, save_client, save_merged
        from prefed.runs.loaded import load_run
        from prefed.trackers.terminal import quiet

        quiet()
        opened = load_run(run)
        tensors = opened.published_model if client is None else opened.model(client)
        # Personal parts of the model that all share are as they started: they change nothing.
        names = opened.method.ownership.names(Owner.SHARED) if client is None else tensors.layout.names
        more = sorted({tensors.layout[name].part for name in names} - IN_ADAPTER)
        model = opened.experiment.model
        revision = "" if model.revision is None else f"revision={model.revision!r}, "
        base = f"{model.name!r}, {revision}dtype={model.dtype!r}"
        if merge:
            save_merged(opened.backbone, tensors, path)
            told = ["model", "", f"model = AutoModelForCausalLM.from_pretrained({str(path)!r})"]
        elif more:
            save_client(opened.backbone, tensors, path)
            told = ["model", f" (adapter, {', '.join(more)})", f"model = load_client({str(path)!r}).model"]
        else:
            save_adapter(opened.backbone, tensors, path)
            told = ["adapter", "", f"base = AutoModelForCausalLM.from_pretrained({base})"]
            told.append(f"model = PeftModel.from_pretrained(base, {str(path)!r})")
        typer.echo(f"{told[0]}: {path}{told[1]}\nto load it:")
        for name, package in SOURCES.items():
            if any(name in line for line in told[2:]):
                typer.echo(f"  from {package} import {name}")
        for line in told[2:]:
            typer.echo(f"  {line}")


def _check(path: Path, record: RunRecord, *, replace: bool) -> None:
    """Refuse what an export must not take the place of: only an earlier one, or nothing at all, may go."""
    from prefed.models.adapters import unexpected_files

    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file, not a folder; choose another --out")
    folder, base = path.resolve(), Path(record.config["model"]["name"])
    for kept, what in ((record.path, "run"), *([(base, "run's base model")] if base.is_dir() else [])):
        if folder in (kept.resolve(), *kept.resolve().parents):
            raise ValueError(f"{path} holds the {what}; choose another --out")
    found = unexpected_files(path)
    if found:
        raise ValueError(
            f"{path} holds {found[0]!r}, which no export writes: it is not replaced; choose another --out"
        )
    if any(path.iterdir()) and not replace:
        raise ValueError(f"{path} is there already; choose another --out, or --force to replace it")
