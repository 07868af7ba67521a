"""Errors about data. Their messages name the file and the row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec


class DataError(ValueError):
    """Data that cannot be used, or cannot be divided as configured."""


def require(package: str, source: object) -> None:
    """Check that a package of the extra ``prefed[datasets]`` is installed.

    Args:
        source: what needs it, for the message.

    Raises:
        DataError: it is not installed.
    """
    if find_spec(package) is None:
        raise DataError(f"{source} needs the package {package}: pip install 'prefed[datasets]'")


class DataMismatchError(DataError):
    """A folder contains a dataset built from other sources or with other settings.

    Attributes:
        inputs: digest of the requested sources and settings.
    """

    def __init__(self, message: str, inputs: str) -> None:
        super().__init__(message)
        self.inputs = inputs


class RowError(ValueError):
    """A row that is not a preference pair. The reader adds the file and row to the message.

    Attributes:
        remedy: sentence that is added once to a message about several rows.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


class MissingColumnError(RowError):
    """A row with the given ``columns`` lacks the column of the partition."""

    def __init__(self, column: str, problem: str, columns: Sequence[str]) -> None:
        super().__init__(
            f"{problem}, which the partition requires; other columns: {', '.join(columns) or 'none'}"
        )
        self.column, self.columns = column, tuple(columns)


@dataclass(frozen=True)
class RowLocation:
    """The file and number of a row.

    Attributes:
        file: path of the file, or a hub name with its split.
        row: number of the row, from 1. In text files it is the line number, so the first row of a CSV file is
            row 2.

    >>> str(RowLocation("pairs.jsonl", 7))
    'pairs.jsonl, row 7'
    """

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"


@dataclass
class ErrorCollector:
    """Collect errors about rows into one message.

    Attributes:
        limit: number of errors at which reading stops.
        hint: last line of the message, a remedy.
        count_only: count errors instead of raising them.
        count: number of errors.
        first: message of the first error.
        messages: messages of all errors; empty with ``count_only``.

    >>> errors = ErrorCollector(limit=2)
    >>> errors.add(RowLocation("a.jsonl", 1), "chosen is empty")
    >>> errors.add(RowLocation("a.jsonl", 5), "chosen is empty")
    Traceback (most recent call last):
    ...
    prefed.data.errors.DataError: unusable rows (stopped after 2 errors):
      a.jsonl, row 1: chosen is empty (also row 5)
    """

    limit: int = 10
    hint: str = ""
    count_only: bool = False
    count: int = 0
    first: str = ""
    messages: list[str] = field(default_factory=list)
    _remedies: dict[str, None] = field(default_factory=dict)

    def add(self, location: RowLocation, message: str, remedy: str = "") -> None:
        """Add an error about a row.

        Args:
            message: what is wrong with the row.
            remedy: sentence to add once to the end of the message.

        Raises:
            DataError: the number of errors reached ``limit``. The message lists all of them.
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

    @contextmanager
    def at(self, location: RowLocation) -> Iterator[None]:
        """Add the error raised in the block, if any, as an error about the row."""
        try:
            yield
        except ValueError as error:
            self.add(location, str(error), getattr(error, "remedy", ""))
        except (TypeError, AttributeError, OverflowError) as error:
            # A value of a type that the format does not expect.
            self.add(location, f"malformed: {error}")

    def raise_if_any(self, *, stopped: bool = False) -> None:
        """Raise the collected errors. Call this after the last row.

        Raises:
            DataError: there were errors. The message lists all of them.
        """
        if not self.messages:
            return
        head = "unusable rows" + (f" (stopped after {self.limit} errors)" if stopped else "")
        text = f"{head}:\n  " + "\n  ".join(self._alike())
        raise DataError("\n".join([text, *self._remedies, *([self.hint] if self.hint else [])]))

    def _alike(self) -> Iterator[str]:
        """Yield the first of several messages of a file that differ only in numbers, with the other rows."""
        groups: dict[tuple[str, str], list[str]] = {}
        # A selector encodes a row in both orders.
        for message in dict.fromkeys(self.messages):
            file, _, rest = message.partition(", row ")
            groups.setdefault((file, re.sub(r"[0-9a-f]*\d[0-9a-f]*", "", rest)), []).append(message)
        for first, *others in groups.values():
            rows = [match[1] for other in others if (match := re.search(r", row (\d+): ", other))]
            also = f" (also row{'s' * (len(rows) > 1)} {', '.join(rows)})" if rows else ""
            yield first + also
