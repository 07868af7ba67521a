"""Arguments that several commands share, and their parsing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

File = Annotated[Path, typer.Argument(help="The experiment file (TOML).", show_default=False)]
CellName = Annotated[
    str | None,
    typer.Option("--cell", metavar="NAME", help="The cell to run, if the file is a table of experiments."),
]
RoundName = Annotated[
    Literal["last", "best"],
    typer.Option("--round", help="The state after the last round, or after the best one by [stop]."),
]
RunFolder = Annotated[Path, typer.Argument(help="The run directory.", show_default=False)]
RunOut = Annotated[
    Path | None,
    typer.Option("--out", help="The run directory (default: runs/FILE-METHOD-seedSEED)."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue the run in the directory; fails if there is none."),
]
AutoResume = Annotated[
    bool,
    typer.Option(
        "--auto-resume",
        help="Continue the run in the directory, or start one if there is none: a single command for a "
        "scheduler to repeat.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. method.lr=1e-4."),
]
OwnModel = Annotated[
    str | None,
    typer.Option("--client", metavar="ID", help="A client's own model (default: the shared model)."),
]
SelectorNumber = Annotated[
    int | None,
    typer.Option("--selector", min=0, metavar="N", help="One of several selectors, 0 for the first."),
]
Aligned = Annotated[
    bool,
    typer.Option(
        "--aligned",
        help="The model aligned with the selectors; if it takes a taste, at that of --client or, "
        "by default, of all clients.",
    ),
]
TasteName = Annotated[
    str | None,
    typer.Option(
        "--taste",
        metavar="TASTE",
        help="Export the aligned model at this taste; see prefed generate --taste.",
    ),
]
Merge = Annotated[
    bool, typer.Option("--merge", help="Export a full model with the adapter merged into its weights.")
]
LicenseName = Annotated[
    str | None,
    typer.Option(
        "--license",
        metavar="NAME",
        help="The licence on the model card, as the hub names it (default: the base model's, if "
        "its card is on this machine).",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="TOOL",
        help="Log the run to tensorboard, wandb, mlflow or trackio, like [track] to; repeatable.",
    ),
]


def run_name(file: Path, cell: str | None) -> str:
    """The name of a run directory: the experiment file, and the cell if the file is a table.

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
