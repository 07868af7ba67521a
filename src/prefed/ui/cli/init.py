"""``prefed init METHOD``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.errors import usage


def init(
    method: Annotated[str, typer.Argument(help="A method's name, see `prefed methods`.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; left out: METHOD.toml.")] = None,
    example: Annotated[
        bool,
        typer.Option("--example", help="A short file, and beside it four clients' pairs to try it on."),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of the model; left out: DistilGPT-2 from the hub.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a commented starting file for a method, or a small example that runs."""
    from prefed.config import method_kind
    from prefed.config.init import MODEL, example_file, example_pairs, starting_file
    from prefed.core import files

    with usage():
        method_kind(method)
    path = out or Path(f"{method}.toml")
    pairs = path.with_name("pairs.jsonl")
    model = model or MODEL
    if example:
        texts = {pairs: example_pairs(), path: example_file(method, pairs.name, model)}
    else:
        texts = {path: starting_file(method, model)}
    for file in texts:
        if file.is_dir():
            raise ValueError(f"{file} is a folder; choose another --out")
        if file.exists() and not force:
            # The pairs have one name, whatever the experiment file is called.
            other = "another --out" if file == path else "an --out in another folder"
            raise ValueError(f"{file} exists; choose {other}, or --force to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        files.write(file, text.encode())
    name = shlex.quote(str(path))
    if example:
        typer.echo(f"wrote {pairs} and {path}; next: `prefed data {name}`, then `prefed run {name}`")
    else:
        typer.echo(f"wrote {path}; next: set [data] and [model] in it, then `prefed run {name}`")
