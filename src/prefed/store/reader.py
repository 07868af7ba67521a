"""Reading run directories."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.core import State, files
from prefed.core.lazy import torch
from prefed.core.wire import decode_state
from prefed.store.commit import (
    Commit,
    StoreError,
    damaged,
    missing_best,
    path_of,
    read_commit,
    read_state,
)
from prefed.store.states import client_file, holder_of, read_node

if TYPE_CHECKING:
    from prefed.core.records import RoundRecord


class RunReader:
    """Reads a run directory, even while the run continues.

    Args:
        best: read the states after the best round instead of the last.

    Attributes:
        commit: the commit that was read last.

    Raises:
        StoreError: there is no commit, or no best round; (from methods) a file is missing or damaged.
    """

    def __init__(self, path: str | Path, *, best: bool = False) -> None:
        self.path = Path(path)
        self._folder = self.path / "checkpoint"
        self._best = best
        self._look()

    def _look(self) -> None:
        commit = read_commit(self._folder)
        if commit is None:
            raise StoreError(f"{self.path} contains no run: {self._folder / 'COMMIT.json'} is missing")
        self.commit = self._best_of(commit) if self._best else commit
        self._private = self.commit.private

    def _best_of(self, last: Commit) -> Commit:
        """The commit of the best round, which a running process may replace meanwhile."""
        while True:
            if not last.best_round:
                raise StoreError(f"{self.path} has no best round: its experiment has no [stop] table")
            commit = read_commit(self._folder, last.best_round)
            if commit is not None:
                return commit
            before, last = last, read_commit(self._folder) or last
            if last.best_round == before.best_round:
                raise missing_best(self.path, last.best_round)

    def server(self) -> State:
        """The server's state after the last committed round."""
        return decode_state(self._read(None))

    def client(self, client: str) -> State | None:
        """A client's private state after its last visit; ``None`` for the initial state.

        Raises:
            StoreError: the state is stored at the client's site.
        """
        name = client_file(client)
        state = decode_state(self._read(name)) if name in self._private else None
        if state is not None and (site := holder_of(state)) is not None:
            raise StoreError(f"the private state of {client!r} is not in {self.path} but at site {site!r}")
        return state

    def node(self, node: int) -> torch.Tensor:
        """The state of a node after the last committed round, in a run without a server."""
        while True:
            commit = self.commit
            try:
                return read_node(self._folder / "nodes", commit, node)
            except FileNotFoundError:
                self._look()
                if self.commit.round == commit.round:
                    raise StoreError(
                        f"{self.path} is damaged: the states of nodes of round {commit.round} are missing"
                    ) from None

    def rounds(self) -> list[RoundRecord]:
        """The records of the committed rounds."""
        return [record for record, _ in records_in(self.path / "rounds.jsonl", self.commit)]

    def _read(self, name: str | None) -> bytes:
        """Read a client's state by its file name; ``None``: the server's state."""
        while True:
            commit = self.commit
            if name is None:
                path = path_of(self._folder, "server", commit.round)
                digest = commit.digests.server
            else:
                path = path_of(self._folder / "clients", name, self._private[name])
                digest = commit.digests.clients.get(name)
            try:
                return read_state(path, digest)
            except FileNotFoundError:
                # A running process may have committed a newer version and deleted this one.
                self._look()
                if self.commit.round == commit.round:
                    raise StoreError(f"{self.path} is damaged: {path} is missing") from None


def plain(value: Any) -> Any:
    """Convert ``value`` for JSON: mappings to objects, and numbers that are not finite to null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def records_in(path: Path, commit: Commit) -> Iterator[tuple[RoundRecord, bytes]]:
    """Yield the committed records of a round log, each with its line.

    Raises:
        StoreError: (during iteration) a record is missing or damaged.
    """
    digest = files.Hasher()
    with path.open("rb") if path.exists() else io.BytesIO() as lines:
        for number in range(1, commit.round + 1):
            line = lines.readline()
            try:
                record: RoundRecord = json.loads(line)
                if record["round"] != number:
                    raise ValueError(f"found round {record['round']}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise StoreError(
                    f"{path} is damaged: no record of round {number} on line {number}"
                ) from error
            digest.update(line)
            yield record, line
    if commit.digests.rounds not in (None, digest.hexdigest()):
        raise damaged(path, f"its first {commit.round} lines do not match their digest")
