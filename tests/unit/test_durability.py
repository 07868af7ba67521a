"""What a power failure would take: at every commit, all that it names lies on the disk. What a bad disk gives
back for something else, and what a full one does not take.

POSIX promises that a file's content outlives a power failure once the file is synced, and that its name
does once its folder is. A name changes when a file is created or renamed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefed.core import State, files
from prefed.core.wire import encode
from prefed.store import RunReader, RunWriter, StoreError

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
    with RunWriter(run, resume=resume) as store:
        if store.config() is None:
            store.write_config("seed = 1\n")
        store.begin(state(0), {})
        for number in range(store.round + 1, ROUNDS + 1):
            store.states.stage("both", state(number))
            store.states.stage("odd" if number % 2 else "even", state(number))
            store.states.accept(["both", "odd", "even"])
            store.finish_round(state(number), {"round": number}, {"bytes_up": 7 * number})


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
    log, run = disk(), tmp_path / "run"
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
    assert [written for _, written in log.commits] == [first, *rounds]
    assert [lost for lost, _ in log.commits] == [set()] * (ROUNDS + 1)
    assert log.early == []
    assert not log.contents | log.names


def test_a_crash_leaves_nothing_that_a_later_commit_relies_on(
    tmp_path: Path, disk: Callable[..., Disk]
) -> None:
    """A process ends at any one of its file operations, and a second one continues: at its commits too all is
    on the disk, also what the first had written or created and not synced. The one exception is a crash
    between the renaming of the configuration and the sync of its folder: that folder is next synced by the
    round log's first line, and so at round 0 the configuration's name may not be safe yet."""
    at = 0
    while True:
        at += 1
        run, log = tmp_path / f"crash{at}", disk(at)
        try:
            play(run)
            break
        except Crash:
            play(run, resume=True)
        for lost, written in log.commits:
            first = run / "checkpoint/server@000000.safetensors" in written
            assert lost <= ({run / "config.toml"} if first else set()), f"after a crash at operation {at}"
    assert len(log.commits) == ROUNDS + 1
    assert at > 60


def test_appending_syncs_the_folder_of_a_new_file_alone(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    """The first append creates a name, which is the folder's content; a second changes the file alone. An
    empty file may be left over from a process that died before it could sync the folder."""
    path, empty, other = tmp_path / "log", tmp_path / "empty", tmp_path / "other"
    log = disk()
    files.append(path, b"one\n")
    assert not log.contents | log.names
    log.names = {other}
    files.append(path, b"two\n")
    assert log.names == {other}
    empty.touch()
    files.append(empty, b"one\n")
    assert not log.contents | log.names
    assert (path.read_bytes(), empty.read_bytes()) == (b"one\ntwo\n", b"one\n")


CLIENTS = ("both", "odd", "even")


def everything(run: Path) -> str:
    """All that a resumed run reads, and all that is read after it."""
    reader = RunReader(run)
    read = [reader.commit, reader.server(), reader.rounds(), *map(reader.client, CLIENTS)]
    with RunWriter(run, resume=True) as store:
        return repr([*read, store.commit, store.server(), store.last, *map(store.states.read, CLIENTS)])


def test_a_flipped_bit_anywhere_is_noticed_and_its_file_named(tmp_path: Path) -> None:
    """One bit of every byte of every file that a commit names, and of the commit itself, in turn; and files
    that were cut short. The one exception is the word "digest" that names the commit's own: where that is
    another word, all else is read as it was written."""
    play(tmp_path / "run")
    expected, changes = everything(tmp_path / "run"), 0
    for path in sorted((tmp_path / "run").rglob("*")):
        if path.suffix not in (".safetensors", ".json", ".jsonl"):
            continue
        data = path.read_bytes()
        flips = (data[:at] + bytes([byte ^ 1 << at % 8]) + data[at + 1 :] for at, byte in enumerate(data))
        for change in [*flips, data[:-1], data[: len(data) // 2], b""]:
            path.write_bytes(change)
            changes += 1
            if re.search(rb'"(?!digest)[ !#-\[\]-~]{6}": "[0-9a-f]{16}"\n}$', change):
                assert everything(tmp_path / "run") == expected
            else:
                with pytest.raises(StoreError, match=re.escape(str(path))):
                    everything(tmp_path / "run")
        path.write_bytes(data)
    assert everything(tmp_path / "run") == expected
    assert changes > 4 * len(state(1))


def test_a_round_digests_what_it_wrote_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients' states, the server's and the commit, whether 2 or 50 clients have a private state."""
    sizes: list[int] = []
    real = files.digest
    monkeypatch.setattr(files, "digest", lambda data: (sizes.append(len(data)), real(data))[1])
    for clients in (2, 50):
        with RunWriter(tmp_path / str(clients)) as store:
            store.begin(state(0), {})
            for number, names in enumerate([[f"c{k:02d}" for k in range(clients)], ["c00", "c01"]]):
                sizes.clear()
                for name in names:
                    store.states.stage(name, state(number))
                store.states.accept(names)
                store.finish_round(state(10 + number), {"round": number + 1}, {})
        assert sizes[:-1] == [len(state(1)), len(state(1)), len(state(11))]


class Full:
    """The ``os`` module, on a disk that is full from the ``n``-th write on; a byte of that one still fits."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, handle: int, data: bytes) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(handle, data[: None if self.left else 1])


def test_a_full_disk_is_reported_and_leaves_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full at each write of a run in turn: the first commit takes 3 writes, a round 5. The message has the
    file, its size and what would do. No half-written file is left to take room, and with room again the run
    ends as one that always had it."""
    play(tmp_path / "whole")
    expected = everything(tmp_path / "whole")
    for at in range(1, 3 + 5 * ROUNDS + 1):
        run = tmp_path / f"full{at}"
        monkeypatch.setattr(files, "os", Full(at))
        with pytest.raises(files.WriteError) as caught:
            play(run)
        monkeypatch.setattr(files, "os", os)
        message = re.fullmatch(
            rf"cannot write {run}/(\S+) \(([\d,]+) bytes\): No space left on device; "
            rf"free up space on the disk of {run}\S*, which has [\d,]+ MiB free",
            str(caught.value),
        )
        assert message
        assert caught.value.errno == errno.ENOSPC
        assert not (run / f"{message[1]}.partial").exists()
        play(run, resume=True)
        assert everything(run) == expected
        if "server" in message[1]:
            assert int(message[2]) == len(state(1))


def test_a_sealed_object_comes_back_and_no_other_does() -> None:
    """One without a digest is of an earlier version, and taken as it is."""
    content = {"name": "ü", "numbers": [0.1, 1e300, -3], "none": None}
    for indent in (None, 1):
        assert files.loads_with_digest(files.dumps_with_digest(content, indent=indent)) == content
    assert files.loads_with_digest(b'{"round": 3}') == {"round": 3}
    for wrong in (files.dumps_with_digest(content).replace(b"0.1", b"0.2"), b"[1]", b"{", b"\xff"):
        with pytest.raises(files.DamagedError):
            files.loads_with_digest(wrong)


def test_a_file_is_given_room_and_keeps_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    files.allocate(path, 12)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (bytes(12), 0o600)
    path.write_bytes(b"abcdef")
    files.allocate(path, 8)
    assert path.read_bytes() == b"abcdef" + bytes(2)
    files.allocate(path, 4)
    assert path.read_bytes() == b"abcd"
    files.allocate(path, 0)
    assert path.read_bytes() == b""
