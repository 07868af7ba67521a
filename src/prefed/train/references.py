"""The frozen reference's log-probabilities, computed once per record and kept with the run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["References"]

Rows = npt.NDArray[np.int64]


class References:
    """log π_ref of both responses of every record, NaN or 0 where not computed yet.

    A file system may give back zeros for a page that was lost with the power. A response that is certain, the
    one of which 0 is true, is computed anew each time it is asked for.

    Args:
        records: number of records.
        folder: where to keep them; ``None`` keeps them in memory.
        name: tells apart caches of different models or data in one folder.
    """

    def __init__(self, records: int, folder: Path | None = None, name: str = "reference") -> None:
        if folder is None:
            self._values: npt.NDArray[np.float32] = np.full((records, 2), np.nan, np.float32)
            return
        path = folder / f"{name}.f32"
        if not path.exists() or path.stat().st_size != records * 8:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
            np.full((records, 2), np.nan, np.float32).tofile(temporary)
            temporary.replace(path)
        self._values = np.memmap(path, np.float32, "r+", shape=(records, 2))

    def missing(self, rows: Rows) -> bool:
        """Whether any of ``rows`` is not computed yet."""
        values = self._values[rows]
        return bool((np.isnan(values) | (values == 0)).any())

    def put(self, rows: Rows, values: npt.NDArray[np.float32]) -> None:
        """Keep ``values [len(rows), 2]``, on the disk if there is a folder."""
        self._values[rows] = values
        if isinstance(self._values, np.memmap):
            self._values.flush()

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[len(rows), 2]``, chosen then rejected."""
        return np.asarray(self._values[rows])
