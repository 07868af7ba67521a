"""Prepare a run directory in which the rounds of another run continue."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from prefed.core import files
from prefed.store.commit import Commit, path_of, read_state, write_commit


@contextmanager
def prepared_run(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill with a run to resume; at the end it becomes ``folder``, all of it or none."""
    partial = folder.with_name(f"{folder.name}{files.TEMPORARY}")
    shutil.rmtree(partial, ignore_errors=True)
    for own in (partial / "checkpoint" / "clients", partial / "cache"):
        files.private_folder(own)
    yield partial
    (partial / "checkpoint" / "LOCK").touch()
    files.sync(partial)
    partial.rename(folder)
    files.sync(folder.parent)


def copy_commits(run: Path, partial: Path, commits: Mapping[int, Commit], data: str, settings: str) -> None:
    """Copy what commits of a run name, and its rounds up to the last of them, for other data or settings.

    Args:
        partial: from :func:`prepared_run`.
        commits: round → its commit.
        data: digest of the data with which the run continues.
        settings: :func:`~prefed.runs.start_or_resume.settings_digest` of its experiment.
    """
    old, new, after = run / "checkpoint", partial / "checkpoint", max(commits)
    for number, commit in commits.items():
        for name, version_, digest in _states(commit):
            folder = "" if name == "server" else "clients"
            state = read_state(path_of(old / folder, name, version_), digest)
            files.write(path_of(new / folder, name, version_), state, mode=0o600)
        past = {key: digest for key, digest in commit.digests.past.items() if int(key) in commits}
        changed = replace(
            commit,
            fingerprint={**commit.fingerprint, "data": data},
            settings=settings,
            digests=replace(commit.digests, past=past),
        )
        for kept in (number, None) if number == after else (number,):
            write_commit(new, changed, kept)
    with (run / "rounds.jsonl").open("rb") as lines:
        files.write(partial / "rounds.jsonl", b"".join(next(lines) for _ in range(after)))


def _states(commit: Commit) -> Iterator[tuple[str, int, str | None]]:
    """Name, round and digest of each state that a commit names."""
    yield "server", commit.round, commit.digests.server
    for name, number in commit.private.items():
        yield name, number, commit.digests.clients.get(name)
