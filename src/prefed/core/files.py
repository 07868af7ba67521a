"""Crash-safe file writes, and digests that detect damage.

A file is written under a temporary name, synced to disk (fsync) and renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

TEMPORARY = ".partial"
"""Suffix of a file that is still being written."""

Hasher = xxhash.xxh3_64
"""Incremental version of :func:`digest`."""

_BLOCK = 1 << 18
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class WriteError(OSError):
    """A file cannot be written; the message contains its name and the number of bytes."""


class DamagedError(ValueError):
    """The content of a file differs from what was written."""


def digest(data: bytes) -> str:
    """Return the 64-bit XXH3 of ``data`` in hexadecimal. It detects accidental damage, not forgery.

    >>> digest(b"prefed")
    '552edf5d42cb04e3'
    """
    return xxhash.xxh3_64_hexdigest(data)


def file_digest(path: Path) -> str:
    """Return :func:`digest` of a file, read block by block."""
    hasher, block = Hasher(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(block):
            hasher.update(block[:size])
    return hasher.hexdigest()


def dumps_with_digest(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return ``content`` as a JSON object with a ``digest`` over all other keys."""
    whole = {**content, "digest": digest(_compact(content))}
    return json.dumps(whole, indent=indent, ensure_ascii=False).encode()


def loads_with_digest(data: bytes) -> dict[str, Any]:
    """Load JSON from :func:`dumps_with_digest`. An object without ``digest`` is not checked.

    Raises:
        DamagedError: the data is not a JSON object, or its digest is wrong.
    """
    try:
        content = json.loads(data)
        expected = content.pop("digest", None) if isinstance(content, dict) else None
    except (ValueError, RecursionError) as error:
        raise DamagedError(str(error)) from error
    if not isinstance(content, dict):
        raise DamagedError("it is not a JSON object")
    if expected is not None and expected != digest(_compact(content)):
        raise DamagedError("its content does not match its digest")
    return content


def _compact(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def write(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Write ``data`` to ``path``. Other processes see either the old or the complete new content.

    Args:
        durable: sync the data to disk before returning. Otherwise call :func:`sync` later.
        mode: permissions of a new file, before the umask.

    Raises:
        WriteError: the file cannot be written, e.g. the disk is full.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode) as handle:
            _write_all(handle, data)
            if durable:
                os.fsync(handle)
        os.replace(temporary, path)  # noqa: PTH105 - one family of calls, so that tests can fail each
    except OSError as error:
        # Free the space of the unfinished file for writes after this error.
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise write_error(path, len(data), error) from error
    if durable:
        sync(path.parent)


def append(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Append ``data`` to ``path``, creating it if needed, and sync it to disk. Raises as :func:`write`."""
    try:
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, mode) as handle:
            # An empty file may be new, or its creator was killed before the folder was synced.
            empty = os.fstat(handle).st_size == 0
            _write_all(handle, data)
            os.fsync(handle)
    except OSError as error:
        raise write_error(path, len(data), error) from error
    if empty:
        sync(path.parent)


def allocate(path: Path, size: int) -> None:
    """Resize ``path`` to ``size`` bytes and reserve disk space. Existing bytes are kept; new bytes are 0.

    Only its owner can read a new file. Several processes may call this at once, even while one of them
    writes. Raises as :func:`write`.
    """
    try:
        with _opened(path, os.O_RDWR | os.O_CREAT, 0o600) as handle:
            if os.fstat(handle).st_size > size:
                os.ftruncate(handle, size)
            # On a full disk, a write through a memory map would kill the process.
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)
            elif os.fstat(handle).st_size < size:
                os.ftruncate(handle, size)
    except OSError as error:
        raise write_error(path, size, error) from error


def write_error(path: Path, size: int, error: Exception) -> WriteError:
    """Return a :class:`WriteError` for ``error``, with the path, and with advice if the disk is full.

    Args:
        size: number of bytes to write; for a folder, bytes written so far.
        error: the cause. If it has no ``errno``, its text is searched for the number of an OS error.
    """
    number = getattr(error, "errno", None)
    match = re.search(r"\(os error (\d+)\)", str(error))
    if number is None and match:
        number = int(match[1])
    message = f"cannot write {path} ({size:,} bytes): {getattr(error, 'strerror', None) or error}"
    if number in _FULL:
        free = ""
        with contextlib.suppress(OSError):
            free = f", which has {shutil.disk_usage(path.parent).free / 2**20:,.0f} MiB free"
        message += f"; free up space on the disk of {path.parent}{free}"
    result = WriteError(message)
    if number is not None:
        result.errno = number
    return result


def read_lines(path: Path) -> list[str]:
    """Read a text file in UTF-8, with or without a byte order mark, as lines without their ends.

    Raises:
        ValueError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; save it as UTF-8") from None


def folder_size(folder: Path) -> int:
    """Return the number of bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def private_folder(folder: Path) -> None:
    """Create ``folder`` if needed, and make it accessible to its owner only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def is_running(process: int) -> bool:
    """Return whether a process with this id runs on this machine."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def truncate(path: Path, size: int) -> None:
    """Truncate ``path`` to ``size`` bytes. Raises as :func:`write`, and if ``path`` is a link."""
    if path.is_symlink():
        raise write_error(path, size, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))
    os.truncate(path, size)


def sync(path: Path) -> None:
    """Sync the content of a file, or the entries of a folder, to disk."""
    with _opened(path, os.O_RDONLY) as handle:
        os.fsync(handle)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which is created if needed, against other users of this function; wait if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder, os.O_RDONLY) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def replace(path: Path, to: Path) -> None:
    """Rename ``path`` to ``to``, replacing an existing file."""
    os.replace(path, to)  # noqa: PTH105


def exchange(folder: Path, other: Path, aside: Path) -> None:
    """Swap two folders in one step. Where the file system cannot, ``other`` moves to ``aside`` before."""
    library, here = ctypes.CDLL(None, use_errno=True), -100
    names = os.fsencode(folder), os.fsencode(other)
    swapped = hasattr(library, "renameat2") and not library.renameat2(here, names[0], here, names[1], 2)
    if not swapped:
        replace(other, aside)
        replace(folder, other)
    sync(folder.parent)
    sync(other.parent)


def remove(path: Path) -> None:
    """Delete ``path`` if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


@contextlib.contextmanager
def _opened(path: Path, flags: int, mode: int = 0o666) -> Iterator[int]:
    handle = os.open(path, flags, mode)
    try:
        yield handle
    finally:
        os.close(handle)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
