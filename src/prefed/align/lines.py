"""JSON lines that are appended batch by batch, so that a process that is killed loses no whole batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prefed import files


def dumps(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """One line for each row."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, one at a time."""
    with path.open("rb") as lines:
        for line in lines:
            yield json.loads(line)


def whole_batches(path: Path, sizes: Iterable[int]) -> int:
    """How many batches of a file are whole. What comes after them, such as half a line, is cut off.

    Args:
        sizes: the number of lines of each batch, in the order in which they are appended.
    """
    if not path.exists():
        return 0
    batches, end = 0, 0
    with path.open("rb") as lines:
        for size in sizes:
            batch = [lines.readline() for _ in range(size)]
            if not all(line.endswith(b"\n") for line in batch):
                break
            batches, end = batches + 1, end + sum(map(len, batch))
    files.truncate(path, end)
    return batches
