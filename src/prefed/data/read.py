"""Reads the rows of all sources and hands them to the tokeniser."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prefed.core.text import did_you_mean, listed
from prefed.data.assign import ROLES, RowTable, partition_value
from prefed.data.config import ByColumn, DataConfig, Source
from prefed.data.errors import DataError, ErrorCollector, MissingColumnError, RowLocation
from prefed.data.sources import ReadCounts, read_records
from prefed.data.sources.found import data_files
from prefed.data.writer import TokenWriter


def read_rows(
    config: DataConfig, writer: TokenWriter, errors: ErrorCollector, counts: ReadCounts
) -> RowTable:
    """Read every source into ``writer``, which takes two codes per record: role and value of the partition.

    Returns:
        The columns that the partition needs, for the rows that the writer kept.

    Raises:
        DataError: rows that cannot be used, a source without rows, or no usable row at all.
    """
    values: dict[str, int] = {}
    if isinstance(config.train, dict) and config.partition.by == "source":
        # Clients have the order of the table.
        values = {name: k for k, name in enumerate(config.train)}
    missing, empty = _MissingColumn(errors, _per_client(config)), list[str]()
    for role, name, source in config.sources():
        before = counts.read + errors.count
        for record, location in read_records(source, config, role, name, errors, counts):
            try:
                value = partition_value(config.partition, record, name)
            except MissingColumnError as error:
                missing.add(location, error)
                continue
            except ValueError as error:
                errors.add(location, str(error))
                continue
            missing.column_exists()
            split = record.split if role == "train" and record.split else role
            category = record.category or value or record.domain
            code = values.setdefault(value, len(values))
            writer.add(record, location, category, ROLES.index(split), code)
        if counts.read + errors.count == before:
            empty.append(source.path)
    if empty:
        one, several = "there is no row in it", "there is no row in these files"
        raise DataError(f"{listed(empty, str)}: {one if len(empty) == 1 else several}")
    missing.raise_if_everywhere()
    writer.flush()
    errors.raise_if_any()
    if not len(writer):
        raise DataError(_no_pair(config, writer, errors, counts))
    return RowTable(
        role=np.array(writer.codes[0], dtype=np.int64),
        value=np.array(writer.codes[1], dtype=np.int64),
        values=list(values),
        margin=writer.column("margins"),
        prompt=writer.column("prompts"),
        usable=np.ones(len(writer), dtype=np.bool_),
    )


class _MissingColumn:
    """Rows without the partition's column: one error if no row has it, otherwise one error per row.

    Rows are held back until a row with the column is read.

    Args:
        hint: for the end of the one error.
    """

    def __init__(self, errors: ErrorCollector, hint: str) -> None:
        self._errors, self._hint = errors, hint
        self._rows: list[tuple[RowLocation, MissingColumnError]] = []
        self._count = 0
        self._exists = False

    def add(self, location: RowLocation, error: MissingColumnError) -> None:
        """Note a row without the column."""
        if self._exists:
            self._errors.add(location, str(error))
            return
        self._count += 1
        if len(self._rows) < self._errors.limit:
            self._rows.append((location, error))
        elif not self._errors.count_only:
            self.raise_if_everywhere()

    def column_exists(self) -> None:
        """A row has the column, so each row before it is an error of its own."""
        if self._exists:
            return
        self._exists = True
        # More rows than the limit are noted only with ``count_only``. Then their number is enough.
        self._errors.count += self._count - len(self._rows)
        for location, error in self._rows:
            self._errors.add(location, str(error))

    def raise_if_everywhere(self) -> None:
        """Call this at the end of the data, or where reading stops.

        Raises:
            DataError: no row has the column.
        """
        if self._exists or not self._rows:
            return
        (first, error), (last, _) = self._rows[0], self._rows[-1]
        rows = f"{first.file}, rows {first.row}" if first.file == last.file else str(first)
        rows += f" to {last.row if first.file == last.file else last}"
        setting = "by" if error.column == "margin" else "column"
        raise DataError(
            f"{rows}: no row has {error.column!r}, which [data.partition] {setting} names; "
            f"the columns there are {', '.join(error.columns) or 'none besides prompt, chosen and rejected'}"
            + (did_you_mean(error.column, error.columns) or self._hint)
        )


def _per_client(config: DataConfig) -> str:
    """What to do where rows have no client's name, but files may have: the data are a folder of several."""
    train = config.train
    if not isinstance(train, Source) or not isinstance(config.partition, ByColumn):
        return ""
    folder = Path(train.path).expanduser()
    if not folder.is_dir() or len(data_files(folder, train.split)) < 2:
        return ""
    return '; if each file there has one client\'s rows, set [data] partition = {by = "file"}'


def _no_pair(config: DataConfig, writer: TokenWriter, errors: ErrorCollector, counts: ReadCounts) -> str:
    """The message where rows were read and none of them is a usable pair."""
    text = "a response" if writer.letters is None else "a selector's question"
    reasons = {
        "two equal responses": counts.identical + writer.identical,
        "no preference": counts.ties,
        f"malformed or blank, the first {errors.first}": errors.count,
        f"{text} longer than max_length = {config.max_length} allows": writer.too_long,
    }
    lines = [f"  {count:,}: {reason}" for reason, count in reasons.items() if count]
    if writer.too_long:
        lines.append(f"The shortest of the long pairs needs max_length = {writer.shortest}.")
    names = ", ".join(source.path for _, _, source in config.sources())
    return "\n".join([f"{names}: no usable pair; why rows were left out:", *lines])
