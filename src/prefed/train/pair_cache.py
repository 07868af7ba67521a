"""Two numbers for every record, such as the frozen reference's log-probabilities, kept with the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from prefed import files

__all__ = ["PairCache", "Rows", "split_rows"]

Rows = npt.NDArray[np.int64]
"""``[n]`` numbers of records."""


def split_rows(rows: Rows, size: int) -> list[Rows]:
    """``rows`` in stretches of ``size``; the last may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class PairCache:
    """Two floats of every record, e.g. log π_ref of both responses; a record may be missing.

    A row of the file is the two floats and a check value over them and the row's number, in as many bits as
    one float. The check value is wrong where a row was never written, and where the disk returns other
    bytes than were written. Such a row counts as missing.

    Args:
        records: number of records.
        folder: where to keep them; ``None`` keeps them in memory.
        name: tells apart caches of different models or data in one folder.

    Raises:
        WriteError: the disk has no room for them.
    """

    def __init__(self, records: int, folder: Path | None = None, name: str = "reference") -> None:
        self._values: npt.NDArray[np.float32]
        if folder is None:
            self._values = np.zeros((records, 3), np.float32)
            return
        files.private_folder(folder)
        path = folder / f"{name}.f32"
        files.allocate(path, records * 12, mode=0o600)
        self._values = np.memmap(path, np.float32, "r+", shape=(records, 3))

    def missing(self, rows: Rows) -> bool:
        """Whether any of ``rows`` is missing."""
        values = self._values[rows]
        return bool((values[:, 2].view(np.uint32) != _check(rows, values[:, :2])).any())

    def put(self, rows: Rows, values: npt.NDArray[np.float32]) -> None:
        """Store ``values [len(rows), 2]``, on the disk if there is a folder."""
        check = _check(rows, values).view(np.float32)
        self._values[rows] = np.concatenate([values, check[:, None]], 1)
        if isinstance(self._values, np.memmap):
            self._values.flush()

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[len(rows), 2]``, chosen then rejected."""
        return np.asarray(self._values[rows, :2])


def _check(rows: Rows, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """``[len(rows)]``: XXH32 of each row's eight bytes, seeded with its number."""
    data = np.ascontiguousarray(values).tobytes()
    checks = [xxhash.xxh32_intdigest(data[8 * k : 8 * k + 8], int(row)) for k, row in enumerate(rows)]
    return np.array(checks, np.uint32)
