"""Rows that record which of their columns are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prefed.data.sources.files import Row

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values


class TrackedRow(dict[str, Any]):
    """A row that records which columns are read, nested ones by their dotted path.

    Whoever copies a row, or goes through its values, reads all columns.

    Attributes:
        read: paths of the columns that were read.

    >>> row = TrackedRow({"input": {"messages": "Hi", "tools": ["t"]}, "id": 7, "empty": [None]})
    >>> row["input"]["messages"], [path for path, _ in row.unread()]
    ('Hi', ['input.tools', 'id'])
    """

    def __init__(self, row: Row, read: set[str] | None = None, path: str = "") -> None:
        super().__init__(row)
        self.read: set[str] = set() if read is None else read
        self._path = path

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read.add(f"{self._path}{name}")
        return TrackedRow(value, self.read, f"{self._path}{name}.") if isinstance(value, dict) else value

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a column, or ``default``."""
        return self[name] if name in self else default  # noqa: SIM401 - that would be a call of itself

    def __iter__(self) -> Iterator[str]:
        # With its own iterator, {**row} and dict(row) fetch each value by its name.
        return super().__iter__()

    def items(self) -> dict_items[str, Any]:
        """Return all columns with their values, which are then read."""
        self.read.update(f"{self._path}{name}" for name in self)
        return super().items()

    def values(self) -> dict_values[str, Any]:
        """Return the values of all columns, which are then read."""
        self.read.update(f"{self._path}{name}" for name in self)
        return super().values()

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield path and value of the columns with a value that were not read."""
        for name, value in unmarked(self):
            path = f"{self._path}{name}"
            if path not in self.read:
                if has_value(value):
                    yield path, value
            elif isinstance(value, dict) and any(other.startswith(f"{path}.") for other in self.read):
                yield from TrackedRow(value, self.read, f"{path}.").unread()


def unmarked(row: Row) -> Iterable[tuple[str, Any]]:
    """Return the columns and values of a row without marking them as read."""
    return dict.items(row) if isinstance(row, dict) else row.items()


def peek(row: Row, name: str) -> Any:
    """Return the value of a column, or ``None``, without marking it as read."""
    return dict.get(row, name) if isinstance(row, dict) else row.get(name)


def has_value(value: Any) -> bool:
    """Whether a value contains anything but ``None``, blank texts and empty lists and objects.

    >>> [has_value(value) for value in (None, " ", "[]", [{"path": None}], 0, "a")]
    [False, False, False, False, True, True]
    """
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}")
    if isinstance(value, dict):
        return any(map(has_value, dict.values(value)))
    if isinstance(value, list | tuple):
        return any(map(has_value, value))
    return value is not None
