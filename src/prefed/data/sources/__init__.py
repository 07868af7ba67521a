"""Read the records of files, folders and hub datasets one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefed.data.config import Columns, DataConfig, Source
from prefed.data.errors import DataError, ErrorCollector, RowError, RowLocation
from prefed.data.record import Record
from prefed.data.sources import files, huggingface
from prefed.data.sources.folders import data_files
from prefed.data.sources.formats import FORMATS, Format, detect_format, get_format, pairs_format
from prefed.data.sources.pairs import RawPair, split_prompt, value_at, whole_texts

__all__ = [
    "FORMATS",
    "Format",
    "ReadCounts",
    "format_setting",
    "read_records",
    "read_rows",
    "source_digests",
]


@dataclass
class ReadCounts:
    """Counts updated while reading; see :class:`~prefed.data.RowCounts`."""

    read: int = 0
    identical: int = 0
    ties: int = 0
    prefixes: int = 0
    short: int = 0


def read_records(
    source: Source,
    config: DataConfig,
    role: str,
    name: str | None,
    errors: ErrorCollector,
    counts: ReadCounts,
) -> Iterator[tuple[Record, RowLocation]]:
    """Yield the pairs or thumbs of one source, in order.

    Args:
        source: a file, a folder or a hub dataset.
        config: default format, columns and encoding, and the number of rows to read.
        role: default split of a hub dataset.
        name: name of the source, the default domain of its rows.
        errors: receives rows that are not pairs.
        counts: is updated while reading.

    Raises:
        DataError: the source cannot be read, or the format of its rows is unknown.
    """
    setting = format_setting(source, config.columns, config.format)
    form, file = setting, None
    spellings, first_rows = _SpellingCheck(source, config), dict[str, tuple[int, bool]]()
    for count, (row, location) in enumerate(read_rows(source, config.encoding, role, setting, errors)):
        if config.rows is not None and count >= config.rows:
            return
        counts.read += 1
        if setting is None and location.file != file:
            try:
                form, file = detect_format(row), location.file
            except RowError as error:
                raise DataError(f"{location}: {error}") from error
        elif setting is None and form in (FORMATS["pairs"], FORMATS["thumbs"]):
            # Pairs and thumbs in one file are told apart, and then refused.
            pair, thumb = {"chosen", "rejected"} <= row.keys(), {"completion", "label"} <= row.keys()
            if pair != thumb:
                form = FORMATS["pairs" if pair else "thumbs"]
        assert form is not None
        pairs: list[RawPair | None] = []
        with errors.at(location):
            spellings.check(row, location)
            if form.name == "pairs" and (source.columns or config.columns) is None:
                _check_prompt(row, location, first_rows)
            pairs = form.pairs(row)
            counts.read += len(pairs) - 1
        for raw in pairs:
            record = None
            if raw is None:
                counts.ties += 1
            else:
                with errors.at(location):
                    record = _record(raw, name or source.subset, config, counts)
            if record is not None:
                yield record, location


class _SpellingCheck:
    """Refuse two spellings of the same name, such as 3 and "3", in the partition's column of a file."""

    def __init__(self, source: Source, config: DataConfig) -> None:
        self.column: str | None = getattr(config.partition, "column", None)
        columns = source.columns or config.columns
        if columns is not None and self.column in Columns.model_fields:
            self.column = getattr(columns, self.column)
        self._file = ""
        self._first: dict[str, tuple[str | int | float, int]] = {}

    def check(self, row: files.Row, location: RowLocation) -> None:
        """Check one row.

        Raises:
            RowError: an earlier row of the file has the same name with another type.
        """
        if self.column is None:
            return
        try:
            value = value_at(row, self.column)
        except RowError:
            return
        if not isinstance(value, str | int | float):
            return
        if location.file != self._file:
            self._file, self._first = location.file, {}
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        first, number = self._first.setdefault(str(whole), (value, location.row))
        if type(first) is not type(value):
            raise RowError(
                f"{self.column} is {json.dumps(value)} here but {json.dumps(first)} in row {number}; both "
                f"are read as {str(whole)!r}, so write them the same way"
            )


