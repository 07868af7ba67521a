"""Read prompts, and responses if the rows have any. No preferences are needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from prefed.data.config import Columns, Source
from prefed.data.errors import DataError, ErrorCollector, RowError, RowLocation
from prefed.data.record import Prompt, check_unicode, prompt_texts
from prefed.data.sources import format_setting, read_rows, source_digests
from prefed.data.sources.files import peek, sha256_of, text_lines
from prefed.data.sources.formats import POST_FIELDS, Format, detect_format, get_format, is_known
from prefed.data.sources.pairs import (
    extra_columns,
    messages_or_text,
    parse_label,
    parse_messages,
    read_prompt,
    split_prompt,
    usual_columns,
)
from prefed.data.sources.unread import TrackedRow, check_unread, unused_text

_log = logging.getLogger(__name__)

RESPONSES = ("response", "completion", "output", "chosen")
"""Columns that may contain the response to a column ``prompt``, in order of precedence."""


@dataclass(frozen=True)
class PromptRow:
    """The prompt of a row.

    Attributes:
        prompt: text, or the messages of a conversation up to the response.
        response: a response to the prompt; ``None`` if the row has none.
        extra: other columns with numbers or short texts, by name.
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
    """Yield the prompts of a source, in order.

    - A ``.txt`` file has one prompt per line.
    - With ``columns``, these name the prompt and system message, and ``columns.chosen`` is the response, if
      present.
    - A row with a prompt and no rejected response may have one of the columns :data:`RESPONSES`. A completion
      with a thumb down is no response.
    - Any other row is a preference pair, which yields its prompt and its chosen response.

    Args:
        source: a file, a folder or a hub dataset.
        encoding: default encoding of text files.
        usual: default format of preference pairs, such as ``data.format``, so that prompts have the same
            wording as those of the clients.
        naming: setting that names the column, for error messages.

    Raises:
        DataError: the source cannot be read or has no rows, or rows have no prompt; the message names them.
    """
    errors = ErrorCollector(hint=f"Give each row a prompt, or name the column of the prompt: {naming}.")
    path, count, unread = Path(source.path).expanduser(), 0, dict[str, None]()
    form = None if source.columns else format_setting(source)
    others = None if usual == "auto" else get_format(usual)
    rows = _lines(path, source.encoding or encoding) if _is_text(path) else None
    remedy = f"name the columns of the prompt: {naming}"
    try:
        for plain, location in rows or read_rows(source, encoding, "train", form or others, errors):
            row, found = TrackedRow(plain), list[PromptRow]()
            with errors.at(location):
                parsed = _parse(row, source.columns, form, others)
                for each in parsed:
                    _check(each)
                if source.columns is not None:
                    unread |= dict.fromkeys(name for name, _ in row.unread())
                elif parsed:
                    seen = [each.prompt for each in parsed], [each.response or "" for each in parsed]
                    unread |= dict.fromkeys(check_unread(row, *seen, remedy=remedy))
                found = parsed
            for each in found:
                yield each, location
            count += bool(found)
    finally:
        _report_unread(source.path, tuple(name for name in unread if name not in POST_FIELDS))
    errors.raise_if_any()
    if not count:
        raise DataError(f"{source.path} contains no prompts")


@cache
def _report_unread(path: str, columns: tuple[str, ...]) -> None:
    """Log the columns that were not used; once, although files are also read to check them."""
    if columns:
        _log.warning("%s: %s", path, unused_text(columns))


def prompt_digests(source: Source) -> dict[str, str]:
    """Identify the content of a source: file name → SHA-256, or hub name → its options."""
    path = Path(source.path).expanduser()
    return {path.name: sha256_of(path)} if _is_text(path) else source_digests(source)


def _parse(
    row: Mapping[str, Any], columns: Columns | None, form: Format | None, others: Format | None
) -> list[PromptRow]:
    """Return the prompts of a row. A tie of a preference dataset has none."""
    usual = usual_columns(row)
    if columns is not None:
        if columns.prompt is None:
            names = {"prompt": usual.prompt or "prompt", "system": columns.system or usual.system}
            columns = columns.model_copy(update=names)
        return [_plain_row(row, columns, columns.chosen)]
    if form is None and usual.prompt is not None and peek(row, "rejected") is None and not is_known(row):
        column = next((name for name in RESPONSES if peek(row, name) is not None), "")
        return [_plain_row(row, usual, column)]
    found: dict[Prompt, PromptRow] = {}
    for raw in (form or others or detect_format(row)).pairs(row):
        if raw is not None:
            prompt, chosen, _, _ = split_prompt(raw)
            found.setdefault(prompt, PromptRow(prompt, chosen, raw.extra))
    return list(found.values())


def _plain_row(row: Mapping[str, Any], columns: Columns, column: str) -> PromptRow:
    names = columns.prompts
    value, response = read_prompt(row, columns), messages_or_text(row.get(column))
    prompt: Prompt = value if isinstance(value, str) else parse_messages(value, " and ".join(names))
    if column == "completion" and row.get("label") is not None and not parse_label(row["label"], "label"):
        response = None
    if response is not None and not isinstance(response, str):
        turns = parse_messages(response, column)
        if len(turns) != 1:
            raise RowError(f"{column} must be a single message, not {len(turns)}")
        response = turns[0].content
    # Selector templates contain the whole post, regardless of its length.
    post = {name: row[name] for name in POST_FIELDS if isinstance(row.get(name), str)}
    used = [*names, column, *([columns.system] if columns.system else [])]
    return PromptRow(prompt, response, {**extra_columns(row, used), **post})


def _check(row: PromptRow) -> None:
    texts = prompt_texts(row.prompt)
    if not any(text.strip() for text in texts):
        raise RowError("the prompt is blank")
    for text in texts:
        check_unicode("prompt", text)
    check_unicode("response", row.response or "")


def _is_text(path: Path) -> bool:
    return path.suffix.lower() == ".txt" and path.is_file()


def _lines(path: Path, encoding: str) -> Iterator[tuple[Mapping[str, Any], RowLocation]]:
    try:
        for line, number, problem in text_lines(path, encoding):
            location = RowLocation(str(path), number)
            if problem is not None:
                raise DataError(f"{location}: {problem}")
            # Not splitlines(): a prompt may contain other line separators.
            for text in line.rstrip("\r\n").split("\r"):
                if text.strip():
                    yield {"prompt": text}, location
    except LookupError as error:
        raise DataError(f"{path}: {error}") from error
