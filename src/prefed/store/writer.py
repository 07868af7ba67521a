"""A run directory to write to."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.core import files
from prefed.store import directory
from prefed.store.commit import (
    CheckpointConfig,
    Commit,
    Digests,
    RoundStarts,
    StoreError,
    damaged,
    keep_versions,
    kept_commits,
    missing_best,
    path_of,
    read_commit,
    read_state,
    write_commit,
)
from prefed.store.reader import plain, records_in
from prefed.store.states import ClientStateFiles, NodeStates

if TYPE_CHECKING:
    from prefed.core.records import RoundRecord, Summary


class RunWriter:
    """A run directory to write to, for one process at a time.

    Attributes:
        states: the clients' private states. The accepted ones are committed with the round.
        nodes: the states of nodes, in a run without a server. The next ones are committed with the round.
        starts: how often each round was started, where that is counted.
        commit: the last commit; ``None`` before the first one.
        last: the record of the last committed round. Earlier records are not kept in memory.
        kept: round → commit that :meth:`go_back` can return to, or that of the best round.

    Args:
        path: the run directory. It is created if it does not exist. Its private files are only for its owner.
        resume: continue the run in ``path``. There must be a run, or the rest of a start that was killed.
            Without ``resume``, ``path`` must be empty, or hold only the rest of a start that failed.
        returnable: keep the commits from :meth:`finish_round`'s ``keep`` on, with all that they name.
        spaced: also keep these earlier commits.

    Raises:
        StoreError: another process uses ``path``; ``path`` is not empty, holds no run, or is damaged. The
            methods raise it if a file is damaged, or if an earlier commit failed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resume: bool = False,
        returnable: bool = False,
        spaced: CheckpointConfig | None = None,
    ) -> None:
        self.path = Path(path)
        self._returnable, self._spaced = returnable, spaced
        self._folder = self.path / "checkpoint"
        self.states = ClientStateFiles(self._folder / "clients")
        self.nodes = NodeStates(self._folder / "nodes")
        self.starts = RoundStarts(self._folder / "starts.json")
        self._log = files.Hasher()
        self._settings: str | None = None
        self._committing = self._began = False
        self.last: RoundRecord | None = None
        self.kept: dict[int, Commit] = {}
        directory.refuse_foreign(self.path, resume)
        self._new = directory.make(self.path)
        self._lock: int | None = directory.lock(self.path)
        try:
            # Another process may have started a run after the first check and before the lock.
            directory.refuse_foreign(self.path, resume)
            self.commit: Commit | None = read_commit(self._folder)
            self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory for other processes. Whatever is not committed is lost."""
        self.nodes.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def round(self) -> int:
        """The last committed round; 0 before the first."""
        return self.commit.round if self.commit else 0

    @property
    def stopped(self) -> bool:
        """Whether the run has ended before its last round, because it got no better."""
        best = self.commit.best if self.commit else None
        return best is not None and bool(best["stopped"])

    def config(self) -> dict[str, Any] | None:
        """The stored experiment, if any."""
        path = self.path / "config.toml"
        try:
            return tomllib.loads(path.read_text("utf-8")) if path.exists() else None
        except ValueError as error:
            raise damaged(path, error) from error

    def write_config(self, text: str) -> None:
        """Write the resolved experiment into ``config.toml``."""
        files.write(self.path / "config.toml", text.encode())

    def begin(self, server: bytes, fingerprint: Mapping[str, str], settings: str | None = None) -> None:
        """Commit round 0: the server's first state, and the digests of data and model.

        For a resumed run nothing is written. Its fingerprint is compared instead.

        Args:
            fingerprint: digests of the run's data and model.
            settings: the digest of its settings, for :attr:`Commit.settings`.

        Raises:
            StoreError: the run in this directory has another fingerprint.
        """
        self._settings = settings
        if self.commit is None:
            self._commit(0, {}, fingerprint, server, None)
            return
        stored = self.commit.fingerprint
        names = sorted({*stored, *fingerprint})
        changed = [name for name in names if stored.get(name) != fingerprint.get(name)]
        if changed:
            raise StoreError(
                f"{self.path} cannot continue: its {' and '.join(changed)} changed since it started; "
                "restore them, or start a new run with another --out"
            )

    def go_back(self, number: int) -> None:
        """Make the commit of an earlier round the last one again; one of :attr:`kept`.

        What later rounds left is removed.
        """
        commit = self.kept[number]
        past = {
            version: digest for version, digest in commit.digests.past.items() if int(version) in self.kept
        }
        self.commit = replace(commit, digests=replace(commit.digests, past=past))
        write_commit(self._folder, self.commit)
        self._recover()

    def forget(self) -> None:
        """Undo the start of a run that has no round yet, so that another run can begin in its place."""
        if self.commit is not None and self.round == 0:
            for path in kept_commits(self._folder).values():
                files.remove(path)
            files.remove(self._folder / "COMMIT.json")
            files.remove(path_of(self._folder, "server", 0))
            self.commit, self.kept = None, {}

    def discard(self) -> bool:
        """Undo a start that failed before round 1 began: remove the directory if this writer created it.

        Returns:
            Whether it did.
        """
        if not self._new or self._began or self.round:
            return False
        self.forget()
        directory.take_back(self.path)
        return True

    def server(self, number: int | None = None) -> bytes:
        """The server's state after the last committed round, or after an earlier one that was kept."""
        digests = self.commit.digests if self.commit else Digests()
        if number is None or number == self.round:
            return read_state(path_of(self._folder, "server", self.round), digests.server)
        return read_state(path_of(self._folder, "server", number), digests.past[str(number)])

    def begin_round(self) -> None:
        """Drop what a round left that was not committed, in this process.

        Raises:
            StoreError: a commit failed.
        """
        self._check()
        self._began = True
        self.states.rollback()
        self.nodes.rollback()

    def finish_round(
        self,
        server: bytes,
        record: RoundRecord,
        totals: Mapping[str, float],
        keep: int | None = None,
        best: Mapping[str, Any] | None = None,
    ) -> None:
        """Commit the next round: ``server``, every accepted state, the round's record and the totals.

        Args:
            keep: the server's states after this round and after later ones stay, for uploads that start from
                them; left out: the newest alone.
            best: as :attr:`Commit.best` has it; left out: as in the commit before. That round's states stay.
        """
        assert self.commit is not None, "call begin() first"
        content: RoundRecord = plain(record)
        number = self.round + 1
        self._commit(
            number,
            totals,
            self.commit.fingerprint,
            server,
            content,
            number if keep is None else keep,
            self.commit.best if best is None else plain(best),
        )
        self.last = content

    def write_summary(
        self,
        summary: Summary,
        personal: Mapping[str, Any] | None = None,
        tastes: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``summary.json``, which everybody may read.

        ``personal`` holds figures from private states, with all digits. They go to
        ``checkpoint/personal.json``, which only its owner may read. So may ``tastes.json``, with ``tastes``.
        """
        private = {self.path / "tastes.json": tastes, self._folder / "personal.json": personal}
        for path, content in private.items():
            if content:
                text = json.dumps(plain(content), indent=1, allow_nan=False)
                files.write(path, text.encode() + b"\n", mode=0o600)
        text = json.dumps(plain(summary), indent=2, allow_nan=False)
        files.write(self.path / "summary.json", text.encode() + b"\n")

    def reopen(self) -> None:
        """Remove ``summary.json`` and what is written with it, because the run goes on."""
        files.remove(self.path / "summary.json")
        files.remove(self._folder / "personal.json")
        files.remove(self.path / "tastes.json")

    def _commit(
        self,
        number: int,
        totals: Mapping[str, float],
        fingerprint: Mapping[str, str],
        server: bytes,
        record: RoundRecord | None,
        keep: int = 0,
        best: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the files of round ``number``, commit them, and then delete the files that they replace."""
        self._check()
        self._committing = True
        files.write(path_of(self._folder, "server", number), server, mode=0o600)
        versions, clients = self.states.prepare(number)
        if record is not None:
            line = json.dumps(record, allow_nan=False).encode() + b"\n"
            files.append(self.path / "rounds.jsonl", line)
            self._log.update(line)
        before, pinned = self._server_digests(), 0 if best is None else best["round"]
        past = {
            str(version): digest
            for version, digest in before.items()
            if version >= keep or (pinned and version == pinned) or self._keeps(version, number)
        }
        digests = Digests(
            files.digest(server), self._log.hexdigest(), clients, past, self.nodes.prepare(number)
        )
        commit = Commit(number, dict(totals), dict(fingerprint), self._settings, digests, versions, best)
        if self._returnable or (pinned and pinned == number) or self._keeps(number, number):
            write_commit(self._folder, commit, number)
        write_commit(self._folder, commit)
        self.commit = commit
        if self._returnable or pinned or self._spaced:
            self._keep_commits({**self.kept, number: commit}, keep)
        self.states.finish(commit, self.kept.values())
        self.nodes.finish(commit, self.kept.values())
        for version in before.keys() - {int(version) for version in past}:
            files.remove(path_of(self._folder, "server", version))
        self._committing = False

    def _keep_commits(self, commits: Mapping[int, Commit], first: int) -> None:
        """Keep those of ``commits`` from round ``first`` on to go back to, the spaced ones, and that of the
        best round, and remove the files of all others.
        """
        best = self.commit.best_round if self.commit else 0
        wanted = {
            number
            for number in commits
            if (self._returnable and number >= first) or number == best or self._keeps(number, self.round)
        }
        self.kept = {number: commits[number] for number in sorted(wanted)}
        for number, path in kept_commits(self._folder).items():
            if number not in self.kept:
                files.remove(path)

    def _keeps(self, number: int, last: int) -> bool:
        return number > 0 and self._spaced is not None and self._spaced.keeps(number, last)

    def _server_digests(self) -> dict[int, str | None]:
        """Round → digest of each server's state that the commit names."""
        if self.commit is None:
            return {}
        past = {int(number): digest for number, digest in self.commit.digests.past.items()}
        return {**past, self.round: self.commit.digests.server}

    def _check(self) -> None:
        """Refuse to go on after a commit that failed: which of its files are on the disk is not known."""
        if self._committing:
            raise StoreError(
                f"the last commit of {self.path} failed; open the run directory again, which repairs it"
            )

    def _recover(self) -> None:
        """Remove the rest of a killed process, and find the version of each client's state."""
        for folder in (self.path, self._folder, self.states.folder):
            for path in folder.glob(f"*{files.TEMPORARY}"):
                files.remove(path)
        log = self.path / "rounds.jsonl"
        if self.commit is None and log.exists() and log.stat().st_size:
            raise StoreError(
                f"{self.path} is damaged: it has rounds, but {self._folder / 'COMMIT.json'} is missing; "
                "restore it, or start a new run with another --out"
            )
        # The name of the commit may not be on disk yet. It must be before older files are deleted.
        files.sync(self._folder)
        server = [("server", number) for number in self._server_digests()]
        keep_versions(self.path, self._folder, server, "the server's")
        numbers = sorted(kept_commits(self._folder).keys() & self._server_digests().keys())
        commits = ((number, read_commit(self._folder, number)) for number in numbers)
        self._keep_commits({number: commit for number, commit in commits if commit}, 0)
        best = self.commit.best_round if self.commit else 0
        if best and best not in self.kept:
            raise missing_best(self.path, best)
        self.states.recover(self.path, self.commit, self.kept.values())
        self.nodes.recover(self.path, self.commit, self.kept.values())
        size, self._log, self.last = 0, files.Hasher(), None
        for record, line in records_in(log, self.commit) if self.commit else ():
            self.last, size = record, size + len(line)
            self._log.update(line)
        if log.exists() and log.stat().st_size > size:
            files.truncate(log, size)
