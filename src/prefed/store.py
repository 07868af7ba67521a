"""A run's directory. A round is committed whole or not at all.

::

    config.toml                the experiment, every default filled in
    rounds.jsonl               one object per committed round
    summary.json, adapters/    after the last round
    checkpoint/COMMIT.json                          names the last committed round
    checkpoint/server@000012.safetensors            the server's state after that round
    checkpoint/clients/ward-7@000011.safetensors    a client's private state after its last visit

States are written beside the older versions under the round's number; replacing ``COMMIT.json`` is
the one step that makes them count, and only then are the older versions deleted. Whatever is newer
than the commit is what a killed process left behind: opening the store removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from prefed import files
from prefed.core import State
from prefed.wire import decode_state

__all__ = ["Checkpoint", "Commit", "Store", "StoreError", "client_file"]

FORMAT = 1
_VERSIONED = re.compile(r"(.+)@(\d{6,})\.safetensors")
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")


class StoreError(RuntimeError):
    """A run directory that is in use, damaged, or not what was asked for; the message says what to do."""


@dataclass(frozen=True)
class Commit:
    """What ``COMMIT.json`` holds.

    Attributes:
        round: the last committed round; 0 before the first.
        totals: sums over the committed rounds, e.g. ``bytes_up``.
        fingerprint: digests of what the run was made of, e.g. its data.
    """

    round: int
    totals: Mapping[str, float] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)


def client_file(client: str) -> str:
    """A file name for a client id: percent-encoded, and never the same for two ids.

    Capitals are encoded too, because a file system that ignores case would take two clients' private
    states for one. A name that would be too long for a file system ends in its digest.

    >>> client_file("ward-7"), client_file("../Ward 7")
    ('ward-7', '%2E%2E%2F%57ard%207')
    >>> len(client_file("w" * 1000))
    151
    """
    data = client.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in data)
    return name if len(name) <= 150 else f"{name[:110]}+{hashlib.sha256(data).hexdigest()[:40]}"


class Checkpoint:
    """A run directory to read from, also while the run goes on.

    Args:
        path: the run directory.

    Raises:
        StoreError: nothing was ever committed there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._folder = self.path / "checkpoint"
        commit = _read_commit(self._folder)
        if commit is None:
            raise StoreError(f"{self.path} holds no run: {self._folder / 'COMMIT.json'} is missing")
        self.commit = commit

    def server(self) -> State:
        """The server's state after the last committed round."""
        return decode_state(self._newest(self._folder, "server") or b"")

    def client(self, client: str) -> State | None:
        """A client's private state after its last visit; ``None`` if it still has its first."""
        data = self._newest(self._folder / "clients", client_file(client))
        return None if data is None else decode_state(data)

    def rounds(self) -> list[dict[str, Any]]:
        """The records of the committed rounds."""
        return [record for record, _ in _records(self.path / "rounds.jsonl", self.commit.round)]

    def config(self) -> dict[str, Any]:
        """The experiment as it was run."""
        return tomllib.loads((self.path / "config.toml").read_text("utf-8"))

    def summary(self) -> dict[str, Any] | None:
        """``summary.json``; ``None`` while the run is not finished."""
        path = self.path / "summary.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def _newest(self, folder: Path, name: str) -> bytes | None:
        # A run that goes on may commit and delete a version between our two looks: look again.
        while True:
            commit = _read_commit(self._folder) or self.commit
            found = [number for number, _ in _versions(folder, name).get(name, ()) if number <= commit.round]
            if not found:
                return None
            try:
                return _path(folder, name, max(found)).read_bytes()
            except FileNotFoundError:
                continue


