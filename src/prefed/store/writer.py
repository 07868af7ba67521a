"""A run's directory to write to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from prefed import files
from prefed.core.text import did_you_mean
from prefed.store.reader import (
    Commit,
    Digests,
    StoreError,
    checked,
    client_file,
    path_of,
    plain,
    private_of,
    read_commit,
    records_in,
    versions_in,
    write_commit,
)

__all__ = ["RunWriter"]


class RunWriter:
    """A run directory to write to, held by one process at a time.

    Attributes:
        commit: the last; ``None`` before the first.
        last: the record of the last committed round, the only one in memory.

    Args:
        path: the run directory; created if it is not there. What is private in it is its owner's to read.
        resume: go on with the run in ``path``, which must hold one, or what a start that was killed left of
            it. Without it ``path`` must be empty, or hold no more than a start that failed left there.

    Raises:
        StoreError: ``path`` is in use by another process, not empty, no run, or damaged.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._folder = self.path / "checkpoint"
        self._clients = self._folder / "clients"
        # File name of a client → the digest of its state: staged, accepted in this round, committed.
        self._staged: dict[str, str] = {}
        self._accepted: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        # File name of a client → the round of its committed state.
        self._versions: dict[str, int] = {}
        self._log = files.Hasher()
        self._settings: str | None = None
        self.last: dict[str, Any] | None = None
        self._refuse_foreign(resume)
        self._made = self._make()
        self._lock = _lock(self._folder / "LOCK", self.path)
        try:
            self._refuse_foreign(resume)
            self.commit: Commit | None = read_commit(self._folder)
            self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the directory. What is not committed is lost."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def round(self) -> int:
        """The last committed round; 0 before the first."""
        return self.commit.round if self.commit else 0

    def config(self) -> dict[str, Any] | None:
        """The stored experiment, if any.

        Raises:
            StoreError: it is damaged.
        """
        path = self.path / "config.toml"
        try:
            return tomllib.loads(path.read_text("utf-8")) if path.exists() else None
        except ValueError as error:
            raise StoreError(
                f"{path} is damaged: {error}; put a copy of it back, or start a new run with another --out"
            ) from error

    def write_config(self, text: str) -> None:
        """Put the resolved experiment in place."""
        files.write(self.path / "config.toml", text.encode())

    def begin(self, server: bytes, fingerprint: Mapping[str, str], settings: str | None = None) -> None:
        """Commit round 0: the server's first state and what the run is made of.

        On a resumed run nothing is written: its fingerprint is compared.

        Args:
            server: the server's first state.
            fingerprint: digests of what the run is made of.
            settings: the digest of its settings, for :attr:`Commit.settings`.

        Raises:
            StoreError: the run in this directory was made of something else.
        """
        self._settings = settings
        if self.commit is None:
            self._publish(0, {}, fingerprint, server, None)
            return
        stored = self.commit.fingerprint
        both = sorted({*stored, *fingerprint})
        changed = [name for name in both if stored.get(name) != fingerprint.get(name)]
        if changed:
            raise StoreError(
                f"{self.path} cannot go on: its {' and '.join(changed)} changed since it began; "
                "put back what it was, or start a new run with another --out"
            )

    def forget(self) -> None:
        """Undo the start of a run that has no round yet: another may begin in its place."""
        if self.commit is not None and self.round == 0:
            files.remove(self._folder / "COMMIT.json")
            files.remove(path_of(self._folder, "server", 0))
            self.commit = None

    def discard(self) -> None:
        """Undo a start that came to nothing: take back a directory that this store has made."""
        if self.commit is not None or not self._made:
            return
        shutil.rmtree(self.path / "cache", ignore_errors=True)
        for name in ("config.toml", "checkpoint/server@000000.safetensors", "checkpoint/LOCK"):
            files.remove(self.path / name)
        # A folder goes only if it is empty: whatever else lies there is somebody's.
        with contextlib.suppress(OSError):
            for folder in (self._clients, self._folder, self.path):
                folder.rmdir()

    def server(self) -> bytes:
        """The server's state after the last committed round; raises as :meth:`client`."""
        path = path_of(self._folder, "server", self.round)
        return checked(path, path.read_bytes(), self.commit.digests.server if self.commit else None)

    def client(self, client: str) -> bytes | None:
        """A client's private state, this round's if one was accepted; ``None`` if it has its first.

        Raises:
            StoreError: it is damaged.
        """
        name = client_file(client)
        version, digest = self._versions.get(name), self._digests.get(name)
        if name in self._accepted:
            version, digest = self.round + 1, self._accepted[name]
        if version is None:
            return None
        path = path_of(self._clients, name, version)
        return checked(path, path.read_bytes(), digest)

    def stage(self, client: str, state: bytes) -> None:
        """Write a client's next private state; it counts for nothing until it is accepted."""
        name = client_file(client)
        files.write(self._aside_path(name), state, durable=False, mode=0o600)
        self._staged[name] = files.digest(state)

    def accept(self, clients: Iterable[str]) -> None:
        """Keep what was staged for ``clients``, to be committed with the round, and drop the rest."""
        accepted = {client_file(client) for client in clients}
        for name in sorted(self._staged):
            if name in accepted:
                files.replace(self._aside_path(name), path_of(self._clients, name, self.round + 1))
                self._accepted[name] = self._staged[name]
            else:
                files.remove(self._aside_path(name))
        self._staged = {}

    def _aside_path(self, name: str) -> Path:
        path = path_of(self._clients, name, self.round + 1)
        return path.with_name(f"{path.name}.aside{files.TEMPORARY}")

    def finish_round(self, server: bytes, record: Mapping[str, Any], totals: Mapping[str, float]) -> None:
        """Commit the next round: ``server``, every accepted state, the round's record and the totals."""
        assert self.commit is not None, "begin() comes first"
        kept = plain(record)
        self._publish(self.round + 1, totals, self.commit.fingerprint, server, kept)
        self.last = kept

    def write_summary(self, summary: Mapping[str, Any], personal: Mapping[str, Any] | None = None) -> None:
        """Put ``summary.json`` in place.

        Args:
            summary: what it holds; everybody may read it.
            personal: figures from private states, every digit of them; they go to
                ``checkpoint/personal.json``, which its owner alone may read.
        """
        if personal:
            text = json.dumps(plain(personal), indent=1, allow_nan=False)
            files.write(self._folder / "personal.json", text.encode() + b"\n", mode=0o600)
        text = json.dumps(plain(summary), indent=2, allow_nan=False)
        files.write(self.path / "summary.json", text.encode() + b"\n")

    def reopen(self) -> None:
        """Take back ``summary.json`` and what was written with it: the run goes on."""
        files.remove(self.path / "summary.json")
        files.remove(self._folder / "personal.json")

    def _publish(
        self,
        number: int,
        totals: Mapping[str, float],
        fingerprint: Mapping[str, str],
        server: bytes,
        record: Mapping[str, Any] | None,
    ) -> None:
        files.write(path_of(self._folder, "server", number), server, mode=0o600)
        if self._accepted:
            for name in sorted(self._accepted):
                files.sync(path_of(self._clients, name, number))
            files.sync(self._clients)
        if record is not None:
            line = json.dumps(record, allow_nan=False).encode() + b"\n"
            files.append(self.path / "rounds.jsonl", line)
            self._log.update(line)
        digests = Digests(files.digest(server), self._log.hexdigest(), {**self._digests, **self._accepted})
        private = {**self._versions, **dict.fromkeys(self._accepted, number)}
        commit = Commit(number, dict(totals), dict(fingerprint), self._settings, digests, private)
        write_commit(self._folder, commit)
        stale = [path_of(self._clients, n, self._versions[n]) for n in self._accepted if n in self._versions]
        if self.commit is not None:
            stale.append(path_of(self._folder, "server", self.commit.round))
        self.commit = commit
        self._versions.update(dict.fromkeys(self._accepted, number))
        self._digests.update(self._accepted)
        self._accepted = {}
        for path in stale:
            files.remove(path)

    def _recover(self) -> None:
        """Remove what a killed process left, and learn which version each client has."""
        for folder in (self.path, self._folder, self._clients):
            for path in folder.glob(f"*{files.TEMPORARY}"):
                files.remove(path)
        log = self.path / "rounds.jsonl"
        if self.commit is None and log.exists() and log.stat().st_size:
            raise StoreError(
                f"{self.path} is damaged: rounds were run, and {self._folder / 'COMMIT.json'} is missing; "
                "put it back, or start a new run with another --out"
            )
        # Before anything older goes: the commit's own name may not be safe yet.
        files.sync(self._folder)
        live: dict[str, int] = {}
        if self.commit:
            live = {"server": self.round}
            self._versions = dict(private_of(self._clients, self.commit))
            self._digests = dict(self.commit.digests.clients)
        for folder, named in ((self._folder, live), (self._clients, self._versions)):
            held = versions_in(folder)
            for name, number in named.items():
                path = path_of(folder, name, number)
                if path not in held.get(name, ()):
                    whose = "the server's" if folder is self._folder else "a client's private"
                    raise StoreError(
                        f"{self.path} is damaged: {whose} state of round {number} is missing; "
                        f"put back {path}, or start a new run with another --out"
                    )
            for name, paths in held.items():
                for path in paths:
                    if name not in named or path != path_of(folder, name, named[name]):
                        files.remove(path)
        kept = 0
        for record, line in records_in(log, self.commit) if self.commit else ():
            self.last, kept = record, kept + len(line)
            self._log.update(line)
        if log.exists() and log.stat().st_size > kept:
            files.truncate(log, kept)

    def _refuse_foreign(self, resume: bool) -> None:
        """Refuse a directory that holds something else than what was asked for; nothing in it is touched.

        Raises:
            StoreError: it holds a run and ``resume`` is off, no run and ``resume`` is on, a run without its
                checkpoint, or somebody's files.
        """
        found = _contents(self.path)
        begun = bool(found & {"checkpoint/LOCK", "checkpoint/COMMIT.json"})
        # A process killed as it began leaves an empty checkpoint/; later the lock says that the experiment
        # beside it is a run's and not somebody's only copy.
        if (begun and found <= _START) or (not found and (self._folder.is_dir() or not resume)):
            return
        if begun and resume:
            return
        if begun:
            raise StoreError(
                f"{self.path} is not empty; --resume goes on with the run in it, "
                "another --out starts a new one"
            )
        if {"rounds.jsonl", "summary.json"} & found:
            raise StoreError(
                f"{self.path} has lost its checkpoint/, without which its run cannot go on; "
                "put it back, or start a new run with another --out"
            )
        if not found:
            raise StoreError(
                f"{self.path} holds no run to resume{_near(self.path)}; "
                "without --resume a new one starts there"
            )
        near = _near(self.path) if resume else ""
        raise StoreError(
            f"{self.path} is not empty and holds no run, but {min(found)!r}{near}; choose another --out"
        )

    def _make(self) -> bool:
        """Have the directory, and what is private in it its owner's to read; whether it was not there."""
        made = not self.path.exists()
        try:
            if made:
                # In one step with its checkpoint/, by which --resume knows a run that was killed as it began.
                new = self.path.with_name(self.path.name + files.TEMPORARY)
                (new / "checkpoint").mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):
                    new.rename(self.path)
            files.private_folder(self._clients)
        except OSError as error:
            why = error.strerror or error
            raise files.WriteError(f"cannot write into {self.path}: {why}; choose another --out") from error
        return made


_START = {
    "config.toml",
    "cache",
    "checkpoint/LOCK",
    "checkpoint/COMMIT.json",
    "checkpoint/server@000000.safetensors",
}
"""What a start leaves that came to no round."""


def _near(path: Path) -> str:
    """The runs beside ``path`` that are called like it, or else the first few: part of a message."""
    folder = path.parent
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    runs = [entry.name for entry in entries if entry != path and (entry / "checkpoint").is_dir()]
    beside = f" (the runs beside it: {', '.join(runs[:5])})" if runs else ""
    return did_you_mean(path.name, runs, most=3, show=lambda name: str(folder / name)) or beside


def _contents(run: Path) -> set[str]:
    """What lies in a directory, apart from the folders that opening a store alone leaves there."""
    found: set[str] = set()
    for folder, prefix in ((run, ""), (run / "checkpoint", "checkpoint/")):
        if folder.is_dir():
            found |= {prefix + path.name for path in folder.iterdir() if path.suffix != files.TEMPORARY}
    return found - {"checkpoint", "checkpoint/clients"}


def _lock(path: Path, run: Path) -> int | None:
    """Hold ``path`` until closed; the system lets go of it when the process ends, however it ends."""
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
