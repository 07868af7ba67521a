"""Reads prompts, and responses to them where the rows have any. No preference is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefed.data.config import Columns, Source
from prefed.data.errors import DataError, ErrorCollector, RowError, RowLocation
from prefed.data.record import Message, Prompt
from prefed.data.sources import format_setting, read_rows, source_digests
from prefed.data.sources.files import sha256_of
from prefed.data.sources.formats import POST_FIELDS, Format, detect_format, get_format
from prefed.data.sources.pairs import extra_columns, parse_messages, split_prompt, value_at

RESPONSES = ("response", "completion", "output", "chosen")
"""The columns that may hold the response beside a column ``prompt``; the first one there counts."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt as a row has it.

    Attributes:
        prompt: text, or the messages of a conversation up to the response.
        response: a response to it, such as a person's; ``None`` if the row has none.
        extra: the other columns that hold numbers or short texts, by name.
    """

    prompt: Prompt
    response: str | None = None
    extra: Mapping[str, str | float | int] = field(default_factory=dict)


def read_prompts(
    source: Source,
    encoding: str = "utf-8",
    usual: str = "auto",
    naming: str = 'columns = {prompt = "…"}',
) -> Iterator[tuple[PromptRow, RowLocation]]:
    """The prompts of a source, in its order.

    - A ``.txt`` file has one prompt in each line.
    - With ``columns``, ``columns.prompt`` is the prompt and ``columns.chosen`` the response, if it is there.
    - A row with a column ``prompt`` and no rejected response: see :data:`RESPONSES`.
    - Any other row is one of a preference set: its prompt, and its chosen response.

    Args:
        encoding: of text files where the source names none.
        usual: the format of preference sets where the source names none, such as ``data.format``: then their
            prompts are worded as the clients' are.
        naming: how a user names the column, for messages.

    Raises:
        DataError: the source cannot be read, or has no row or rows without a prompt; it names them.
    """
    errors = ErrorCollector(hint=f"Each row needs a prompt; otherwise name the column: {naming}.")
    path, count = Path(source.path).expanduser(), 0
    form = None if source.columns else format_setting(source)
    others = None if usual == "auto" else get_format(usual)
    rows = _lines(path, source.encoding or encoding) if _is_text(path) else None
    for row, location in rows or read_rows(source, encoding, "train", form or others, errors):
        try:
            for parsed in _parse(row, source.columns, form, others):
                _check(parsed)
                yield parsed, location
            count += 1
        except ValueError as error:
            errors.add(location, str(error))
        except (TypeError, AttributeError) as error:
            # A value of a type that the format does not expect.
            errors.add(location, f"malformed: {error}")
    errors.raise_if_any()
    if not count:
        raise DataError(f"{source.path} contains no prompts")


def prompt_digests(source: Source) -> dict[str, str]:
    """The content of a source: its file names with their SHA-256, or the hub name with its options."""
    path = Path(source.path).expanduser()
    return {path.name: sha256_of(path)} if _is_text(path) else source_digests(source)


def plain_prompt(prompt: Prompt) -> str | list[dict[str, str]]:
    """A prompt as JSON has it."""
    if isinstance(prompt, str):
        return prompt
    return [{"role": turn.role, "content": turn.content} for turn in prompt]


def parse_prompt(plain: Any) -> Prompt:
    """The prompt that :func:`plain_prompt` made ``plain`` of."""
    return plain if isinstance(plain, str) else tuple(Message(**turn) for turn in plain)


def _parse(
    row: Mapping[str, Any], columns: Columns | None, form: Format | None, others: Format | None
) -> list[PromptRow]:
    """The prompts of a row. It has none where a preference set says that neither response is better."""
    if columns is not None:
        name = columns.prompt or "prompt"
        return [_plain_row(row, value_at(row, name), name, row.get(columns.chosen), columns.chosen)]
    if form is None and "prompt" in row and row.get("rejected") is None:
        column = next((name for name in RESPONSES if row.get(name) is not None), "")
        return [_plain_row(row, row["prompt"], "prompt", row.get(column), column)]
    found: dict[Prompt, PromptRow] = {}
    for raw in (form or others or detect_format(row)).pairs(row):
        if raw is not None:
            prompt, chosen, _, _ = split_prompt(raw)
            found.setdefault(prompt, PromptRow(prompt, chosen, raw.extra))
    return list(found.values())


def _plain_row(row: Mapping[str, Any], value: Any, name: str, response: Any, column: str) -> PromptRow:
    prompt: Prompt = value if isinstance(value, str) else parse_messages(value, name)
    if response is not None and not isinstance(response, str):
        turns = parse_messages(response, column)
        if len(turns) != 1:
            raise RowError(f"{column} has {len(turns)} messages; a response must be a single one")
        response = turns[0].content
    # A selector's template shows a post whole, however long it is.
    post = {name: row[name] for name in POST_FIELDS if isinstance(row.get(name), str)}
    return PromptRow(prompt, response, {**extra_columns(row, (name, column)), **post})


def _check(row: PromptRow) -> None:
    texts = [row.prompt] if isinstance(row.prompt, str) else [turn.content for turn in row.prompt]
    if not any(text.strip() for text in texts):
        raise RowError("the prompt is blank")
    for text in (*texts, row.response or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(f"half a surrogate pair at character {error.start + 1}") from None


def _is_text(path: Path) -> bool:
    return path.suffix.lower() == ".txt" and path.is_file()


def _lines(path: Path, encoding: str) -> Iterator[tuple[Mapping[str, Any], RowLocation]]:
    try:
        lines = path.read_text(encoding).removeprefix("\ufeff").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not {encoding} text ({error.reason}); save it as {encoding}, or set its encoding"
        ) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield {"prompt": line}, RowLocation(str(path), number)
