"""The file of chosen pairs: a line for each choice, on the disk before the next pair shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.ui.collect.errors import CollectError


class Choices:
    """The pairs that people chose, as ``data.train`` takes them.

    A line is appended for each choice. What a killed process wrote of a line is cut off when the file is
    opened; a whole line is kept. Lines that someone else wrote stay as they are. Only its owner can read a
    new file.

    Raises:
        CollectError: a line is no JSON object, or the path is not that of a ``.jsonl`` file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Mapping[str, Any]] = []
        self._ends: list[int] = [0]
        if path.suffix.lower() != ".jsonl" or path.is_dir():
            raise CollectError(f"--out {path}: give a file whose name ends in .jsonl")
        if path.exists():
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, b"", mode=0o600)

    def of(self, client: str) -> Sequence[Mapping[str, Any]]:
        """The rows that a client chose here, in that order; recorded pairs of its name are none of them."""
        return [row for row in self._rows if _is_choice(row, client)]

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row and bring it to the disk.

        Raises:
            WriteError: it cannot be written, e.g. the disk is full.
            CollectError: another program changed the file.
        """
        self._check_size()
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            files.append(self.path, line)
        except files.WriteError:
            # Part of the line may be there, and no other line can follow it.
            files.truncate(self.path, self._ends[-1])
            raise
        self._rows.append(row)
        self._ends.append(self._ends[-1] + len(line))

    def take_back(self, client: str) -> None:
        """Remove the last row, which is the client's.

        Raises:
            CollectError: the last row is not the client's, or another program changed the file.
        """
        self._check_size()
        if not self._rows or not _is_choice(self._rows[-1], client):
            raise CollectError(f"the last line of {self.path} is not a choice of {client}'s")
        files.truncate(self.path, self._ends[-2])
        files.sync(self.path)
        self._rows.pop()
        self._ends.pop()

    def _check_size(self) -> None:
        if self.path.stat().st_size != self._ends[-1]:
            raise CollectError(
                f"{self.path} was changed by another program while the page was open; start the command again"
            )

    def _read(self) -> None:
        for number, line in self._lines():
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:
                raise CollectError(f"{self.path}, line {number}: not JSON: {error}; repair it") from error
            if not isinstance(row, dict):
                raise CollectError(
                    f"{self.path}, line {number}: a row is an object with named columns; repair it"
                )
            self._rows.append(row)
            self._ends.append(self._ends[-1] + len(line) + 1)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if data[end:]:
            if _is_whole(data[end:]):
                # All of the line but its end.
                files.append(self.path, b"\n")
                data += b"\n"
            else:
                files.truncate(self.path, end)
                data = data[:end]
        yield from enumerate(data.split(b"\n")[:-1], 1)


def _is_choice(row: Mapping[str, Any], client: str) -> bool:
    return row.get("client") == client and row.get("side") in ("left", "right")


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
