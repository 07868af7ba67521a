"""What counts of a run: its commit, the states that it names, and how often rounds were started."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefed.core import files

FORMAT = 1
_VERSIONED = re.compile(r"(.+)@(\d{6,})\.safetensors")
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")


class StoreError(RuntimeError):
    """A run directory that is in use, damaged, or not the expected one; the message says what to do."""


def damaged(path: Path, why: object) -> StoreError:
    """What is raised where a file is not what was written."""
    advice = "restore it from a copy, or start a new run with another --out"
    return StoreError(f"{path} is damaged: {why}; {advice}")


def missing_best(run: Path, number: int) -> StoreError:
    """What is raised where the commit of the best round is gone."""
    path = _commit_path(run / "checkpoint", number)
    return StoreError(f"{run} is damaged: the commit of its best round {number} is missing; restore {path}")


@dataclass(frozen=True)
class Digests:
    """Digests (:func:`prefed.core.files.digest`) of the files that a commit names.

    Attributes:
        server: of the server's state.
        rounds: of the committed lines of ``rounds.jsonl``.
        clients: file name of a client → of its private state.
        past: number of a round, as text → of the server's state after it, where a later upload starts from
            it.
        nodes: of the states of nodes that have no server.
    """

    server: str | None = None
    rounds: str | None = None
    clients: Mapping[str, str] = field(default_factory=dict)
    past: Mapping[str, str | None] = field(default_factory=dict)
    nodes: str | None = None


@dataclass(frozen=True)
class Commit:
    """What ``COMMIT.json`` holds.

    Attributes:
        round: the last committed round; 0 before the first.
        totals: sums over the committed rounds, e.g. ``bytes_up``.
        fingerprint: digests of what the run was made of, e.g. its data.
        settings: digest of the settings that the run was begun with; ``None`` where it was begun with
            none.
        digests: of the files that the commit names.
        private: file name of every client that has a private state → the round it was written in.
        best: what the run's best round is found by, and in ``round`` its number, 0 before the first. Its
            commit and all that this names are kept. ``None`` where the last round is kept alone.
    """

    round: int
    totals: Mapping[str, float] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    settings: str | None = None
    digests: Digests = field(default_factory=Digests)
    private: Mapping[str, int] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None

    @property
    def best_round(self) -> int:
        """The round that is kept beside the last; 0 for none."""
        return 0 if self.best is None else int(self.best["round"])


def read_commit(folder: Path, kept: int | None = None) -> Commit | None:
    """The commit in a run's ``checkpoint`` folder; ``None`` before the first.

    Args:
        kept: an earlier round, whose commit is kept beside.

    Raises:
        StoreError: it is damaged, or of another version of the format.
    """
    path = _commit_path(folder, kept)
    try:
        content = files.loads_with_digest(path.read_bytes())
        if content["format"] != FORMAT:
            raise StoreError(f"{path} was written by another version of prefed (format {content['format']})")
        return Commit(
            round=content["round"],
            totals=content["totals"],
            fingerprint=content["fingerprint"],
            settings=content["settings"],
            digests=Digests(**content["digests"]),
            private=content["private"],
            best=content.get("best"),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error


def write_commit(folder: Path, commit: Commit, kept: int | None = None) -> None:
    """Replace ``COMMIT.json``. This one step makes a round count.

    Its owner alone may read it: digests tell whether two private states are equal.

    Args:
        kept: the round of the commit, to keep it beside ``COMMIT.json``: to go back to, or as the best.
    """
    content = vars(commit) | {"digests": vars(commit.digests)}
    if commit.best is None:
        del content["best"]
    data = files.dumps_with_digest({"format": FORMAT, **content}, indent=1)
    files.write(_commit_path(folder, kept), data, mode=0o600)


def kept_commits(folder: Path) -> dict[int, Path]:
    """Round → file of each commit that is kept beside the last one."""
    matches = ((re.fullmatch(r"COMMIT@(\d{6,})\.json", path.name), path) for path in folder.glob("COMMIT@*"))
    return {int(match[1]): path for match, path in matches if match}


def _commit_path(folder: Path, kept: int | None) -> Path:
    return folder / ("COMMIT.json" if kept is None else f"COMMIT@{kept:06d}.json")


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


def path_of(folder: Path, name: str, number: int) -> Path:
    """The file of round ``number``'s version of a state."""
    return folder / f"{name}@{number:06d}.safetensors"


def keep_versions(run: Path, folder: Path, versions: Iterable[tuple[str, int]], whose: str) -> None:
    """Remove every state in ``folder`` but those that count, by name and round; ``whose`` is for the message.

    Raises:
        StoreError: one that counts is missing; nothing is removed.
    """
    present = {path for _, _, path in _files_in(folder)}
    counting = {path_of(folder, name, number): number for name, number in versions}
    for path, number in counting.items():
        if path not in present:
            raise StoreError(
                f"{run} is damaged: {whose} state of round {number} is missing; "
                f"restore {path}, or start a new run with another --out"
            )
    for path in sorted(present - counting.keys()):
        files.remove(path)


def read_state(path: Path, digest: str | None) -> bytes:
    """The bytes of a state's file.

    Raises:
        StoreError: ``digest`` is not theirs.
    """
    data = path.read_bytes()
    if files.digest(data) != digest:
        raise damaged(path, f"its {len(data):,} bytes do not match their digest")
    return data


def _files_in(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Name, round and file of every version of a state in ``folder``."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if match := _VERSIONED.fullmatch(entry.name):
            yield match[1], int(match[2]), Path(entry.path)


class BegunRounds:
    """Round → how often it was begun, in ``checkpoint/begun.json``.

    A round that was stopped is done again. If its noise is not drawn from the seed, its clients then send
    other noise on the same numbers, and an accountant must count both. The file is written before they are
    asked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, number: int) -> None:
        """Count one more beginning of a round; on return it is on the disk."""
        times = self.times()
        times[number] = times.get(number, 0) + 1
        content = {"begun": {str(key): value for key, value in sorted(times.items())}}
        files.write(self._path, json.dumps(content).encode(), mode=0o600)

    def times(self) -> dict[int, int]:
        """Round → how often; empty where nothing was counted.

        Raises:
            StoreError: the file is damaged.
        """
        if not self._path.exists():
            return {}
        try:
            begun = json.loads(self._path.read_bytes())["begun"]
            return {int(key): int(value) for key, value in begun.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{self._path} is damaged: {error}; without it the number of answers per client is unknown: "
                "restore it from a copy, or start a new run with another --out"
            ) from error
