"""What counts of a run's directory, read: the commit, and the states and records that it names."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefed import files
from prefed.core import State
from prefed.wire import WireError, decode_state

__all__ = [
    "FORMAT",
    "Commit",
    "Digests",
    "RunReader",
    "StoreError",
    "checked",
    "client_file",
    "path_of",
    "plain",
    "private_of",
    "read_commit",
    "records_in",
    "versions_in",
    "write_commit",
]

FORMAT = 1
_VERSIONED = re.compile(r"(.+)@(\d{6,})\.safetensors")
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")


class StoreError(RuntimeError):
    """A run directory that is in use, damaged, or not what was asked for; the message says what to do."""


@dataclass(frozen=True)
class Digests:
    """Digests (:func:`prefed.files.digest`) of the files that a commit names.

    Attributes:
        server: of the server's state.
        rounds: of the committed lines of ``rounds.jsonl``.
        clients: file name of a client → of its private state.
    """

    server: str | None = None
    rounds: str | None = None
    clients: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """What ``COMMIT.json`` holds.

    Attributes:
        round: the last committed round; 0 before the first.
        totals: sums over the committed rounds, e.g. ``bytes_up``.
        fingerprint: digests of what the run was made of, e.g. its data.
        settings: digest of the settings that the run was begun with; ``None`` where an earlier version
            did not write it down, as with ``private``.
        digests: of the files that the commit names, as far as they are known.
        private: file name of every client that has a private state → the round it was written in.
    """

    round: int
    totals: Mapping[str, float] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    settings: str | None = None
    digests: Digests = field(default_factory=Digests)
    private: Mapping[str, int] | None = None


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


class RunReader:
    """A run directory to read from, also while the run goes on.

    Args:
        path: the run directory.

    Raises:
        StoreError: nothing was ever committed there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._folder = self.path / "checkpoint"
        self._look()

    def _look(self) -> None:
        commit = read_commit(self._folder)
        if commit is None:
            raise StoreError(f"{self.path} holds no run: {self._folder / 'COMMIT.json'} is missing")
        self.commit = commit
        self._private = private_of(self._folder / "clients", commit)

    def server(self) -> State:
        """The server's state after the last committed round.

        Raises:
            StoreError: it is missing or damaged.
        """
        return decode_state(self._read(None))

    def client(self, client: str) -> State | None:
        """A client's private state after its last visit; ``None`` if it still has its first.

        Raises:
            StoreError: it is missing or damaged.
        """
        name = client_file(client)
        return decode_state(self._read(name)) if name in self._private else None

    def rounds(self) -> list[dict[str, Any]]:
        """The records of the committed rounds.

        Raises:
            StoreError: one is missing or damaged.
        """
        return [record for record, _ in records_in(self.path / "rounds.jsonl", self.commit)]

    def config(self) -> dict[str, Any]:
        """The experiment as it was run."""
        return tomllib.loads((self.path / "config.toml").read_text("utf-8"))

    def summary(self) -> dict[str, Any] | None:
        """``summary.json``; ``None`` while the run is not finished."""
        path = self.path / "summary.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def _read(self, name: str | None) -> bytes:
        """A client's state by its file name, or the server's."""
        while True:
            commit = self.commit
            digests = commit.digests
            if name is None:
                path = path_of(self._folder, "server", commit.round)
                digest = digests.server
            else:
                path = path_of(self._folder / "clients", name, self._private[name])
                digest = digests.clients.get(name)
            try:
                return checked(path, path.read_bytes(), digest)
            except FileNotFoundError:
                # A run that goes on has committed a newer version and deleted this one: look again.
                self._look()
                if self.commit.round == commit.round:
                    raise StoreError(f"{self.path} is damaged: {path} is missing") from None


def checked(path: Path, data: bytes, digest: str | None) -> bytes:
    """``data``, if it is what was written to a state's file.

    Args:
        path: the file.
        data: what it holds.
        digest: of what was written; ``None`` where an earlier version wrote none, and then the state has to
            open at least.

    Raises:
        StoreError: it is damaged.
    """
    wrong = ""
    if digest is None:
        try:
            decode_state(data)
        except WireError as error:
            wrong = str(error)
    elif files.digest(data) != digest:
        wrong = f"its {len(data):,} bytes are not those that were written"
    if wrong:
        raise StoreError(
            f"{path} is damaged: {wrong}; put a copy of it back, or start a new run with another --out"
        )
    return data


def plain(value: Any) -> Any:
    """``value`` as JSON has it: mappings as objects, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def path_of(folder: Path, name: str, number: int) -> Path:
    """The file of round ``number``'s version of a state."""
    return folder / f"{name}@{number:06d}.safetensors"


def versions_in(folder: Path) -> dict[str, dict[Path, int]]:
    """Name → the files that hold a version of it, each with its round."""
    found: dict[str, dict[Path, int]] = {}
    if folder.is_dir():
        for entry in os.scandir(folder):
            match = _VERSIONED.fullmatch(entry.name)
            if match:
                found.setdefault(match[1], {})[Path(entry.path)] = int(match[2])
    return found


def private_of(folder: Path, commit: Commit) -> Mapping[str, int]:
    """What counts of clients' private states: file name → the round it was written in."""
    if commit.private is not None:
        return commit.private
    held = {
        name: [number for number in paths.values() if number <= commit.round]
        for name, paths in versions_in(folder).items()
    }
    return {name: max(numbers) for name, numbers in held.items() if numbers}


def read_commit(folder: Path) -> Commit | None:
    """The commit in a run's ``checkpoint`` folder; ``None`` before the first.

    Raises:
        StoreError: it is damaged, or of another version of the format.
    """
    path = folder / "COMMIT.json"
    try:
        held = files.loads_with_digest(path.read_bytes())
        if held["format"] != FORMAT:
            raise StoreError(f"{path} was written by another version of prefed (format {held['format']})")
        return Commit(
            round=held["round"],
            totals=held["totals"],
            fingerprint=held["fingerprint"],
            settings=held.get("settings"),
            digests=Digests(**held.get("digests", {})),
            private=held.get("private"),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged: {error}; put a copy of it back, or start a new run with another --out"
        ) from error


def write_commit(folder: Path, commit: Commit) -> None:
    """Replace ``COMMIT.json``: the one step that makes a round count."""
    held = vars(commit) | {"digests": vars(commit.digests)}
    files.write(folder / "COMMIT.json", files.dumps_with_digest({"format": FORMAT, **held}, indent=1))


def records_in(path: Path, commit: Commit) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The committed records of a round log, one at a time, each with the line that it stands in.

    Raises:
        StoreError: (on the way) one is missing or damaged.
    """
    written = files.Hasher()
    with path.open("rb") if path.exists() else io.BytesIO() as lines:
        for number in range(1, commit.round + 1):
            line = lines.readline()
            try:
                record = json.loads(line)
                if record["round"] != number:
                    raise ValueError(f"found round {record['round']}")
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(
                    f"{path} is damaged: no record of round {number} in line {number}"
                ) from error
            written.update(line)
            yield record, line
    if commit.digests.rounds not in (None, written.hexdigest()):
        raise StoreError(
            f"{path} is damaged: its first {commit.round} lines are not those that were written; "
            "put a copy of it back, or start a new run with another --out"
        )
