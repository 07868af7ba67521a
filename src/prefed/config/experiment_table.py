"""Tables of experiments in one TOML file, and the table of a grid over one experiment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from prefed.config.experiment import Experiment
from prefed.config.file import allow_code, make_absolute, override, read_toml
from prefed.config.settings import method_kind
from prefed.core.strict_settings import ConfigError, StrictModel
from prefed.core.text import did_you_mean, pluralize
from prefed.methods import METHODS

if TYPE_CHECKING:
    from prefed.config.grid import Combination

RATE = "{lr}"
"""A setting with this value takes the value of ``method.lr``."""
SHARED = ("base", "sets")
"""Keys merged with those of the extended table; other keys replace them."""
OWN = ("title", "rows")
"""Keys not inherited from the extended table."""

Judge = Literal["preference_accuracy", "reward_accuracy"]
"""Metrics that can select a rate or a combination."""
Printed = Annotated[str, StringConstraints(pattern=r"^-?\d+(\.\d+)?(±\d+(\.\d+)?)?$")]
"""A value as printed in a paper: ``"87.41±0.20"``."""


class Row(StrictModel):
    """A row of a table: one cell, or one per column."""

    text: str = Field("", description="the row's heading in the printed table; default: its name")
    sets: list[str] = Field([], description="names of sets, each overriding the base and the sets before it")
    set: dict[str, Any] = Field({}, description="settings that override the base, the column and the sets")
    rates: list[float] = Field([], description="learning rates of this row; default: the table's")
    separate: list[str] = Field(
        [],
        description="further rates of the method, e.g. `personal_lr`, selected one after the other once "
        "`lr` is, each from its own value and the values three times lower and higher",
    )
    paper: Printed | dict[str, Printed] = Field(
        {}, description="the paper's value; in a table with columns: one for each column"
    )
    clients: dict[str, Printed] | dict[str, dict[str, Printed]] = Field(
        {}, description="the paper's value for each client; in a table with columns: for each column"
    )


class Table(StrictModel):
    """A table of experiments.

    Its cells are named ``COLUMN/ROW``; in a table without columns each row is a cell.
    """

    title: str = Field(description="what the table shows")
    source: str = Field("", description="the paper and the number of its table")
    figures: str = Field("", description="the metric of the paper's values")
    base: dict[str, Any] = Field(
        description="the settings of an experiment, or the path of an experiment file"
    )
    sets: dict[str, dict[str, Any]] = Field({}, description="settings by name, for columns and rows to use")
    columns: dict[str, str] = Field({}, description="the sets that make the columns, each with its heading")
    rows: dict[str, Row] = Field(description="the rows by name", min_length=1)
    methods: dict[str, Row] = Field(
        {}, description="the row of a method that `prefed sweep --method` names; default: the base"
    )
    judge: Judge = Field(
        "preference_accuracy", description="the metric that selects a rate and is compared with the paper's"
    )
    seeds: list[int] = Field([42], min_length=1, description="seeds; the rate is selected with the first")
    rates: list[float] = Field(
        [], description="learning rates to try on validation pairs; default: each cell's own rate"
    )
    further: int = Field(
        0, ge=0, description="how many further values of each rate may be tried beyond those given"
    )

    @field_validator("rows", "columns")
    @classmethod
    def _named(cls, names: dict[str, Any]) -> dict[str, Any]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
                raise ValueError(
                    f"{name!r} becomes a folder's name: use only letters, digits, '.', '-', '_', '+'"
                )
        return names

    @model_validator(mode="after")
    def _consistent(self) -> Table:
        for name in self.columns:
            _check_known(f"columns.{name}", name, self.sets, "set")
        for where, rows in (("rows", self.rows), ("methods", self.methods)):
            for label, row in rows.items():
                for name in row.sets:
                    _check_known(f"{where}.{label}.sets", name, self.sets, "set")
        for label, row in self.rows.items():
            self._check_figures(label, row)
        return self

    def _check_figures(self, label: str, row: Row) -> None:
        for key, figures, column in (("paper", row.paper, str), ("clients", row.clients, dict)):
            values = list(figures.values()) if isinstance(figures, dict) else []
            if self.columns and (isinstance(figures, str) or not all(isinstance(v, column) for v in values)):
                raise ValueError(f"rows.{label}.{key}: the table has columns; write {key}.COLUMN")
            if not self.columns and any(key == "paper" or isinstance(value, dict) for value in values):
                raise ValueError(f"rows.{label}.{key}: the table has no columns; remove the column names")
            for name in figures if self.columns else ():
                _check_known(f"rows.{label}.{key}", name, self.columns, "column")

    def of_method(self, name: str) -> Table:
        """Return the table with a single row, for this method.

        The method keeps the keys of the base's ``[method]`` that it has.

        Args:
            name: built-in, installed, or code that was allowed.

        Raises:
            ConfigError: no method has this name.
        """
        try:
            known = method_kind(name).Settings.model_fields
        except ValueError as error:
            raise ConfigError(f"--method: {error}") from error
        label = name if name in list(METHODS) else re.sub(r"[^\w.+-]", ".", Path(name).name)
        settings = {key: value for key, value in self.base.get("method", {}).items() if key in known}
        base = {**self.base, "method": {**settings, "name": name}}
        return self.model_copy(update={"base": base, "rows": {label: self.methods.get(label, Row())}})

    def cells(self, path: Path) -> dict[str, Cell]:
        """The cells by name, row by row; ``path`` is the file of the table."""
        cells = {}
        for label, row in self.rows.items():
            for column in self.columns or [""]:
                name, text = label, row.text or f"`{label}`"
                parts = [self.base, *(self.sets[each] for each in row.sets), row.set]
                clients: Mapping[str, Any] = row.clients
                if column:
                    name, text = f"{column}/{label}", f"{self.columns[column]}, {text}"
                    parts.insert(1, self.sets[column])
                    clients = clients.get(column, {})
                paper = row.paper if isinstance(row.paper, str) else row.paper.get(column, "")
                rates = tuple(row.rates or self.rates)
                tree, separate = reduce(_merge, parts), tuple(row.separate)
                cells[name] = Cell(name, text, path, tree, rates, separate, paper, clients)
        return cells


@dataclass(frozen=True)
class Cell:
    """One experiment of a table.

    Attributes:
        text: heading in a printed table.
        path: the file of the table.
        tree: nested tables of the experiment.
        rates: learning rates to select from; empty for the experiment's own rate.
        separate: keys of ``[method]`` that are selected after the learning rate, in this order.
        paper: the paper's value, or ``""``.
        clients: the paper's value for each client.
        grid: overrides the experiment.
    """

    name: str
    text: str
    path: Path
    tree: Mapping[str, Any]
    rates: tuple[float, ...]
    separate: tuple[str, ...]
    paper: str
    clients: Mapping[str, Any]
    grid: Combination | None = None

    def experiment(self, *overrides: str, own: Sequence[str] = ()) -> Experiment:
        """Build the experiment with ``KEY=VALUE`` overrides as for :meth:`Experiment.load`.

        Args:
            own: overrides that the user did not give, and that messages do not attribute to ``--set``.

        Raises:
            ConfigError: the experiment is invalid; the message names the table and the cell.
        """
        tree, where = deepcopy(dict(self.tree)), str(self.path)
        if self.grid is None:
            where = f"{where}, cell {self.name}"
        origins = {
            keys: origin
            for keys, origin in override(tree, overrides, self.path.parent).items()
            if origin.removeprefix("--set ") not in own
        }
        values = [f"{key}={text}" for key, text in self.grid.texts.items()] if self.grid else []
        origins |= override(tree, values, self.path.parent, "--grid")
        method = tree.get("method", {})
        for table, key in _rates(tree):
            if "lr" not in method:
                raise ConfigError(f"{where}: {key} = {RATE!r} refers to method.lr, which is not set")
            table[key] = method["lr"]
        allow_code(tree, self.path)
        return Experiment.from_tables(tree, where, origins)


def load_table(path: Path) -> Table:
    """Read a table.

    Relative paths are looked up in the file's folder, then in the working folder.

    Raises:
        ConfigError: the file cannot be read or is not a valid table.
    """
    tree = _read(path, ())
    if "rows" not in tree and "method" in tree:
        raise ConfigError(f"{path} is one experiment, not a table; run it with `prefed run {path}`")
    from prefed.config.errors import validate

    return validate(Table, tree, str(path))


def load_cell(path: Path, cell: str | None, overrides: Sequence[str] = ()) -> Experiment:
    """Load an experiment from an experiment file or from a cell of a table.

    Args:
        cell: name of a cell; ``None`` for an experiment file.
        overrides: ``KEY=VALUE`` each.

    Raises:
        ConfigError: the file is invalid, is a table but ``cell`` is ``None``, or has no such cell.
    """
    if not {"rows", "extends"} & read_toml(path).keys():
        if cell is not None:
            raise ConfigError(f"{path} is one experiment, not a table; remove --cell {cell}")
        return Experiment.load(path, overrides)
    cells = load_table(path).cells(path)
    if cell is None:
        some = ", ".join([*cells][:4]) + (", …" if len(cells) > 4 else "")
        raise ConfigError(
            f"{path} is a table of {pluralize(len(cells), 'cell', 'cells')} ({some}); "
            "select one with --cell, or run all with `prefed sweep`"
        )
    if cell not in cells:
        listed = f" (cells: {', '.join(cells)})"
        raise ConfigError(f"{path}: no cell is called {cell!r}{did_you_mean(cell, cells) or listed}")
    return cells[cell].experiment(*overrides)


def _read(path: Path, before: tuple[Path, ...]) -> dict[str, Any]:
    """Read a table's file and merge it with the table that it extends.

    Args:
        before: the files that extend this one, to detect cycles.
    """
    if path.resolve() in before:
        raise ConfigError(f"{path}: extends itself, directly or through other tables")
    tree = read_toml(path)
    base = tree.get("base")
    if isinstance(base, str):
        tree["base"] = read_toml(path.parent / base)
        make_absolute(tree["base"], ((path.parent / base).parent, Path()))
    rows = [part for row in _tables(tree.get("rows")) for part in _tables(row, "set")]
    for part in (*_tables(tree, "base"), *_tables(tree.get("sets")), *rows):
        make_absolute(part, (path.parent, Path()))
    if (other := tree.pop("extends", None)) is None:
        return tree
    if not isinstance(other, str):
        raise ConfigError(f"{path}: extends = {other!r}: should be the path of another table")
    under = _read(path.parent / other, (*before, path.resolve()))
    under = {key: value for key, value in under.items() if key not in OWN}
    for key in SHARED:
        if isinstance(under.get(key), dict) and isinstance(tree.get(key), dict):
            tree[key] = _merge(under[key], tree[key])
    return {**under, **tree}


def _tables(tree: Any, *keys: str) -> Iterator[dict[str, Any]]:
    """The tables in ``tree``, or those at ``keys``. Values of other types are left to validation."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict) and key in (keys or tree):
            yield value


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; ``over`` takes precedence.

    >>> _merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}})
    {'a': {'b': 1, 'c': 4}, 'd': {'e': 5}}
    """
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _check_known(where: str, name: str, names: Iterable[str], kind: str) -> None:
    names = list(names)
    if name not in names:
        listed = f" ({kind}s: {', '.join(names)})" if names else ""
        raise ValueError(f"{where}: no {kind} is called {name!r}{did_you_mean(name, names) or listed}")


def _rates(tree: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The tables in ``tree`` with a value :data:`RATE`, and its key."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _rates(value)
        elif value == RATE:
            yield tree, key


def grid_table(
    path: Path,
    combinations: Sequence[Combination],
    seeds: Sequence[int],
    judge: Judge = "preference_accuracy",
) -> tuple[Table, list[Cell]]:
    """Make a table with one cell per combination of a grid over an experiment file; also return the cells.

    Raises:
        ConfigError: the file cannot be read, or is itself a table.
    """
    tree = read_toml(path)
    if {"rows", "extends"} & tree.keys():
        raise ConfigError(
            f"{path} is a table, with its own rows, rates and seeds; --grid and --seeds are for one "
            "experiment"
        )
    make_absolute(tree, (path.parent, Path()))
    rows = {each.name: Row() for each in combinations}
    table = Table(title=path.stem, base=tree, rows=rows, seeds=list(seeds), judge=judge)
    cells = table.cells(path)
    return table, [replace(cells[each.name], grid=each) for each in combinations]
