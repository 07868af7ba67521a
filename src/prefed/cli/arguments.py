"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(help="The experiment file (TOML).", show_default=False)]
CellName = Annotated[
    str | None,
    typer.Option("--cell", metavar="NAME", help="Which cell, where the file is a table of experiments."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Put VALUE in the place of a key, e.g. method.lr=1e-4."),
]
