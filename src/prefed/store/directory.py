"""Checks, creates and locks a run directory, so that one process alone writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
from pathlib import Path

from prefed.core import files
from prefed.core.text import did_you_mean
from prefed.store.commit import StoreError

LOG = "run.log"
"""What happened in a run, for a person: no part of what is committed."""

_START = {
    LOG,
    "config.toml",
    "cache",
    "federation.json",
    "checkpoint/LOCK",
    "checkpoint/begun.json",
    "checkpoint/COMMIT.json",
    "checkpoint/COMMIT@000000.json",
    "checkpoint/server@000000.safetensors",
}
"""The files of a run that was started and has no round yet."""


def refuse_foreign(run: Path, resume: bool) -> None:
    """Refuse a directory that does not fit ``resume``. Nothing in it is changed.

    Raises:
        StoreError: it holds a run and ``resume`` is off, no run and ``resume`` is on, a run without its
            checkpoint, or somebody's files.
    """
    names = _contents(run)
    begun = bool(names & {"checkpoint/LOCK", "checkpoint/COMMIT.json"})
    # A process that is killed at its start leaves an empty checkpoint/. With a lock file, config.toml
    # belongs to a run. Otherwise config.toml may be the only copy of a user's file.
    if (begun and names <= _START) or (not names and ((run / "checkpoint").is_dir() or not resume)):
        return
    if begun and resume:
        return
    if begun:
        raise StoreError(
            f"{run} is not empty; resume the run in it (--resume, or resume=True), "
            "or choose another --out for a new one"
        )
    if {"rounds.jsonl", "summary.json"} & names:
        raise StoreError(
            f"{run} has no checkpoint/, without which the run cannot continue; "
            "restore it, or start a new run with another --out"
        )
    if not names:
        raise StoreError(
            f"{run} holds no run to resume{_near(run)}; without --resume (resume=True) a new one starts in it"
        )
    near = _near(run) if resume else ""
    raise StoreError(
        f"{run} is not empty and contains {min(names)!r} instead of a run{near}; choose another --out"
    )


def holds_run(run: Path) -> bool:
    """Whether a run was started in a directory, even if it was killed before anything was committed."""
    return (run / "checkpoint").is_dir()


def make(run: Path) -> bool:
    """Create the directory with its private folder. Returns whether the directory is new."""
    new = not run.exists()
    try:
        if new:
            # The directory appears together with its checkpoint/. By that --resume recognises a run that was
            # killed at its start.
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
    for name in (
        "config.toml",
        LOG,
        "checkpoint/server@000000.safetensors",
        "checkpoint/begun.json",
        "checkpoint/LOCK",
    ):
        files.remove(run / name)
    # Only empty folders are removed: other files may be a user's.
    with contextlib.suppress(OSError):
        for folder in (run / "checkpoint" / "clients", run / "checkpoint", run):
            folder.rmdir()


def lock(run: Path, remedy: str = "wait for it, or choose another --out") -> int:
    """Hold the directory's lock file until the returned handle is closed.

    The system also releases the lock when the process ends, for whatever reason.

    Args:
        remedy: what a person may do where another process holds it, for the message.

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
        raise StoreError(f"{run} is in use by {holder}; {remedy}") from None
    except OSError as error:
        os.close(handle)
        raise StoreError(
            f"{run} cannot be locked ({error.strerror}), as on some network file systems; "
            "choose another --out"
        ) from error
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def at_work(run: Path) -> bool:
    """Whether the process that locked a run last may still be there. On another machine nobody knows: yes."""
    try:
        text = (run / "checkpoint" / "LOCK").read_text(errors="replace")
    except FileNotFoundError:
        return False
    match = re.fullmatch(r"process (\d+) on (.*)", text.strip())
    if match is None or match[2] != socket.gethostname():
        return True
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _near(path: Path) -> str:
    """Part of a message: the runs beside ``path`` with a similar name, or else the first five."""
    folder = path.parent
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    runs = [entry.name for entry in entries if entry != path and (entry / "checkpoint").is_dir()]
    beside = f" (runs next to it: {', '.join(runs[:5])})" if runs else ""
    return did_you_mean(path.name, runs, most=3, show=lambda name: str(folder / name)) or beside


def _contents(run: Path) -> set[str]:
    """The names in a run directory, without the folders that :func:`make` creates."""
    names: set[str] = set()
    for folder, prefix in ((run, ""), (run / "checkpoint", "checkpoint/")):
        if folder.is_dir():
            names |= {prefix + path.name for path in folder.iterdir() if path.suffix != files.TEMPORARY}
    return names - {"checkpoint", "checkpoint/clients", "checkpoint/nodes"}