def _check_prompt(row: files.Row, location: RowLocation, first_rows: dict[str, tuple[int, bool]]) -> None:
    """Refuse texts without a prompt in a file with prompts: they would be read as whole dialogues.

    Args:
        first_rows: file → number of its first row, and whether that has a prompt; is updated.

    Raises:
        RowError: only one of this row and the first row of the file has the column ``prompt``.
    """
    if not isinstance(row.get("chosen"), str):
        return
    has = "prompt" in row
    first, expected = first_rows.setdefault(location.file, (location.row, has))
    if has != expected:
        here, there = ("a", "no") if has else ("no", "a")
        raise RowError(
            f"this row has {here} prompt, but row {first} has {there} prompt; texts without a prompt are "
            "read as whole dialogues, so give a prompt in all rows of a file or in none"
        )


def source_digests(source: Source) -> dict[str, str]:
    """Identify the content of a source: file name → SHA-256, or hub name → its options."""
    path = _path(source)
    if _is_on_hub(source):
        return {source.path: f"hub {source.subset or ''} {source.split or ''} {source.revision or ''}"}
    return {
        (item.relative_to(path).as_posix() if item != path else item.name): files.sha256_of(item)
        for item in data_files(path)
    }


def _path(source: Source) -> Path:
    return Path(source.path).expanduser()


def _is_on_hub(source: Source) -> bool:
    return not _path(source).exists() and huggingface.looks_like_hub_name(source.path)


def format_setting(source: Source, columns: Columns | None = None, name: str = "auto") -> Format | None:
    """Return the format given by the settings, or ``None`` if it must be detected.

    Args:
        source: its columns or format take precedence.
        columns: default names of the columns.
        name: default format.
    """
    if source.columns is not None or (source.format is None and columns is not None):
        return pairs_format(source.columns or columns)
    name = source.format or name
    if name != "auto":
        return get_format(name)
    if _is_on_hub(source):
        matches = [entry for entry in FORMATS.builtin.values() if entry.hub.lower() == source.path.lower()]
        return matches[0] if matches else None
    return None


def read_rows(
    source: Source, encoding: str, role: str, form: Format | None, errors: ErrorCollector
) -> Iterator[tuple[files.Row, RowLocation]]:
    """Yield the unprocessed rows of a source. Raises the errors of :func:`read_records`.

    Args:
        source: a file, a folder or a hub dataset.
        encoding: default encoding of text files.
        role: default split of a hub dataset.
        form: format with the default subset of a hub dataset.
        errors: receives malformed rows.
    """
    path = _path(source)
    if path.exists():
        for item in data_files(path, source.split or role):
            yield from files.read_rows(item, source.encoding or encoding, errors)
    elif huggingface.looks_like_hub_name(source.path):
        yield from huggingface.read_rows(
            source.path,
            subset=source.subset or (form.subset if form else None),
            subset_is_folder=form is not None and form.subset_is_folder,
            split=source.split or role,
            revision=source.revision,
        )
    else:
        raise DataError(f"{path}: no such file or folder, and {source.path!r} is not a hub name (owner/name)")


def _record(raw: RawPair, domain: str | None, config: DataConfig, counts: ReadCounts) -> Record | None:
    """Return the record of a pair or thumb, or ``None`` if the responses are equal or one is too short."""
    prompt, chosen, rejected, repeated_prompt = split_prompt(raw, several_turns=config.score == "whole")
    if config.score == "whole":
        chosen, rejected = whole_texts(prompt, (chosen, rejected), config.tail_characters)
        prompt = ""
    if min(len(chosen), len(rejected)) < (config.min_characters or 0):
        counts.short += 1
        return None
    if chosen == rejected and raw.label is None:
        counts.identical += 1
        return None
    counts.prefixes += repeated_prompt
    columns: dict[str, Any] = {
        "margin": raw.margin,
        "client": raw.client,
        "category": raw.category,
        "domain": raw.domain or domain,
        "split": raw.split,
        "extra": raw.extra,
    }
    if raw.label is not None:
        return Record.thumb(prompt, chosen, up=raw.label, **columns)
    return Record(prompt, chosen, rejected, **columns)
