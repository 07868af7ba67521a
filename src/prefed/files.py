"""Files that are whole or absent: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["append", "move", "remove", "sync", "truncate", "write"]

TEMPORARY = ".partial"
"""How the name of a file that is still being written ends."""


def write(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Put ``data`` at ``path``: a reader, or a later process, sees all of it or what was there before.

    Args:
        path: in an existing folder.
        data: the whole content.
        durable: have it on the disk, not in a cache, on return. Without, call :func:`sync` later.
        mode: permissions of a new file, less the umask.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        _all(handle, data)
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(temporary, path)  # noqa: PTH105 - one family of calls, so that tests can fail each
    if durable:
        sync(path.parent)


def append(path: Path, data: bytes) -> None:
    """Add ``data`` to the end of ``path``, creating it, and have it on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        # An empty file may be one whose creator was killed before its name was on the disk.
        empty = os.fstat(handle).st_size == 0
        _all(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)
    if empty:
        sync(path.parent)


def truncate(path: Path, size: int) -> None:
    """Cut ``path`` to its first ``size`` bytes."""
    os.truncate(path, size)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(path: Path, to: Path) -> None:
    """Give ``path`` another name in its folder, in the place of what has it."""
    os.replace(path, to)  # noqa: PTH105


def remove(path: Path) -> None:
    """Delete ``path`` if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


def _all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