class Store:
    """A run directory to write to, held by one process at a time.

    Args:
        path: the run directory; created if it is not there.
        resume: go on with the run in ``path``. Without it ``path`` must be empty, or hold no more than a
            start that failed left there.

    Raises:
        StoreError: ``path`` is in use by another process, not empty, no run, or damaged.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._folder = self.path / "checkpoint"
        self._clients = self._folder / "clients"
        self._aside: set[str] = set()
        self._staged: set[str] = set()
        self._versions: dict[str, int] = {}
        self._refuse_foreign(resume)
        self._clients.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._folder / "LOCK", self.path)
        try:
            self._refuse_foreign(resume)
            self.commit: Commit | None = _read_commit(self._folder)
            self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
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
        """The stored experiment, if any."""
        path = self.path / "config.toml"
        return tomllib.loads(path.read_text("utf-8")) if path.exists() else None

    def write_config(self, text: str) -> None:
        """Put the resolved experiment in place."""
        files.write(self.path / "config.toml", text.encode())

    def begin(self, server: bytes, fingerprint: Mapping[str, str]) -> None:
        """Commit round 0: the server's first state and what the run is made of.

        On a resumed run nothing is written: its fingerprint is compared.

        Raises:
            StoreError: the run in this directory was made of something else.
        """
        if self.commit is None:
            self._publish(Commit(0, {}, dict(fingerprint)), server, None)
            return
        stored = self.commit.fingerprint
        both = sorted({*stored, *fingerprint})
        changed = [name for name in both if stored.get(name) != fingerprint.get(name)]
        if changed:
            raise StoreError(
                f"{self.path} cannot go on: its {' and '.join(changed)} changed since it began; "
                "put back what it was, or start a new run with another --out"
            )

    def server(self) -> bytes:
        """The server's state after the last committed round."""
        return _path(self._folder, "server", self.round).read_bytes()

    def client(self, client: str) -> bytes | None:
        """A client's private state, this round's if one was accepted; ``None`` if it has its first."""
        name = client_file(client)
        version = self.round + 1 if name in self._staged else self._versions.get(name)
        return None if version is None else _path(self._clients, name, version).read_bytes()

    def stage(self, client: str, state: bytes) -> None:
        """Write a client's next private state; it counts for nothing until it is accepted."""
        name = client_file(client)
        files.write(self._aside_path(name), state, durable=False, mode=0o600)
        self._aside.add(name)

    def accept(self, clients: Iterable[str]) -> None:
        """Keep what was staged for ``clients``, to be committed with the round, and drop the rest."""
        accepted = {client_file(client) for client in clients}
        for name in sorted(self._aside):
            if name in accepted:
                files.move(self._aside_path(name), _path(self._clients, name, self.round + 1))
                self._staged.add(name)
            else:
                files.remove(self._aside_path(name))
        self._aside = set()

    def _aside_path(self, name: str) -> Path:
        path = _path(self._clients, name, self.round + 1)
        return path.with_name(f"{path.name}.aside{files.TEMPORARY}")

    def finish_round(self, server: bytes, record: Mapping[str, Any], totals: Mapping[str, float]) -> None:
        """Commit the next round: ``server``, every accepted state, the round's record and the totals."""
        assert self.commit is not None, "begin() comes first"
        self._publish(Commit(self.round + 1, dict(totals), self.commit.fingerprint), server, record)

    def records(self) -> list[dict[str, Any]]:
        """The records of the committed rounds."""
        return [record for record, _ in _records(self.path / "rounds.jsonl", self.round)]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Put ``summary.json`` in place."""
        text = json.dumps(plain(summary), indent=2, allow_nan=False)
        files.write(self.path / "summary.json", text.encode() + b"\n")

    def reopen(self) -> None:
        """Take back ``summary.json``: the run goes on."""
        files.remove(self.path / "summary.json")

    def _publish(self, commit: Commit, server: bytes, record: Mapping[str, Any] | None) -> None:
        files.write(_path(self._folder, "server", commit.round), server, mode=0o600)
        if self._staged:
            for name in sorted(self._staged):
                files.sync(_path(self._clients, name, commit.round))
            files.sync(self._clients)
        if record is not None:
            line = json.dumps(plain(record), allow_nan=False)
            files.append(self.path / "rounds.jsonl", line.encode() + b"\n")
        data = json.dumps({"format": FORMAT, **asdict(commit)}, indent=1)
        files.write(self._folder / "COMMIT.json", data.encode())
        stale = [_path(self._clients, n, self._versions[n]) for n in self._staged if n in self._versions]
        if self.commit is not None:
            stale.append(_path(self._folder, "server", self.commit.round))
        self.commit = commit
        self._versions.update(dict.fromkeys(self._staged, commit.round))
        self._staged = set()
        for path in stale:
            files.remove(path)

    def _recover(self) -> None:
        """Remove what a killed process left, and learn which version each client has."""
        for folder in (self.path, self._folder, self._clients):
            for path in folder.glob(f"*{files.TEMPORARY}"):
                files.remove(path)
        committed = self.commit.round if self.commit else -1
        for folder in (self._folder, self._clients):
            for name, versions in _versions(folder).items():
                live = max((number for number, _ in versions if number <= committed), default=None)
                for number, path in versions:
                    if number != live:
                        files.remove(path)
                if folder is self._clients and live is not None:
                    self._versions[name] = live
        if self.commit and not _path(self._folder, "server", committed).exists():
            raise StoreError(f"{self.path} is damaged: the server's state of round {committed} is missing")
        log = self.path / "rounds.jsonl"
        kept = sum(size for _, size in _records(log, self.round))
        if log.exists() and log.stat().st_size > kept:
            files.truncate(log, kept)

    def _refuse_foreign(self, resume: bool) -> None:
        found = _contents(self.path)
        # The lock says that the experiment beside it is a run's and not somebody's only copy.
        if not found or (found <= {"config.toml", "cache"} and (self._folder / "LOCK").exists()):
            return
        if not resume:
            raise StoreError(
                f"{self.path} is not empty; --resume goes on with the run in it, "
                "another --out starts a new one"
            )
        if not any(name == "config.toml" or name.startswith("checkpoint/") for name in found):
            raise StoreError(f"{self.path} holds no run to resume; choose another --out")


def plain(value: Any) -> Any:
    """``value`` as JSON has it: mappings as objects, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _path(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}@{number:06d}.safetensors"


