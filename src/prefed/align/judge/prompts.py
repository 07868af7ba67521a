"""Prompts to respond to, and reference answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefed.data import Columns, DataError, Prompt, Source
from prefed.data.prompts import read_prompts


@dataclass(frozen=True)
class NumberedPrompt:
    """A prompt.

    Attributes:
        row: its number among the prompts of its file or folder, from 1.
        extra: the other columns that hold numbers or short texts.
    """

    row: int
    prompt: Prompt
    extra: dict[str, str | float | int] = field(default_factory=dict)


def numbered_prompts(
    path: Path, column: str | None = None, encoding: str = "utf-8", usual: str = "auto"
) -> list[NumberedPrompt]:
    """The prompts of a file, as :func:`prefed.data.prompts.read_prompts` reads them.

    Args:
        path: a file or a folder.
        column: of the prompts; left out: ``prompt``, or the prompt of preference pairs.
        encoding, usual: of text files, and the format of preference pairs.

    Raises:
        DataError: there is no such file, or a row has no prompt.
    """
    columns = None if column is None else Columns(prompt=column)
    source = Source(path=str(path), columns=columns)
    rows = read_prompts(source, encoding, usual, naming="--prompt-column NAME")
    return [NumberedPrompt(n, row.prompt, dict(row.extra)) for n, (row, _) in enumerate(rows, 1)]


def references(
    path: Path,
    column: str,
    prompts: Sequence[NumberedPrompt],
    prompt_column: str | None = None,
    encoding: str = "utf-8",
) -> list[str]:
    """The reference answer to each prompt: the answer of the row with the same number.

    A row names its prompt too, and it must be the same one: an answer to another prompt is never compared.

    Args:
        column: of the answers.
        prompt_column: of the prompts; left out: ``prompt``.
        encoding: of text files.

    Raises:
        DataError: a row has another prompt or no answer, or there are not as many rows as prompts.
    """
    source = Source(path=str(path), columns=Columns(prompt=prompt_column, chosen=column))
    answers = []
    for number, (row, location) in enumerate(read_prompts(source, encoding), 1):
        if number <= len(prompts) and row.prompt != prompts[number - 1].prompt:
            raise DataError(f"{location}: its prompt is not prompt {number}; row k is the answer to prompt k")
        if row.response is None:
            raise DataError(f"{location}: no answer in column {column!r}; name another with --column")
        answers.append(row.response)
    if len(answers) != len(prompts):
        raise DataError(
            f"{path}: {len(answers):,} rows, and there are {len(prompts):,} prompts; row k is the answer to "
            "prompt k"
        )
    return answers
