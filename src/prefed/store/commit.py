"""Commits of a run, which of them it keeps, the state files they refer to, and counts of round starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from prefed.core import files
from prefed.core.plugins import version_of
from prefed.core.strict_settings import StrictModel

FORMAT = 1
"""Version of the layout of run directories. Each commit has it, next to the version of prefed."""
_VERSIONED = re.compile(r"(.+)@(\d{6,})\.safetensors")


class StoreError(RuntimeError):
    """A run directory is in use, damaged, or not the expected one."""


def damaged(path: Path, why: object) -> StoreError:
    """The error for a file that does not have its original contents."""
    advice = "restore it from a copy, or start a new run with another --out"
    return StoreError(f"{path} is damaged: {why}; {advice}")


def missing_best(run: Path, number: int) -> StoreError:
    """The error if the commit of the best round is missing."""
    path = _commit_path(run / "checkpoint", number)
    return StoreError(f"{run} is damaged: the commit of its best round {number} is missing; restore {path}")


class CheckpointConfig(StrictModel):
    """Commits that a run keeps besides the last, from which `prefed forget` can replay."""

    keep: Literal["all", "log"] | Annotated[int, Field(ge=1)] = Field(
        "log",
        description="all; the newest commits, by number; or log: about 2·log2(rounds) of them, so that a "
        "replay computes at most twice the rounds since any given one",
    )

    def keeps(self, number: int, last: int) -> bool:
        """Whether the commit of round ``number`` is kept after round ``last``.

        With ``"log"``, a round is kept up to the age of 4 · (p - 1), where p is the largest power of two that
        divides it. The d + 1 rounds of ages d to 2d include a multiple of some p > (d + 1) / 2, and
        2d <= 4 · (p - 1).

        >>> [number for number in range(1, 41) if CheckpointConfig(keep="log").keeps(number, 40)]
        [16, 24, 28, 32, 36, 38, 40]
        >>> [number for number in range(1, 41) if CheckpointConfig(keep=2).keeps(number, 40)]
        [39, 40]
        """
        if self.keep == "log":
            return last - number <= 4 * ((number & -number) - 1)
        return self.keep == "all" or last - number < self.keep


@dataclass(frozen=True)
class Digests:
    """Digests (:func:`prefed.core.files.digest`) of the files of a commit.

    Attributes:
        server: digest of the server's state.
        rounds: digest of the committed lines of ``rounds.jsonl``.
        clients: file name of a client → digest of its private state.
        past: earlier round, as text → digest of the server's state after it, if later uploads start from it.
        nodes: digest of the states of nodes, in a run without a server.
    """

    server: str | None = None
    rounds: str | None = None
    clients: Mapping[str, str] = field(default_factory=dict)
    past: Mapping[str, str | None] = field(default_factory=dict)
    nodes: str | None = None


@dataclass(frozen=True)
class Commit:
    """The contents of ``COMMIT.json``.

    Attributes:
        round: the last committed round; 0 before the first.
        totals: sums over the committed rounds, e.g. ``bytes_up``.
        fingerprint: digests of the run's inputs, e.g. its data.
        settings: digest of the settings with which the run started; ``None`` if it was not given.
        digests: digests of the files of the commit.
        private: file name of each client with a private state → the round in which it was written.
        best: early-stopping state, with the best round in ``round`` (0 before the first), whose commit and
            states are kept; ``None`` if only the last round is kept.
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
        """The best round, which is kept in addition to the last; 0 for none."""
        return 0 if self.best is None else int(self.best["round"])


def read_commit(folder: Path, kept: int | None = None) -> Commit | None:
    """The commit in a run's ``checkpoint`` folder; ``None`` before the first.

    Args:
        kept: round of an earlier commit to read instead.

    Raises:
        StoreError: it is damaged or of another format version.
    """
    path = _commit_path(folder, kept)
    try:
        data = path.read_bytes()
        # Before its digest: another format may compute digests in another way.
        _check_format(path, json.loads(data))
        content = files.loads_with_digest(data)
        fields = {name: content[name] for name in ("round", "totals", "fingerprint", "settings", "private")}
        if any("/" in name or "\\" in name for name in fields["private"]):
            raise ValueError("a client's state is named by a path")
        return Commit(**fields, digests=Digests(**content["digests"]), best=content.get("best"))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, error) from error


