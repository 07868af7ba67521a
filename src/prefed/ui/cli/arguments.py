"""Arguments shared by several commands."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import typer

File = Annotated[Path, typer.Argument(help="The experiment file (TOML).", show_default=False)]
CellName = Annotated[
    str | None,
    typer.Option("--cell", metavar="NAME", help="The cell to use, if the file is a table of experiments."),
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
        help="The model aligned with the selectors. If it takes a taste: that of --client (default: the "
        "mean over clients).",
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
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Maximum number of tokens in a response.")]
Temperature = Annotated[
    float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most probable token.")
]
TopP = Annotated[
    float, typer.Option(help="Sample from the most probable tokens with this total probability.")
]
TopK = Annotated[int, typer.Option(min=0, help="Sample from this many most probable tokens; 0: all.")]
PromptColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The column of the prompts (default: prompt, or that of preference pairs)."
    ),
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Use prompts without a chat template, even if the run's data are dialogues."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")
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
    """The name of a run directory, from the experiment file and the cell.

    >>> run_name(Path("tables/imdb.toml"), "imdb-3/fedper")
    'imdb-imdb-3-fedper'
    """
    return f"{file.stem}-{cell.replace('/', '-')}" if cell else file.stem


def given_words(context: typer.Context, without: Collection[str]) -> list[str]:
    """The options given on the command line, as words.

    Args:
        without: names of parameters to leave out, e.g. ``"out"``.
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
