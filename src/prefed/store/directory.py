"""Checking, creating and locking run directories."""

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
"""The log of a run in plain text, which is not part of a commit."""

PAGE = "report.html"
"""The page of a run, which ``prefed report --watch`` writes even before the first commit."""

_START = (
    LOG,
    "config.toml",
    "cache",
    "data",
    "answers.jsonl",
    "federation.json",
    "checkpoint/starts.json",
    "checkpoint/COMMIT.json",
    "checkpoint/COMMIT@000000.json",
    "checkpoint/server@000000.safetensors",
    "checkpoint/LOCK",
)
"""The files of a run that has no round yet."""


def refuse_links(run: Path, but: str = "") -> None:
    """Check that no folder of a run is a link, since commands would write to another place.

    W&B's links to a folder next to them, such as ``wandb/latest-run``, are allowed.

    Args:
        but: a folder that may be one.

    Raises:
        StoreError: a folder is a link.
    """
    for folder in (*run.glob("*"), *run.glob("*/*")):
        if not (folder.is_symlink() and folder.is_dir()) or folder.relative_to(run).parts[0] == but:
            continue
        near = folder.resolve().parent == folder.parent.resolve()
        if not (folder.parent == run / "wandb" and near):
            raise StoreError(f"{folder} is a link to a folder; a run directory must contain its folders")


def refuse_foreign(run: Path, resume: bool) -> None:
    """Check that a directory is suitable for a new run or, with ``resume``, contains a run.

    Raises:
        StoreError: it contains a run without ``resume``, no run with ``resume``, a run without its
            checkpoint, other files, or a link to a folder.
    """
    refuse_links(run)
    names = _contents(run)
    started = bool(names & {"checkpoint/LOCK", "checkpoint/COMMIT.json"})
    # A process that is killed at its start leaves an empty checkpoint/. Without a lock file, config.toml may
    # be the only copy of a user's file.
    if (started and names <= {*_START}) or (not names and ((run / "checkpoint").is_dir() or not resume)):
        return
    if started and resume:
        return
    if started:
        raise StoreError(
            f"{run} already contains a run: resume it (--resume, or resume=True), or choose another --out"
        )
    if {"rounds.jsonl", "summary.json"} & names:
        raise StoreError(
            f"{run} has no checkpoint/, which is needed to continue the run: restore it from a copy, or "
            "start a new run with another --out"
        )
    if not names:
        raise StoreError(
            f"{run} contains no run to resume{_near(run)}; to start a new run, omit --resume (resume=True)"
        )
    near = _near(run) if resume else ""
    raise StoreError(
        f"{run} is not empty and contains {min(names)!r} instead of a run{near}; choose another --out"
    )


def holds_run(run: Path) -> bool:
    """Return whether a run was started in a directory, even if nothing was committed."""
    return (run / "checkpoint").is_dir()


def make(run: Path) -> bool:
    """Create a run directory with its private folder. Returns whether the directory is new."""
    new = not run.exists()
    try:
        if new:
            # The directory is created together with its checkpoint/, by which --resume recognises a run that
            # was killed at its start.
            temporary = run.with_name(run.name + files.TEMPORARY)
            (temporary / "checkpoint").mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                temporary.rename(run)
        files.private_folder(run / "checkpoint" / "clients")
    except OSError as error:
        why = error.strerror or error
        raise files.WriteError(f"cannot write to {run}: {why}; choose another --out") from error
    return new


def take_back(run: Path) -> None:
    """Remove a directory that :func:`make` created and in which no run has started."""
    for name in _START:
        if (run / name).is_dir():
            shutil.rmtree(run / name, ignore_errors=True)
        else:
            files.remove(run / name)
    # Only empty folders are removed, because other files may be the user's.
    with contextlib.suppress(OSError):
        for folder in (run / "checkpoint" / "clients", run / "checkpoint", run):
            folder.rmdir()


def lock(run: Path, remedy: str = "wait for it, or choose another --out") -> int:
    """Lock the directory until the returned handle is closed or the process ends.

    Args:
        remedy: advice for the message if another process holds the lock.

    Raises:
        StoreError: another process holds the lock, or the file system does not support locks.
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
            f"cannot lock {run} ({error.strerror}); some network file systems do not support locks: choose "
            "another --out"
        ) from error
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def at_work(run: Path) -> bool:
    """Return whether the process that last locked a run may be alive; always true for other machines."""
    try:
        text = (run / "checkpoint" / "LOCK").read_text(errors="replace")
    except FileNotFoundError:
        return False
    match = re.fullmatch(r"process (\d+) on (.*)", text.strip())
    if match is None or match[2] != socket.gethostname():
        return True
    return files.is_running(int(match[1]))


def _near(path: Path) -> str:
    """Part of a message: the runs next to ``path`` with a similar name, or else the first five."""
    folder = path.parent
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    runs = [entry.name for entry in entries if entry != path and (entry / "checkpoint").is_dir()]
    others = f" (runs next to it: {', '.join(runs[:5])})" if runs else ""
    return did_you_mean(path.name, runs, most=3, show=lambda name: str(folder / name)) or others


def _contents(run: Path) -> set[str]:
    """The names in a run directory, except the folders that :func:`make` creates."""
    names: set[str] = set()
    for folder, prefix in ((run, ""), (run / "checkpoint", "checkpoint/")):
        if folder.is_dir():
            names |= {prefix + path.name for path in folder.iterdir() if path.suffix != files.TEMPORARY}
    return names - {"checkpoint", "checkpoint/clients", "checkpoint/nodes", PAGE}
