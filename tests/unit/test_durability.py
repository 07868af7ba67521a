"""What a power failure would take: at every commit, all that it names lies on the disk.

POSIX promises that a file's content outlives a power failure once the file is synced, and that its name
does once its folder is. A name changes when a file is created or renamed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefed import files
from prefed.core import State
from prefed.store import Store
from prefed.wire import encode

ROUNDS = 2


class Crash(BaseException):
    """A process that ends here."""


class Disk:
    """The ``os`` module, remembering what a power failure would take; it syncs nothing really.

    Attributes:
        contents: files whose content was written after their last fsync.
        names: files created or renamed after their folder's last fsync.
        touched: files written or renamed since the last commit.
        commits: at each replace onto ``COMMIT.json``, just before it: what was not safe, and ``touched``.
        early: what was deleted before the commit that allowed it was safe.
        left: changing calls until the process ends; it never does at 0.
    """

    def __init__(self, left: int = 0) -> None:
        self.contents: set[Path] = set()
        self.names: set[Path] = set()
        self.touched: set[Path] = set()
        self.commits: list[tuple[set[Path], set[Path]]] = []
        self.early: list[Path] = []
        self.left = left
        self._open: dict[int, Path] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _spend(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        self._spend()
        new = not path.exists()
        handle = os.open(path, flags, mode)
        self._open[handle] = path
        if new:
            self.names.add(path)
        if flags & os.O_TRUNC:
            self.contents.add(path)
        return handle

    def write(self, handle: int, data: bytes) -> int:
        self._spend()
        self.contents.add(self._open[handle])
        self.touched.add(self._open[handle])
        return os.write(handle, data)

    def truncate(self, path: Path, size: int) -> None:
        self._spend()
        self.contents.add(path)
        os.truncate(path, size)

    def fsync(self, handle: int) -> None:
        self._spend()
        path = self._open[handle]
        if path.is_dir():
            self.names = {name for name in self.names if name.parent != path}
        self.contents.discard(path)

    def replace(self, source: Path, target: Path) -> None:
        self._spend()
        self._forget(target)
        if target.name == "COMMIT.json":
            # The temporary name itself need not last: it is about to go.
            self.commits.append((self.contents | self.names - {source}, self.touched - {source}))
            self.touched = set()
        for those in (self.contents, self.touched):
            if source in those:
                those.add(target)
        self._forget(source)
        self.names.add(target)
        os.replace(source, target)  # noqa: PTH105

    def unlink(self, path: Path) -> None:
        self._spend()
        if any(name.name == "COMMIT.json" for name in self.names):
            self.early.append(path)
        self._forget(path)
        os.unlink(path)  # noqa: PTH108

    def _forget(self, path: Path) -> None:
        for those in (self.contents, self.names, self.touched):
            those.discard(path)


def state(value: int) -> bytes:
    return encode(State({}, {"value": value}))


def play(run: Path, resume: bool = False) -> None:
    """Two clients in every round: one that always comes, and one of two others in turn. As in a run, a
    configuration that is there is not written again.
    """
    with Store(run, resume=resume) as store:
        if store.config() is None:
            store.write_config("seed = 1\n")
        store.begin(state(0), {})
        for number in range(store.round + 1, ROUNDS + 1):
            store.stage("both", state(number))
            store.stage("odd" if number % 2 else "even", state(number))
            store.accept(["both", "odd", "even"])
            store.finish_round(state(number), {"round": number}, {})


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Disk]]:
    def put(left: int = 0) -> Disk:
        disk = Disk(left)
        monkeypatch.setattr(files, "os", disk)
        return disk

    return put


def test_what_a_commit_names_is_on_the_disk(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    """Round r writes the server's and two clients' states and the log, r = 1 and 2; round 0 the server's
    and the configuration. When ``COMMIT.json`` is replaced, each of them and its folder, and the new commit
    itself, were synced after their last write or rename. A version is deleted only once the commit that
    replaced it is safe, so that no failure finds the old commit without its files."""
    seen, run = disk(), tmp_path / "run"
    play(run)
    folder = run / "checkpoint"
    first = {run / "config.toml", folder / "server@000000.safetensors"}
    rounds = [
        {
            run / "rounds.jsonl",
            folder / f"server@{number:06d}.safetensors",
            folder / f"clients/both@{number:06d}.safetensors",
            folder / f"clients/{'odd' if number % 2 else 'even'}@{number:06d}.safetensors",
        }
        for number in range(1, ROUNDS + 1)
    ]
    assert [written for _, written in seen.commits] == [first, *rounds]
    assert [lost for lost, _ in seen.commits] == [set()] * (ROUNDS + 1)
    assert seen.early == []
    assert not seen.contents | seen.names


def test_a_crash_leaves_nothing_that_a_later_commit_relies_on(
    tmp_path: Path, disk: Callable[..., Disk]
) -> None:
    """A process ends at any one of its file operations, and a second one goes on: at its commits too all is
    on the disk, also what the first had written or created and not synced. The one exception is a crash
    between the renaming of the configuration and the sync of its folder: that folder is next synced by the
    round log's first line, and so at round 0 the configuration's name may not be safe yet."""
    at = 0
    while True:
        at += 1
        run, seen = tmp_path / f"crash{at}", disk(at)
        try:
            play(run)
            break
        except Crash:
            play(run, resume=True)
        for lost, written in seen.commits:
            first = run / "checkpoint/server@000000.safetensors" in written
            assert lost <= ({run / "config.toml"} if first else set()), f"after a crash at operation {at}"
    assert len(seen.commits) == ROUNDS + 1
    assert at > 60


def test_appending_syncs_the_folder_of_a_new_file_alone(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    """The first append creates a name, which is the folder's content; a second changes the file alone. An
    empty file may be left over from a process that died before it could sync the folder."""
    path, empty, other = tmp_path / "log", tmp_path / "empty", tmp_path / "other"
    seen = disk()
    files.append(path, b"one\n")
    assert not seen.contents | seen.names
    seen.names = {other}
    files.append(path, b"two\n")
    assert seen.names == {other}
    empty.touch()
    files.append(empty, b"one\n")
    assert not seen.contents | seen.names
    assert (path.read_bytes(), empty.read_bytes()) == (b"one\ntwo\n", b"one\n")
