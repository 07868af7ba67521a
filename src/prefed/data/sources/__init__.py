"""Read the records of files, folders and hub datasets one at a time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefed.data.config import Columns, DataConfig, Source
from prefed.data.errors import DataError, ErrorCollector, RowError, RowLocation
from prefed.data.record import Record, prompt_texts
from prefed.data.sources import files
from prefed.data.sources.folders import data_files
from prefed.data.sources.formats import FORMATS, Format, detect_format, get_format, pairs_format
from prefed.data.sources.pairs import (
    RawPair,
    contradicts,
    extra_columns,
    is_marked,
    split_prompt,
    value_at,
    whole_texts,
)
from prefed.data.sources.unread import TrackedRow, check_unread

__all__ = [
    "FORMATS",
    "Format",
    "ReadCounts",
    "format_setting",
    "read_records",
    "read_rows",
    "source_digests",
]


_GARBLED = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffd]|[\xc2\xc3][\x80-\xbf]|\xe2\u20ac.?")
"""Signs of a wrong encoding: control characters, U+FFFD, and UTF-8 that was read as Windows-1252."""
_SUSPECT = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffd\xc2\xc3\xe2]")
"""The first character of each sign. Searching for a single character is several times as fast."""


@dataclass
class ReadCounts:
    """Counts updated while reading; see :class:`~prefed.data.RowCounts`.

    Attributes:
        promptless: rows with an empty prompt that nobody asked for.
        implicit: rows whose prompt is the common beginning of two texts that are no marked dialogues.
        contradicted: pairs whose rejected response has the higher score, or with a negative margin.
        unread: columns that were not used, in the order of their appearance.
        columns: all columns.
        garbled: see :class:`~prefed.data.dataset.Findings`.
        files: files with rows.
    """

    read: int = 0
    identical: int = 0
    ties: int = 0
    prefixes: int = 0
    short: int = 0
    promptless: int = 0
    implicit: int = 0
    contradicted: int = 0
    unread: dict[str, None] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    garbled: Counter[str] = field(default_factory=Counter)
    files: set[str] = field(default_factory=set)


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
    partition, layouts = _PartitionColumn(source, config), _LayoutCheck()
    prompts, columns = _PromptCheck(source, config), source.columns or config.columns
    for count, (plain, location) in enumerate(read_rows(source, config.encoding, role, setting, errors)):
        if config.rows is not None and count >= config.rows:
            break
        row = TrackedRow(plain)
        counts.read += 1
        counts.columns.update(plain)
        counts.files.add(location.file)
        if setting is None and location.file != file:
            try:
                form, file = detect_format(row), location.file
            except RowError as error:
                raise DataError(f"{location}: {error}") from error
        elif setting is None and form is not None and form.name in ("pairs", "thumbs"):
            # Pairs and thumbs in one file are distinguished, and then refused.
            pair, thumb = {"chosen", "rejected"} <= row.keys(), {"completion", "label"} <= row.keys()
            if pair != thumb:
                form = FORMATS["pairs" if pair else "thumbs"]
        assert form is not None
        pairs: list[RawPair | None] = []
        records: list[Record] = []
        with errors.at(location):
            partition.check(row, location)
            pairs = form.pairs(row)
            for found in filter(None, pairs):
                found.extra |= partition.nested(row)
            counts.read += len(pairs) - 1
            counts.ties += pairs.count(None)
        given = [raw for raw in pairs if raw is not None]
        for raw in given:
            with errors.at(location):
                record = _record(raw, name or source.subset, config, counts)
                records += [] if record is None else [record]
        if not records:
            continue
        checked: list[Record] = []
        with errors.at(location):
            seen = [r.prompt for r in records], [t for r in records for t in (r.chosen, r.rejected)]
            counts.unread |= dict.fromkeys(check_unread(row, *seen, config.metadata, given[0].columns))
            counts.contradicted += contradicts(row, records)
            if form.name == "pairs" and columns is None:
                layouts.check(given[0], location)
            counts.promptless += prompts.add(form, given, records)
            if config.score == "response" and given[0].prompt is None:
                counts.implicit += not is_marked(records[0].prompt)
            checked = records
        for record in checked:
            yield record, location
    prompts.raise_if_none()


class _PromptCheck:
    """Refuse a source without prompts, unless an empty prompt is asked for."""

    def __init__(self, source: Source, config: DataConfig) -> None:
        columns = source.columns or config.columns
        self._asked = config.score == "whole" or (columns is not None and columns.prompt is not None)
        self._path, self._count, self._blank = source.path, 0, 0

    def add(self, form: Format, pairs: Sequence[RawPair], records: Sequence[Record]) -> int:
        """Return the number of a row's records with an empty prompt.

        Raises:
            RowError: the row has no column of a prompt, and its responses have no common beginning.
        """
        if self._asked or not form.has_prompts:
            return 0
        blank = [not any(map(str.strip, prompt_texts(record.prompt))) for record in records]
        if any(blank) and pairs[0].prompt is None:
            raise RowError(
                "chosen and rejected have no common beginning, so this row has no prompt", remedy=_NO_PROMPT
            )
        self._count += len(records)
        self._blank += sum(blank)
        return sum(blank)

    def raise_if_none(self) -> None:
        """Check the whole source.

        Raises:
            DataError: all prompts are empty.
        """
        if self._count and self._blank == self._count:
            raise DataError(f"{self._path}: the prompt of every row is empty. {_NO_PROMPT}")


_NO_PROMPT = (
    'If another column contains the prompt, name it: columns = {prompt = "…"}. To train on texts without '
    'prompts, set [data] score = "whole".'
)


class _PartitionColumn:
    """The column of the partition: refuses two spellings of a name, such as 3 and "3", in a file."""

    def __init__(self, source: Source, config: DataConfig) -> None:
        self.column: str | None = getattr(config.partition, "column", None)
        columns = source.columns or config.columns
        self._path = ""
        if columns is not None and self.column in Columns.model_fields:
            self.column = getattr(columns, self.column)
        else:
            self._path = self.column or ""
        self._file = ""
        self._first: dict[str, tuple[str | int | float, int]] = {}

    def nested(self, row: files.Row) -> dict[str, str | float | int]:
        """Return the value of the partition's column if it is inside another column, by its dotted path."""
        if "." not in self._path or self._path in row:
            return {}
        try:
            return extra_columns({self._path: value_at(row, self._path)}, ())
        except RowError:
            return {}

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