def _versions(folder: Path, only: str | None = None) -> dict[str, list[tuple[int, Path]]]:
    found: dict[str, list[tuple[int, Path]]] = {}
    if folder.is_dir():
        for entry in os.scandir(folder):
            match = _VERSIONED.fullmatch(entry.name)
            if match and only in (None, match[1]):
                found.setdefault(match[1], []).append((int(match[2]), Path(entry.path)))
    return found


def _read_commit(folder: Path) -> Commit | None:
    path = folder / "COMMIT.json"
    try:
        held = json.loads(path.read_bytes())
        if held["format"] != FORMAT:
            raise StoreError(f"{path} was written by another version of prefed (format {held['format']})")
        return Commit(held["round"], held["totals"], held["fingerprint"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {error}") from error


def _records(path: Path, rounds: int) -> list[tuple[dict[str, Any], int]]:
    """The first ``rounds`` records of a round log, each with its length in bytes."""
    found: list[tuple[dict[str, Any], int]] = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number in range(1, rounds + 1):
        try:
            record = json.loads(lines[number - 1])
            if record["round"] != number:
                raise ValueError(f"found round {record['round']}")
        except (IndexError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is damaged: no record of round {number} in line {number}") from error
        found.append((record, len(lines[number - 1])))
    return found


def _contents(run: Path) -> set[str]:
    """What lies in a directory, apart from what opening a store alone leaves there."""
    found: set[str] = set()
    for folder, prefix in ((run, ""), (run / "checkpoint", "checkpoint/")):
        if folder.is_dir():
            found |= {prefix + path.name for path in folder.iterdir() if path.suffix != files.TEMPORARY}
    return found - {"checkpoint", "checkpoint/LOCK", "checkpoint/clients"}


def _lock(path: Path, run: Path) -> int | None:
    """Hold ``path`` until closed; the system lets go of it when the process ends, however it ends."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise StoreError(f"{run} is in use by {holder}; wait for it, or choose another --out") from None
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle
