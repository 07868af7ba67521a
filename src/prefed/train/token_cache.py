"""The frozen reference's log-probability of every completion token, computed once and kept with the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from prefed import files
from prefed.train.pair_cache import Rows

__all__ = ["TokenCache"]


class TokenCache:
    """log π_ref of the completion tokens of every record, the chosen response's before the rejected one's.

    The numbers of a record follow a check value over them. A record counts as missing where the two
    disagree: nothing or not everything was written, or the disk returned other bytes than were written.

    Args:
        tokens: ``[n]`` completion tokens of each record, of both responses together.
        folder: where to keep them; ``None`` keeps them in memory.
        name: tells apart caches of different models or data in one folder.

    Raises:
        WriteError: the disk has no room for them.
    """

    def __init__(self, tokens: npt.NDArray[np.int64], folder: Path | None = None, name: str = "") -> None:
        self._starts = np.concatenate([[0], np.cumsum(tokens + 1)])
        size = int(self._starts[-1])
        self._words: npt.NDArray[np.uint32] = np.zeros(size, np.uint32)
        if folder is None or not size:
            return
        path = folder / f"{name}.u32"
        files.private_folder(folder)
        files.allocate(path, 4 * size, mode=0o600)
        self._words = np.memmap(path, np.uint32, "r+", shape=(size,))

    def missing(self, rows: Rows) -> bool:
        """Whether any of ``rows`` is missing."""
        return any(self._record(row)[0] != _check(self._record(row)[1:], row) for row in rows.tolist())

    def put(self, rows: Rows, values: npt.NDArray[np.float32]) -> None:
        """Store ``values``, ``[M]`` over the tokens of ``rows`` end to end."""
        start = 0
        for row in rows.tolist():
            record = self._record(row)
            record[1:] = values[start : start + len(record) - 1].view(np.uint32)
            record[0] = _check(record[1:], row)
            start += len(record) - 1
        if isinstance(self._words, np.memmap):
            self._words.flush()

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[M]``, the tokens of ``rows`` end to end."""
        return np.concatenate([self._record(row)[1:] for row in rows.tolist()]).view(np.float32)

    def _record(self, row: int) -> npt.NDArray[np.uint32]:
        """A record's check value, then its numbers; a view."""
        return self._words[self._starts[row] : self._starts[row + 1]]


def _check(words: npt.NDArray[np.uint32], row: int) -> int:
    """XXH32, seeded with the row so that another row's numbers fail; never 0, as in an unwritten record."""
    return xxhash.xxh32_intdigest(words.tobytes(), row) or 1
