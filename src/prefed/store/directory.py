"""A run's directory before it is written to: whether it may be, and by one process alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path

from prefed import files
from prefed.core.text import did_you_mean
from prefed.store.commit import StoreError

_START = {
    "config.toml",
    "cache",
    "checkpoint/LOCK",
    "checkpoint/COMMIT.json",
    "checkpoint/server@000000.safetensors",
}
"""What a start leaves that came to no round."""


def refuse_foreign(run: Path, resume: bool) -> None:
    """Refuse a directory that holds something else than what was asked for. Nothing in it is changed.

    Raises:
        StoreError: it holds a run and ``resume`` is off, no run and ``resume`` is on, a run without its
            checkpoint, or somebody's files.
    """
    names = _contents(run)
    begun = bool(names & {"checkpoint/LOCK", "checkpoint/COMMIT.json"})
    # A process killed as it began leaves an empty checkpoint/. Later the lock says that the experiment
    # beside it is a run's and not somebody's only copy.
    if (begun and names <= _START) or (not names and ((run / "checkpoint").is_dir() or not resume)):
        return
    if begun and resume:
        return
    if begun:
        raise StoreError(
            f"{run} is not empty; --resume goes on with the run in it, another --out starts a new one"
        )
    if {"rounds.jsonl", "summary.json"} & names:
        raise StoreError(
            f"{run} has lost its checkpoint/, without which its run cannot go on; "
            "put it back, or start a new run with another --out"
        )
    if not names:
        raise StoreError(f"{run} holds no run to resume{_near(run)}; without --resume a new one starts there")
    near = _near(run) if resume else ""
    raise StoreError(f"{run} is not empty and holds no run, but {min(names)!r}{near}; choose another --out")


def make(run: Path) -> bool:
    """Create the directory, and keep its private folder for its owner. Gives whether it was not there."""
    new = not run.exists()
    try:
        if new:
            # In one step with its checkpoint/, by which --resume knows a run that was killed as it began.
            temporary = run.with_name(run.name + files.TEMPORARY)
            (temporary / "checkpoint").mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                temporary.rename(run)
        files.private_folder(run / "checkpoint" / "clients")
    except OSError as error:
        why = error.strerror or error
        raise files.WriteError(f"cannot write into {run}: {why}; choose another --out") from error
    return new


def take_back(run: Path) -> None:
    """Remove a directory that :func:`make` created and in which no run has begun."""
    shutil.rmtree(run / "cache", ignore_errors=True)
    for name in ("config.toml", "checkpoint/server@000000.safetensors", "checkpoint/LOCK"):
        files.remove(run / name)
    # A folder goes only if it is empty: anything else in it is somebody's.
    with contextlib.suppress(OSError):
        for folder in (run / "checkpoint" / "clients", run / "checkpoint", run):
            folder.rmdir()


def lock(run: Path) -> int:
    """Hold the directory's lock file until the returned handle is closed.

    The system releases the lock when the process ends, however it ends.

    Raises:
        StoreError: another process holds it, or the file system has no locks.
    """
    path = run / "checkpoint" / "LOCK"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise StoreError(f"{run} is in use by {holder}; wait for it, or choose another --out") from None
    except OSError as error:
        os.close(handle)
        raise StoreError(
            f"{run} cannot be kept to one process ({error.strerror}), as on some network file systems; "
            "choose another --out"
        ) from error
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def _near(path: Path) -> str:
    """The runs beside ``path`` with a similar name, or else the first few: part of a message."""
    folder = path.parent
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    runs = [entry.name for entry in entries if entry != path and (entry / "checkpoint").is_dir()]
    beside = f" (the runs beside it: {', '.join(runs[:5])})" if runs else ""
    return did_you_mean(path.name, runs, most=3, show=lambda name: str(folder / name)) or beside


def _contents(run: Path) -> set[str]:
    """What lies in a directory, apart from the folders that opening it for a run creates."""
    names: set[str] = set()
    for folder, prefix in ((run, ""), (run / "checkpoint", "checkpoint/")):
        if folder.is_dir():
            names |= {prefix + path.name for path in folder.iterdir() if path.suffix != files.TEMPORARY}
    return names - {"checkpoint", "checkpoint/clients"}
