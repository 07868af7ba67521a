"""Caches of numbers per record, such as reference log-probabilities, stored with the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from prefed.core import files

Rows = npt.NDArray[np.int64]
"""``[n]`` record indices; or ``[n, 2]``, with the responses of other rows
(:meth:`prefed.train.feedback.Feedback.together`)."""


def split_rows(rows: Rows, size: int) -> list[Rows]:
    """Split ``rows`` into blocks of ``size``; the last may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class RecordCache:
    """Floats of every record, such as one per completion token, chosen response first.

    The floats of a record follow a checksum over them and the record's index. It does not match if the record
    was never written or the disk returns other bytes. Such records count as missing.

    Args:
        sizes: ``[n]`` number of floats per record.
        folder: where to store the cache; ``None`` keeps it in memory.
        name: identifies model and data in ``folder``.

    Raises:
        WriteError: the disk is full.
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
        files.allocate(path, 4 * size)
        self._file = np.memmap(path, np.uint32, "r+", shape=(size,))
        # Slicing a memmap takes three times as long as slicing a plain array over the same memory.
        self._words = self._file.view(np.ndarray)

    def missing(self, rows: Rows) -> bool:
        """Return whether any of ``rows`` is missing."""
        records = ((row, *self._record(row)) for row in rows.tolist())
        return any(check[0] != _check(numbers, row) for row, check, numbers in records)

    def put(self, rows: Rows, values: npt.NDArray[np.floating]) -> None:
        """Store the concatenated ``values`` of ``rows`` as float32, and sync them to a folder's disk."""
        words, start = values.reshape(-1).astype(np.float32, copy=False).view(np.uint32), 0
        for row in rows.tolist():
            check, numbers = self._record(row)
            numbers[:] = words[start : start + len(numbers)]
            check[0] = _check(numbers, row)
            start += len(numbers)
        if self._file is not None:
            self._file.flush()

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Return the concatenated floats of ``rows``, ``[M]``."""
        return np.concatenate([self._record(row)[1] for row in rows.tolist()]).view(np.float32)

    def _record(self, row: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Return views of the checksum and the floats of a record."""
        words = self._words[self._starts[row] : self._starts[row + 1]]
        return words[:1], words[1:]


class PairScoreCache(RecordCache):
    """Two floats per record, e.g. log π_ref of both responses."""

    def __init__(self, records: int, folder: Path | None = None, name: str = "reference") -> None:
        super().__init__(np.full(records, 2, np.int64), folder, name)

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Return ``[len(rows), 2]``, chosen then rejected."""
        return super().get(rows).reshape(-1, 2)


def _check(words: npt.NDArray[np.uint32], row: int) -> int:
    """Return XXH32 seeded with the row, to detect floats of another row; never 0, as in unwritten records."""
    return xxhash.xxh32_intdigest(words.tobytes(), row) or 1
