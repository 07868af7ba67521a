"""Clients' private states in a run directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from prefed.core import files
from prefed.store.commit import Commit, client_file, keep_versions, path_of, private_versions, read_state


class ClientStateFiles:
    """The private states that a run directory holds, for the one process that writes them.

    A client's next state is staged in a file beside its committed one. Once it is accepted it is what
    :meth:`read` gives. It is committed with the round, by the :class:`~prefed.store.RunWriter` of the
    directory.

    Attributes:
        folder: ``checkpoint/clients`` of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commit = Commit(0)
        # File name of a client → the round of its committed state.
        self._versions: Mapping[str, int] = {}
        # File name of a client → the digest of its state.
        self._staged: dict[str, str] = {}
        self._accepted: dict[str, str] = {}
        # What earlier commits name that are kept: file name of a client and the round of its state.
        self._earlier: frozenset[tuple[str, int]] = frozenset()

    def read(self, client: str) -> bytes | None:
        """A client's private state, this round's if one was accepted; ``None`` if it has its first.

        Raises:
            StoreError: it is damaged.
        """
        name = client_file(client)
        version, digest = self._versions.get(name), self._commit.digests.clients.get(name)
        if name in self._accepted:
            version, digest = self._commit.round + 1, self._accepted[name]
        if version is None:
            return None
        return read_state(path_of(self.folder, name, version), digest)

    def stage(self, client: str, state: bytes) -> None:
        """Write a client's next private state. It does not count before it is accepted."""
        name = client_file(client)
        files.write(self._staged_path(name), state, durable=False, mode=0o600)
        self._staged[name] = files.digest(state)

    def accept(self, clients: Iterable[str]) -> None:
        """Keep what is staged for ``clients``, to be committed with the round, and drop the rest."""
        accepted = {client_file(client) for client in clients}
        for name in sorted(self._staged):
            if name in accepted:
                files.replace(self._staged_path(name), path_of(self.folder, name, self._commit.round + 1))
                self._accepted[name] = self._staged[name]
            else:
                files.remove(self._staged_path(name))
        self._staged = {}

    def rollback(self) -> None:
        """Drop every state that is staged or accepted and not committed."""
        for name in self._staged:
            files.remove(self._staged_path(name))
        for name in self._accepted:
            files.remove(path_of(self.folder, name, self._commit.round + 1))
        self._staged, self._accepted = {}, {}

    def recover(self, run: Path, commit: Commit | None, kept: Iterable[Commit] = ()) -> None:
        """Learn which states count, and remove all other ones.

        Args:
            kept: earlier commits, whose states stay.

        Raises:
            StoreError: a state that counts is missing.
        """
        if commit is not None:
            self._commit, self._versions = commit, private_versions(self.folder, commit)
        self._earlier = self._named(kept)
        counting = self._earlier | set(self._versions.items())
        keep_versions(run, self.folder, counting, "a client's private")

    def prepare(self, number: int) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """Bring the accepted states to the disk, for the commit of round ``number``.

        Returns:
            What the commit says of private states: file name of a client → its round, and → its digest.
        """
        for name in sorted(self._accepted):
            files.sync(path_of(self.folder, name, number))
        if self._accepted:
            files.sync(self.folder)
        versions = {**self._versions, **dict.fromkeys(self._accepted, number)}
        return versions, {**self._commit.digests.clients, **self._accepted}

    def finish(self, commit: Commit, kept: Iterable[Commit] = ()) -> None:
        """Delete what ``commit``, which is on the disk, has replaced, but for what ``kept`` commits name."""
        replaced = {(name, self._versions[name]) for name in self._accepted if name in self._versions}
        replaced |= self._earlier
        self._commit, self._versions, self._accepted = commit, private_versions(self.folder, commit), {}
        self._earlier = self._named(kept)
        for name, number in sorted(replaced - self._earlier):
            if self._versions.get(name) != number:
                files.remove(path_of(self.folder, name, number))

    def _named(self, commits: Iterable[Commit]) -> frozenset[tuple[str, int]]:
        return frozenset(pair for each in commits for pair in private_versions(self.folder, each).items())

    def _staged_path(self, name: str) -> Path:
        path = path_of(self.folder, name, self._commit.round + 1)
        return path.with_name(f"{path.name}.aside{files.TEMPORARY}")
