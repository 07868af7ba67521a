"""Caches of numbers per record, such as the frozen reference's log-probabilities, kept with the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from prefed.core import files

Rows = npt.NDArray[np.int64]
"""``[n]`` numbers of records."""


def split_rows(rows: Rows, size: int) -> list[Rows]:
    """``rows`` in blocks of ``size``; the last may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class RecordCache:
    """Floats of every record, such as one per completion token, the chosen response's first.

    Before a record's floats is a check value over them and the record's number, in as many bits as one float.
    The check value is wrong if the record was never written, or if the disk returns other bytes than were
    written. Such a record counts as missing.

    Args:
        sizes: ``[n]`` how many floats each record has.
        folder: where to keep them; ``None`` keeps them in memory.
        name: distinguishes the caches of different models or data in one folder.

    Raises:
        WriteError: the disk has no room for them.
    """

    def __init__(self, sizes: npt.NDArray[np.int64], folder: Path | None = None, name: str = "") -> None:
        self._starts = np.concatenate([[0], np.cumsum(sizes + 1)])
        size = int(self._starts[-1])
        self._words: npt.NDArray[np.uint32] = np.zeros(size, np.uint32)
        self._file: np.memmap[tuple[int], np.dtype[np.uint32]] | None = None
        if folder is None or not size:
            return
        path = folder / f"{name}.f32"
        files.private_folder(folder)
        files.allocate(path, 4 * size, mode=0o600)
        self._file = np.memmap(path, np.uint32, "r+", shape=(size,))
        # A plain array over the same memory: each slice of a memmap costs three times one of an array.
        self._words = self._file.view(np.ndarray)

    def missing(self, rows: Rows) -> bool:
        """Whether any of ``rows`` is missing."""
        records = ((row, *self._record(row)) for row in rows.tolist())
        return any(check[0] != _check(numbers, row) for row, check, numbers in records)

    def put(self, rows: Rows, values: npt.NDArray[np.float32]) -> None:
        """Store ``values``, those of ``rows`` end to end, on the disk if there is a folder."""
        words, start = values.reshape(-1).view(np.uint32), 0
        for row in rows.tolist():
            check, numbers = self._record(row)
            numbers[:] = words[start : start + len(numbers)]
            check[0] = _check(numbers, row)
            start += len(numbers)
        if self._file is not None:
            self._file.flush()

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[M]``, the floats of ``rows`` end to end."""
        return np.concatenate([self._record(row)[1] for row in rows.tolist()]).view(np.float32)

    def _record(self, row: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Views of a record's check value and of its floats."""
        words = self._words[self._starts[row] : self._starts[row + 1]]
        return words[:1], words[1:]


class PairScoreCache(RecordCache):
    """Two floats of every record, e.g. log π_ref of both responses."""

    def __init__(self, records: int, folder: Path | None = None, name: str = "reference") -> None:
        super().__init__(np.full(records, 2, np.int64), folder, name)

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[len(rows), 2]``, chosen then rejected."""
        return super().get(rows).reshape(-1, 2)


def _check(words: npt.NDArray[np.uint32], row: int) -> int:
    """XXH32, seeded with the row so that another row's numbers fail; never 0, as in an unwritten record."""
    return xxhash.xxh32_intdigest(words.tobytes(), row) or 1
