"""Errors about data. Their messages name the file and the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class DataError(ValueError):
    """The data cannot be used, or not divided as configured. The message names the place and a remedy."""


class DataMismatchError(DataError):
    """A folder holds a dataset that was built from other sources or with other settings.

    Attributes:
        inputs: a digest of the sources and settings that were asked for.
    """

    def __init__(self, message: str, inputs: str) -> None:
        super().__init__(message)
        self.inputs = inputs


class RowError(ValueError):
    """One row does not give a preference pair. The reader adds the file and the row to the message.

    Attributes:
        remedy: a sentence that a message about several rows has once.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


class MissingColumnError(RowError):
    """A row, which has ``columns``, lacks the column that the partition needs."""

    def __init__(self, column: str, problem: str, columns: Sequence[str]) -> None:
        super().__init__(f"{problem}, which the partition uses; this row has {', '.join(columns) or 'none'}")
        self.column, self.columns = column, tuple(columns)


@dataclass(frozen=True)
class RowLocation:
    """The place that a row was read from.

    Attributes:
        file: the path of the file, or a hub name with its split.
        row: the number of the row, from 1. In a text file it is the number of the line, so the first row of a
            CSV file is row 2.

    >>> str(RowLocation("pairs.jsonl", 7))
    'pairs.jsonl, row 7'
    """

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"


@dataclass
class ErrorCollector:
    """Collects errors about rows, so that one message lists several of them.

    Attributes:
        limit: the number of errors at which reading stops.
        hint: the last line of the message: a remedy.
        count_only: count errors and never raise.
        count: how many errors there were.
        first: the text of the first error.
        messages: the texts of all errors; empty with ``count_only``.

    >>> errors = ErrorCollector(limit=2)
    >>> errors.add(RowLocation("a.jsonl", 1), "chosen is empty")
    >>> errors.add(RowLocation("a.jsonl", 5), "chosen is empty")
    Traceback (most recent call last):
    ...
    prefed.data.errors.DataError: these rows cannot be used (stopped at 2 problems):
      a.jsonl, row 1: chosen is empty
      a.jsonl, row 5: chosen is empty
    """

    limit: int = 10
    hint: str = ""
    count_only: bool = False
    count: int = 0
    first: str = ""
    messages: list[str] = field(default_factory=list)
    _remedies: dict[str, None] = field(default_factory=dict)

    def add(self, location: RowLocation, message: str, remedy: str = "") -> None:
        """Note an error about a row. With ``count_only`` it is only counted.

        Args:
            remedy: a sentence of the message's end, which has each such sentence once.

        Raises:
            DataError: this is error number ``limit``. The message lists all of them.
        """
        self.count += 1
        text = f"{location}: {message}"
        self.first = self.first or text
        if self.count_only:
            return
        self.messages.append(text)
        self._remedies |= {remedy: None} if remedy else {}
        if len(self.messages) >= self.limit:
            self.raise_if_any(stopped=True)

    def raise_if_any(self, *, stopped: bool = False) -> None:
        """Call this at the end of the data.

        Raises:
            DataError: there were errors. The message lists all of them.
        """
        if not self.messages:
            return
        head = "these rows cannot be used" + (f" (stopped at {self.limit} problems)" if stopped else "")
        text = f"{head}:\n  " + "\n  ".join(self.messages)
        raise DataError("\n".join([text, *self._remedies, *([self.hint] if self.hint else [])]))
