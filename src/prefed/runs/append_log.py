"""Append-only files of JSON lines that a later process can continue."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from prefed.core import files
from prefed.runs.finished_run import RunError


class Journal:
    """Numbered rows: JSON objects with their number under ``"row"`` and a digest under ``"digest"``.

    Appended rows are synced to the disk. An incomplete last line from a killed process is removed. Only the
    owner can read the file, and only one process at a time can open it.

    Attributes:
        rows: number → row; the last one if a number occurs twice.

    Raises:
        RunError: another process has the file open, or a line is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[int, dict[str, Any]] = {}
        if not path.exists():
            files.private_folder(path.parent)
            files.write(path, b"", mode=0o600)
        self._handle: BinaryIO = path.open("rb")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._handle.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.close()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows and sync them to the disk."""
        # Lone surrogates, which an endpoint may return, cannot be encoded.
        texts = (json.dumps(dict(row), ensure_ascii=False).encode("utf-8", "replace") for row in rows)
        added = [json.loads(text) for text in texts]
        files.append(self._path, b"".join(files.dumps_with_digest(row) + b"\n" for row in added))
        self.rows |= {row["row"]: row for row in added}

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{self._path} is in use by another process; wait for it to finish") from None

    def _read(self) -> None:
        whole = 0
        for number, line in enumerate(self._handle, 1):
            if not line.endswith(b"\n"):
                files.truncate(self._path, whole)
                break
            whole += len(line)
            try:
                row = files.loads_with_digest(line)
                self.rows[int(row["row"])] = row
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(
                    f"{self._path}, line {number} is damaged ({error}); delete the line to compute it again"
                ) from error
