"""``prefed init``, ``methods`` and ``data``: commands before a run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.arguments import AsJson, CellName, Overrides
from prefed.ui.cli.errors_and_interrupts import usage
from prefed.ui.cli.output import only_json, print_json


def init(
    method: Annotated[str, typer.Argument(help="The method's name; see `prefed methods`. Or FILE.py.")],
    out: Annotated[Path | None, typer.Option(help="The file to write (default: METHOD.toml).")] = None,
    example: Annotated[
        bool,
        typer.Option("--example", help="Write a short file, and four clients' pairs to try it on."),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of the model (default: DistilGPT-2 from the hub).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write a commented experiment file for a method, or a small example."""
    from prefed.config import method_kind
    from prefed.config.file import kind_of
    from prefed.config.new_file import (
        MODEL,
        Recipe,
        example_file,
        example_pairs,
        recipe,
        starting_file,
    )
    from prefed.core import files
    from prefed.core.plugins import allow, is_code, remember

    with usage():
        if is_code(method):
            allow(method)
            if (found := kind_of(method)) and found != "methods":
                remember(method)
                typer.echo(f"{method} is allowed on this machine. It has no method, so no file was written")
                return
        kind = method_kind(method)
        remember(method)
    path = out or Path(f"{kind.name}.toml")
    pairs = path.with_name("pairs.jsonl")
    first = recipe(kind, model) if model else Recipe()
    missing = "[data]" if model else "[data] and [model]"
    model = model or MODEL
    if example:
        texts = {pairs: example_pairs(), path: example_file(method, pairs.name, model, first)}
    else:
        texts = {path: starting_file(method, model, first)}
    for file in texts:
        if file.is_dir():
            raise ValueError(f"{file} is a folder; choose another --out")
        if file.exists() and not force:
            # The name of the pairs is fixed.
            other = "another --out" if file == path else "an --out in another folder"
            raise ValueError(f"{file} exists; choose {other}, or --force to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        files.write(file, text.encode())
    name = shlex.quote(str(path))
    if first.rounds is not None:
        chosen = f"objective {first.method['objective']} and {first.rounds} rounds"
        typer.echo(f"{chosen} for a chat model, which keep its answers whole on some 40 pairs per client")
    if first.width is not None:
        typer.echo(
            f"lr = {first.method['lr']:g} for a hidden size of {first.width}; `prefed sweep` compares rates"
        )
    if example:
        typer.echo(f"wrote {pairs} and {path}; next: `prefed data {name}`, then `prefed run {name}`")
    else:
        typer.echo(f"wrote {path}; next: set {missing} in it, then `prefed run {name}`")


def methods() -> None:
    """List the methods with their papers and their personal parts."""
    from rich import box
    from rich.table import Table

    from prefed.core.plugins import PluginError, entry_points
    from prefed.methods import METHODS
    from prefed.trackers.terminal import stdout_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("method", "what it is", "clients end with"):
        table.add_column(name, no_wrap=name == "method")
    table.add_column("source", overflow="fold", min_width=20)
    for name in METHODS:
        try:
            kind = METHODS[name]
            # Without a server, each client ends with its own model.
            models = "personal models" if kind.personal or kind.serverless else "one model"
            table.add_row(name, kind.title, models, kind.source)
        except PluginError as error:
            table.add_row(name, str(error))
    for name in entry_points("methods").keys() & METHODS.builtin.keys():
        for point in entry_points("methods")[name]:
            table.add_row(point.value, f"not called {name}, which is a method of prefed")
    stdout_console().print(table)


def data(
    file: Annotated[
        Path, typer.Argument(help="The experiment file (TOML), or a data file or folder.", show_default=False)
    ],
    overrides: Overrides = None,
    cell: CellName = None,
    show: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Also print what is trained on: N pairs per client, as tokens, with special tokens, "
            "truncations and what counts in the loss marked.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show each client's data before training."""
    from tempfile import TemporaryDirectory

    from prefed.config.experiment_table import load_cell
    from prefed.config.new_file import data_experiment
    from prefed.data.sources.folders import file_kind

    # Report errors in the file before the slow import of PyTorch.
    bare = cell is None and (file.is_dir() or file_kind(file) is not None)
    experiment = data_experiment(file, overrides or []) if bare else load_cell(file, cell, overrides or [])
    from prefed.data.statistics import dataset_statistics
    from prefed.runs.build import build_data, first_pairs
    from prefed.runs.data_notices import data_notices
    from prefed.trackers.terminal import Terminal, stdout_console
    from prefed.ui.pages.terminal import print_dataset_statistics, print_first_pairs

    with only_json(as_json), TemporaryDirectory(prefix="prefed-data-") as folder:
        dataset = build_data(experiment, Path(folder) / "data")
        statistics, (notes, warnings) = dataset_statistics(dataset), data_notices(dataset)
        shown = first_pairs(experiment, dataset, show) if show else []
    if as_json:
        pairs = (
            {"shown": [client.model_dump(mode="json", exclude_defaults=True) for client in shown]}
            if show
            else {}
        )
        print_json({**statistics.model_dump(mode="json"), "notes": notes, "warnings": warnings, **pairs})
    else:
        terminal = Terminal(stdout_console())
        if show:
            print_first_pairs(shown, terminal.console)
        print_dataset_statistics(statistics, terminal.console)
        for note in notes:
            terminal.on_note(note)
        for warning in warnings:
            terminal.on_warning(warning)
