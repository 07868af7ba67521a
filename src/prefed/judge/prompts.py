"""Prompts to respond to, and reference answers to them, read from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefed.data import DataError, Prompt
from prefed.data.errors import ErrorCollector, RowError
from prefed.data.sources.files import data_files, read_rows
from prefed.data.sources.pairs import parse_messages, value_at


@dataclass(frozen=True)
class PromptRow:
    """A prompt, and the other columns of its row.

    Attributes:
        row: its number in the file, from 1; in a folder the files follow one another.
        columns: every column as it was read.
    """

    row: int
    prompt: Prompt
    columns: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, str | float | int]:
        """The columns that hold a text or a number."""
        return {name: value for name, value in self.columns.items() if isinstance(value, str | float | int)}


def read_prompts(path: Path, column: str = "prompt") -> list[PromptRow]:
    """The prompts in a column: texts, or lists of messages.

    Args:
        path: JSON lines, JSON, CSV (each also .gz) or Parquet, or a folder of such files.
        column: may be a dotted path.

    Raises:
        DataError: there is no such file, it holds no row, or a row has no prompt in this column.
    """
    rows: list[PromptRow] = []
    errors = ErrorCollector(hint="Repair them, or name another column with --prompt-column.")
    for number, (row, location) in enumerate(_rows(path, errors), 1):
        try:
            prompt = value_at(row, column)
            if not isinstance(prompt, str):
                prompt = parse_messages(prompt, column)
            elif not prompt.strip():
                raise RowError(f"{column} is empty")
        except RowError as error:
            errors.add(location, str(error))
            continue
        rows.append(PromptRow(number, prompt, row))
    errors.raise_if_any()
    if not rows:
        raise DataError(f"{path}: there is no row in it")
    return rows


def read_references(path: Path, column: str, prompts: Sequence[PromptRow], prompt_column: str) -> list[str]:
    """The reference answer to each prompt, in a column of the row with the same number.

    Where the rows have the prompts' column too, it must hold the same prompts: an answer to another prompt is
    never compared.

    Raises:
        DataError: the file has another number of rows, a row without text in this column, or another prompt.
    """
    errors = ErrorCollector(hint="Repair them, or name another column with --column.")
    references = []
    for number, (row, location) in enumerate(_rows(path, errors), 1):
        try:
            text = value_at(row, column)
            if not isinstance(text, str):
                raise RowError(f"{column} is {type(text).__name__}, not text")
            if number <= len(prompts):
                _check_prompt(row, prompts[number - 1], prompt_column)
        except RowError as error:
            errors.add(location, str(error))
            continue
        references.append(text)
    errors.raise_if_any()
    if len(references) != len(prompts):
        raise DataError(
            f"{path}: {len(references):,} rows, and there are {len(prompts):,} prompts: row k is the "
            "reference answer to prompt k"
        )
    return references


def _rows(path: Path, errors: ErrorCollector) -> Any:
    for file in data_files(path):
        yield from read_rows(file, "utf-8", errors)


def _check_prompt(row: Mapping[str, Any], prompt: PromptRow, column: str) -> None:
    try:
        other = value_at(row, column)
    except RowError:
        return
    if other != value_at(prompt.columns, column):
        raise RowError(f"its {column} is not that of prompt {prompt.row}: row k answers prompt k")
