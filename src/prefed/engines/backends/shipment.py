"""What another machine needs of this one's files: packed into one array, unpacked once on each machine.

On a machine the files lie in a folder of the run's, in the system's folder for temporary files. Its owner
alone can read it. The run's processes there hold a lock on it as long as they live. So a folder that nobody
holds is left over from a run that was killed, and the next run removes it.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_HELD = "HELD"


def pack(shipped: Mapping[str, Path]) -> NDArray[np.uint8]:
    """Files and folders by name, as one array of bytes. For a link it holds what the link leads to."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", dereference=True) as archive:
        for name, path in shipped.items():
            archive.add(path, name)
    return np.frombuffer(stream.getbuffer(), np.uint8)


def unpack(name: str, fetch: Callable[[], NDArray[np.uint8]]) -> tuple[Path, int]:
    """The folder ``name`` of this machine, and a handle that holds it as long as it is open.

    Args:
        fetch: gives what :func:`pack` made. It is called if the folder is not there yet.

    Raises:
        PermissionError: somebody else owns the folder in which it would lie.
    """
    base = _base()
    with _locked(base):
        _remove_left_over(base)
        folder = base / name
        if not folder.exists():
            partial = folder.with_name(f"{name}.partial")
            partial.mkdir(mode=0o700)
            with tarfile.open(fileobj=io.BytesIO(fetch().data)) as archive:
                archive.extractall(partial, filter="data")
            (partial / _HELD).touch()
            partial.rename(folder)
        held = os.open(folder / _HELD, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)
    return folder, held


def _base() -> Path:
    """The folder of this machine's copies, of this user alone."""
    base = Path(tempfile.gettempdir(), f"prefed-ray-{os.getuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or base.is_symlink():
        raise PermissionError(
            f"{base}: copies of the run's data would lie here, and others can reach it; remove it"
        )
    return base


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """One process at a time is in here."""
    handle = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_left_over(base: Path) -> None:
    """Remove folders that no process holds."""
    for folder in base.iterdir():
        try:
            handle = os.open(folder / _HELD, os.O_RDONLY)
        except FileNotFoundError:  # whoever unpacked it was killed
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)