def _check_format(path: Path, content: Mapping[str, Any]) -> None:
    if content["format"] != FORMAT:
        raise StoreError(
            f"{path} has format {content['format']}, and prefed {version_of('prefed')} reads format {FORMAT}"
            f": use the prefed that wrote it, {content.get('prefed', 'whose version is not recorded')}"
        )


def write_commit(folder: Path, commit: Commit, kept: int | None = None) -> None:
    """Replace ``COMMIT.json``, which commits a round.

    Only the owner may read it, because digests reveal whether two private states are equal.

    Args:
        kept: if given, the round of the commit, which is written to its own file and kept.
    """
    content = vars(commit) | {"digests": vars(commit.digests)}
    if commit.best is None:
        del content["best"]
    data = files.dumps_with_digest({"format": FORMAT, "prefed": version_of("prefed"), **content}, indent=1)
    files.write(_commit_path(folder, kept), data, mode=0o600)


def kept_commits(folder: Path) -> dict[int, Path]:
    """Round → file of each kept commit."""
    matches = ((re.fullmatch(r"COMMIT@(\d{6,})\.json", path.name), path) for path in folder.glob("COMMIT@*"))
    return {int(match[1]): path for match, path in matches if match}


def _commit_path(folder: Path, kept: int | None) -> Path:
    return folder / ("COMMIT.json" if kept is None else f"COMMIT@{kept:06d}.json")


def path_of(folder: Path, name: str, number: int) -> Path:
    """The file of a state after round ``number``."""
    return folder / f"{name}@{number:06d}.safetensors"


def keep_versions(run: Path, folder: Path, versions: Iterable[tuple[str, int]], whose: str) -> None:
    """Remove all states in ``folder`` except ``versions``.

    Args:
        versions: name and round of each state to keep.
        whose: owner of the states, for the message.

    Raises:
        StoreError: one of ``versions`` is missing; nothing is removed.
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
    """Read the file of a state.

    Raises:
        StoreError: its digest is not ``digest``.
    """
    data = path.read_bytes()
    if files.digest(data) != digest:
        raise damaged(path, f"its {len(data):,} bytes do not match their digest")
    return data


def _files_in(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield name, round and file of every state in ``folder``."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if match := _VERSIONED.fullmatch(entry.name):
            yield match[1], int(match[2]), Path(entry.path)


class RoundStarts:
    """Counts how often each round was started, in ``checkpoint/starts.json``.

    An interrupted round is repeated. If its noise is not drawn from the seed, clients release the same values
    with new noise, which the privacy accountant must count. The file is written before clients are asked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, number: int) -> None:
        """Count a start of a round. On return it is on disk."""
        times = self.times()
        times[number] = times.get(number, 0) + 1
        content = {"starts": {str(key): value for key, value in sorted(times.items())}}
        files.write(self._path, json.dumps(content).encode(), mode=0o600)

    def times(self) -> dict[int, int]:
        """Round → number of starts; empty if nothing was counted.

        Raises:
            StoreError: the file is damaged.
        """
        if (older := self._path.with_name("begun.json")).exists():
            raise StoreError(
                f"{older} is of prefed 0.1.0, whose counts this version does not read: finish the run with "
                "that version, or start a new one with another --out"
            )
        if not self._path.exists():
            return {}
        try:
            starts = json.loads(self._path.read_bytes())["starts"]
            return {int(key): int(value) for key, value in starts.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{self._path} is damaged: {error}; without it the privacy loss is unknown: restore it from "
                "a copy, or start a new run with another --out"
            ) from error