class _LayoutCheck:
    """Refuse a row of texts that would be read in another way than the first row of its file."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, bool, bool]] = {}

    def check(self, pair: RawPair, location: RowLocation) -> None:
        """Check one row.

        Raises:
            RowError: only one of this row and the first row of the file has a column of prompts, or of system
                messages.
        """
        if pair.columns is None or not isinstance(pair.chosen, str):
            return
        prompt, system = pair.columns.prompt is not None, pair.columns.system is not None
        number, *expected = self._first.setdefault(location.file, (location.row, prompt, system))
        if prompt != expected[0]:
            here, there = ("a", "no") if prompt else ("no", "a")
            raise RowError(
                f"this row has {here} prompt, but row {number} has {there} prompt; texts without a prompt "
                "are read as whole dialogues, so give a prompt in all rows of a file or in none"
            )
        if system != expected[1] and pair.columns.prompt == "prompt":
            here, there = ("a", "none") if system else ("no", "one")
            raise RowError(
                f"this row has {here} system column, but row {number} has {there}; with it, a text "
                "prompt is a user turn, so give it in all rows of a file, empty where there is no message"
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
    if _path(source).exists():
        return False
    from prefed.data.sources.huggingface import looks_like_hub_name

    return looks_like_hub_name(source.path)


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
    elif _is_on_hub(source):
        from prefed.data.sources import huggingface

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
    suspects = filter(_SUSPECT.search, [chosen, rejected, *prompt_texts(prompt)])
    counts.garbled.update({mark for text in suspects for mark in _GARBLED.findall(text)})
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
