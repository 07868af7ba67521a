"""Arguments that several commands take, and what is made of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

File = Annotated[Path, typer.Argument(help="The experiment file (TOML).", show_default=False)]
CellName = Annotated[
    str | None,
    typer.Option("--cell", metavar="NAME", help="Which cell, where the file is a table of experiments."),
]
RoundName = Annotated[
    Literal["last", "best"],
    typer.Option("--round", help="The run after its last round, or after the best by [stop]."),
]
AutoResume = Annotated[
    bool,
    typer.Option(
        "--auto-resume",
        help="Continue the run in the directory, or start one where there is none: one command for a "
        "scheduler to repeat.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. method.lr=1e-4."),
]
OwnModel = Annotated[
    str | None,
    typer.Option("--client", metavar="ID", help="A client's own model; left out: the one that all share."),
]
SelectorNumber = Annotated[
    int | None,
    typer.Option("--selector", min=0, metavar="N", help="One of several selectors, 0 for the first."),
]
Aligned = Annotated[
    bool,
    typer.Option(
        "--aligned",
        help="The model that was aligned with the selectors; one that takes a taste at that of --client or, "
        "left out, of all clients.",
    ),
]
TasteName = Annotated[
    str | None,
    typer.Option(
        "--taste",
        metavar="TASTE",
        help="The aligned model that takes a taste, at this one, as prefed generate --taste names it.",
    ),
]
Merge = Annotated[
    bool, typer.Option("--merge", help="A whole model with the adapter in its weights, not an adapter.")
]
LicenseName = Annotated[
    str | None,
    typer.Option(
        "--license",
        metavar="NAME",
        help="The model's licence on its card, as the hub names it; left out: that of the base model, where "
        "its own card is on this machine.",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="TOOL",
        help="Log the run to tensorboard, wandb, mlflow or trackio, as [track] to does; may be given again.",
    ),
]


def run_name(file: Path, cell: str | None) -> str:
    """What a run directory is named after: an experiment file, and its cell where it is a table.

    >>> run_name(Path("tables/imdb.toml"), "imdb-3/fedper")
    'imdb-imdb-3-fedper'
    """
    return f"{file.stem}-{cell.replace('/', '-')}" if cell else file.stem


def set_words(overrides: Sequence[str]) -> list[str]:
    """``--set`` and its values, as words of a command.

    >>> set_words(["seed=1", "method.lr=1e-4"])
    ['--set', 'seed=1', '--set', 'method.lr=1e-4']
    """
    return [word for text in overrides for word in ("--set", text)]


def given_words(context: typer.Context, without: Collection[str]) -> list[str]:
    """The options that a command was given, as words of a command.

    Args:
        without: names of options that are left out, as ``"out"``.
    """
    words = list[str]()
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if name in without or parameter.param_type_name != "option":
            continue
        value, flag = context.params[name], parameter.opts[0]
        if value is True:
            words.append(flag)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [word for each in values for word in (flag, str(each))]
    return words
