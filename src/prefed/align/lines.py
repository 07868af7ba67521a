"""JSON lines that are appended batch by batch, so that a process that is killed loses no whole batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prefed.align.errors import AlignError
from prefed.core import files


def dumps(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """One line for each row."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append a batch, each row with a digest of its content, and bring it to the disk."""
    files.append(path, b"".join(files.dumps_with_digest(row) + b"\n" for row in rows))


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, one at a time.

    Raises:
        AlignError: (on the way) a line is no row or was changed.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield files.loads_with_digest(line)
            except files.DamagedError as error:
                raise AlignError(
                    f"{path}, line {number}: damaged: {error}; do the stage that wrote it again (--stage)"
                ) from error


def whole_batches(path: Path, sizes: Iterable[int]) -> int:
    """How many batches of a file are whole. From the first that is not, all is cut off.

    A batch is not whole if half a line of it is missing, or if a line is not as :func:`append` wrote it.

    Args:
        sizes: the number of lines of each batch, in the order in which they are appended.
    """
    if not path.exists():
        return 0
    batches, end = 0, 0
    with path.open("rb") as lines:
        for size in sizes:
            batch = [lines.readline() for _ in range(size)]
            if not all(map(_whole, batch)):
                break
            batches, end = batches + 1, end + sum(map(len, batch))
    files.truncate(path, end)
    return batches


def _whole(line: bytes) -> bool:
    try:
        files.loads_with_digest(line)
    except files.DamagedError:
        return False
    return line.endswith(b"\n")
