"""``prefed export RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from prefed.runs.record import RunRecord

IN_ADAPTER = frozenset({"lora", "personal_lora", "gate", "residual"})
"""Parts of a model that an adapter folder can hold; a residual is refused unless it is zero."""


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
) -> None:
    """Write a model of a finished run as a folder that PEFT, or transformers alone, loads."""
    from prefed.runs.record import read_run
    from prefed.store import client_file

    if client is not None and selector is not None:
        raise ValueError("give --client or --selector, not both")
    if selector is not None and taste is not None:
        raise ValueError("give --selector or --taste, not both")
    record = read_run(run)
    name = "shared" if selector is None else f"selector-{selector}"
    if client is not None:
        name = f"client-{client_file(client)}"
    if taste is not None:
        name = f"taste-{client_file(taste)}" + ("" if client is None else f"-{client_file(client)}")
    path = out or run / ("merged" if merge else "adapters") / name
    _check(path, record, replace=force or out is None)
    from prefed.core import Owner
    from prefed.models import save_adapter, save_client, save_merged
    from prefed.models.notices import silence_transformers
    from prefed.runs.loaded import load_run
    from prefed.runs.taste_names import needs_pairs

    silence_transformers()
    loaded_run = load_run(run, data=needs_pairs(taste))
    backbone, more = loaded_run.backbone, list[str]()
    if taste is not None:
        from prefed.runs.texts import Models
        from prefed.train.generation import Sampling

        models = Models(loaded_run, Sampling())
        side = models.own(client, taste)
        backbone, tensors = side.backbone, side.tensors
        if merge:
            save_merged(backbone, tensors, path, side.taste)
        else:
            models.save_adapter(side, path)
    else:
        if client is not None:
            tensors = loaded_run.model(client)
        else:
            tensors = loaded_run.published_model if selector is None else loaded_run.selector(name)
        # In the model that all share, personal parts are untouched and change nothing.
        names = loaded_run.method.ownership.names(Owner.SHARED) if client is None else tensors.layout.names
        more = sorted({tensors.layout[name].part for name in names} - IN_ADAPTER)
        (save_merged if merge else save_client if more else save_adapter)(backbone, tensors, path)
    model = backbone.config
    revision = "" if model.revision is None else f"revision={model.revision!r}, "
    base = f"{model.name!r}, {revision}dtype={model.dtype!r}"
    folder = repr(str(path))
    if merge:
        lines = [f"model: {path}", "to load it:"]
        lines.append("  from transformers import AutoModelForCausalLM")
        lines.append(f"  model = AutoModelForCausalLM.from_pretrained({folder})")
    elif more:
        held = more if "weights" in more else ["adapter", *more]
        lines = [f"model: {path} ({', '.join(held)})", "to load it:"]
        lines.append("  from prefed.models import load_client")
        lines.append(f"  model = load_client({folder}).model")
    else:
        lines = [f"adapter: {path}", "to load it:"]
        lines.append("  from peft import PeftModel")
        lines.append("  from transformers import AutoModelForCausalLM")
        lines.append(f"  base = AutoModelForCausalLM.from_pretrained({base})")
        lines.append(f"  model = PeftModel.from_pretrained(base, {folder})")
    typer.echo("\n".join(lines))


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
