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

    A record's numbers stand behind a check value over them. Where the two disagree, be it that nothing was
    written yet, or not all of it, or that the disk gave back something else, the record is missing.

    Args:
        tokens: ``[n]`` completion tokens of each record, of both responses together.
        folder: where to keep them; ``None`` keeps them in memory.
        name: tells apart caches of different models or data in one folder.

    Raises:
        WriteError: the disk has no room for them.
    """

    def __init__(self, tokens: npt.NDArray[np.int64], folder: Path | None = None, name: str = "") -> None:
        self._starts = np.concatenate([[0], np.cumsum(tokens + 1)])
        words = int(self._starts[-1])
        self._words: npt.NDArray[np.uint32] = np.zeros(words, np.uint32)
        if folder is None or not words:
            return
        path = folder / f"{name}.u32"
        files.private_folder(folder)
        files.allocate(path, 4 * words, mode=0o600)
        self._words = np.memmap(path, np.uint32, "r+", shape=(words,))

    def missing(self, rows: Rows) -> bool:
        """Whether any of ``rows`` is not computed yet, or not as it was written."""
        return any(self._held(row)[0] != _check(self._held(row)[1:], row) for row in rows.tolist())

    def put(self, rows: Rows, values: npt.NDArray[np.float32]) -> None:
        """Keep ``values``, ``[M]`` over the tokens of ``rows`` end to end."""
        at = 0
        for row in rows.tolist():
            held = self._held(row)
            held[1:] = values[at : at + len(held) - 1].view(np.uint32)
            held[0] = _check(held[1:], row)
            at += len(held) - 1
        if isinstance(self._words, np.memmap):
            self._words.flush()

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[M]``, the tokens of ``rows`` end to end."""
        return np.concatenate([self._held(row)[1:] for row in rows.tolist()]).view(np.float32)

    def _held(self, row: int) -> npt.NDArray[np.uint32]:
        return self._words[self._starts[row] : self._starts[row + 1]]


def _check(words: npt.NDArray[np.uint32], row: int) -> int:
    """XXH32 seeded with the row, so that another's numbers do not pass; never 0, which is no entry."""
    return xxhash.xxh32_intdigest(words.tobytes(), row) or 1
