"""Clients' private states in a run directory, receipts of those that sites keep, and the states of nodes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from prefed.core import State, files
from prefed.core.lazy import torch
from prefed.core.wire import decode_state, encode
from prefed.store.commit import Commit, StoreError, damaged, keep_versions, path_of, read_state

_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_SITE, _RECEIPT = "site", "receipt"


def client_file(client: str) -> str:
    """A unique file name for a client ID, percent-encoded.

    Capitals are encoded too, because some file systems ignore case. Long names are truncated and end in a
    digest.

    >>> client_file("ward-7"), client_file("../Ward 7")
    ('ward-7', '%2E%2E%2F%57ard%207')
    >>> len(client_file("w" * 1000))
    151
    """
    data = client.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in data)
    return name if len(name) <= 150 else f"{name[:110]}+{hashlib.sha256(data).hexdigest()[:40]}"


def receipt_state(site: str, receipt: str) -> bytes:
    """The receipt that a site gives for a private state, encoded as a state is.

    >>> receipt_in(receipt_state("north", "000003-c66e"))
    '000003-c66e'
    """
    return encode(State({}, {_SITE: site, _RECEIPT: receipt}))


def receipt_in(stored: bytes) -> str | None:
    """The receipt in what :func:`receipt_state` made; ``None`` where a private state itself lies there."""
    receipt = decode_state(stored).values.get(_RECEIPT)
    return receipt if isinstance(receipt, str) else None


def holder_of(state: State) -> str | None:
    """The site that keeps a private state of which this is the receipt; ``None`` if it is none."""
    return str(state.values[_SITE]) if state.values.keys() == {_SITE, _RECEIPT} else None


class ClientStateFiles:
    """The private states that a run directory holds, for the one process that writes them.

    A client's next state is staged in a file next to its committed one. Once it is accepted it is what
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
            self._commit, self._versions = commit, commit.private
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
        self._commit, self._versions, self._accepted = commit, commit.private, {}
        self._earlier = self._named(kept)
        for name, number in sorted(replaced - self._earlier):
            if self._versions.get(name) != number:
                files.remove(path_of(self.folder, name, number))

    def _named(self, commits: Iterable[Commit]) -> frozenset[tuple[str, int]]:
        return frozenset(pair for each in commits for pair in each.private.items())

    def _staged_path(self, name: str) -> Path:
        path = path_of(self.folder, name, self._commit.round + 1)
        return path.with_name(f"{path.name}.aside{files.TEMPORARY}")


_DTYPES = {"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16"}
"""Names of safetensors → of PyTorch."""


class NodeFile:
    """One file of rows.

    Args:
        path: the file, which is there.
        writable: whether it may be changed.

    Raises:
        StoreError: it is no such file.
    """

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self.path = path
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            try:
                entry = json.loads(stream.read(length))["nodes"]
                self.nodes, self.size = map(int, entry["shape"])
                self.dtype: torch.dtype = getattr(torch, _DTYPES[entry["dtype"]])
            except (ValueError, KeyError, TypeError) as error:
                raise damaged(path, error) from error
        self._start = 8 + length
        self._width: int = self.dtype.itemsize
        self._handle = os.open(path, os.O_RDWR if writable else os.O_RDONLY)

    @staticmethod
    def create(path: Path, nodes: int, size: int, dtype: torch.dtype) -> NodeFile:
        """A new file of zeros, which only its owner may read."""
        whole = nodes * size * dtype.itemsize
        name = next(name for name, text in _DTYPES.items() if getattr(torch, text) == dtype)
        entry = {"dtype": name, "shape": [nodes, size], "data_offsets": [0, whole]}
        header = json.dumps({"nodes": entry}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        files.remove(path)
        files.allocate(path, 8 + len(header) + whole)
        with path.open("r+b") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
        return NodeFile(path)

    def row(self, node: int) -> torch.Tensor:
        """``[size]``: the numbers of a node."""
        return self._read(node, slice(0, self.size))

    def put(self, node: int, row: torch.Tensor) -> None:
        """Replace the numbers of a node."""
        self._write(node, slice(0, self.size), row)

    def block(self, columns: slice) -> torch.Tensor:
        """float64 ``[nodes, columns]``: some columns of all nodes."""
        rows = torch.empty(self.nodes, columns.stop - columns.start, dtype=torch.float64)
        for node in range(self.nodes):
            rows[node] = self._read(node, columns)
        return rows

    def put_block(self, columns: slice, rows: torch.Tensor) -> None:
        """Replace some columns of all nodes."""
        for node, row in enumerate(rows):
            self._write(node, columns, row)

    def close(self) -> None:
        """Let go of the file. A second time does nothing."""
        # The kernel gives the number of a closed handle to the next file that is opened.
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _place(self, node: int, columns: slice) -> int:
        return self._start + (node * self.size + int(columns.start)) * self._width

    def _read(self, node: int, columns: slice) -> torch.Tensor:
        data = bytearray((columns.stop - columns.start) * self._width)
        left, place = memoryview(data), self._place(node, columns)
        while left:  # Linux reads at most 2 GiB at a time
            count = os.preadv(self._handle, [left], place)
            if not count:
                raise damaged(self.path, f"it ends before row {node} does")
            left, place = left[count:], place + count
        return torch.frombuffer(data, dtype=self.dtype)

    def _write(self, node: int, columns: slice, row: torch.Tensor) -> None:
        data = memoryview(row.to(self.dtype).contiguous().view(torch.uint8).numpy().tobytes())
        place = self._place(node, columns)
        try:
            while data:
                written = os.pwrite(self._handle, data, place)
                data, place = data[written:], place + written
        except OSError as error:
            raise files.write_error(self.path, len(data), error) from error


class NodeStates:
    """The states of all nodes after the last committed round, for the one process that writes them.

    A round writes the next states into a file of its own, which :class:`~prefed.store.RunWriter` commits.

    Attributes:
        folder: ``checkpoint/nodes`` of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._round, self._digest = 0, ""
        self._current: NodeFile | None = None
        self._new: dict[str, NodeFile] = {}
        # The rounds of earlier commits that are kept.
        self._earlier: frozenset[int] = frozenset()

    def current(self) -> NodeFile | None:
        """The committed states; ``None`` before the first round, when every node has its first.

        Raises:
            StoreError: their file is damaged.
        """
        if self._current is None and self._digest:
            path = path_of(self.folder, "nodes", self._round)
            if files.file_digest(path) != self._digest:
                raise damaged(path, "its bytes do not match their digest")
            self._current = NodeFile(path, writable=False)
        return self._current

    def create(self, name: str, nodes: int, size: int, dtype: torch.dtype) -> NodeFile:
        """A file for the round that runs. The one named ``"next"`` is committed with the round."""
        files.private_folder(self.folder)
        if name in self._new:
            self._new.pop(name).close()
        self._new[name] = NodeFile.create(self._path(name), nodes, size, dtype)
        return self._new[name]

    def rollback(self) -> None:
        """Drop what was written and not committed."""
        for name, file in self._new.items():
            file.close()
            files.remove(self._path(name))
        self._new = {}

    def close(self) -> None:
        """Let go of the files, for a run that ends or fails."""
        for file in [*self._new.values(), *([self._current] if self._current else [])]:
            file.close()
        self._new, self._current = {}, None

    def recover(self, run: Path, commit: Commit | None, kept: Iterable[Commit] = ()) -> None:
        """Learn which files count, and remove all others.

        Args:
            kept: earlier commits, whose states stay.

        Raises:
            StoreError: one that counts is missing.
        """
        for path in self.folder.glob(f"*{files.TEMPORARY}"):
            files.remove(path)
        self._round = commit.round if commit else 0
        self._digest = (commit.digests.nodes if commit else None) or ""
        self._earlier = _rounds(kept)
        counting = self._earlier | ({self._round} if self._digest else set())
        keep_versions(run, self.folder, [("nodes", number) for number in counting], "the nodes'")

    def prepare(self, number: int) -> str | None:
        """Bring the next states to the disk, for the commit of round ``number``; their digest."""
        file = self._new.pop("next", None)
        if file is None:
            return None
        file.close()
        path = path_of(self.folder, "nodes", number)
        files.sync(file.path)
        files.replace(file.path, path)
        files.sync(self.folder)
        return files.file_digest(path)

    def finish(self, commit: Commit, kept: Iterable[Commit] = ()) -> None:
        """Delete what ``commit``, which is on the disk, has replaced, but for what ``kept`` commits name."""
        self.rollback()
        self.close()
        replaced = self._earlier | ({self._round} if self._digest else set())
        self._round, self._digest = commit.round, commit.digests.nodes or ""
        self._earlier = _rounds(kept)
        for number in sorted(replaced - self._earlier - {self._round}):
            files.remove(path_of(self.folder, "nodes", number))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{files.TEMPORARY}"


def _rounds(commits: Iterable[Commit]) -> frozenset[int]:
    """The rounds of those commits that name the states of nodes."""
    return frozenset(commit.round for commit in commits if commit.digests.nodes is not None)


def read_node(folder: Path, commit: Commit, node: int) -> torch.Tensor:
    """The numbers of a node after the round of ``commit``.

    Raises:
        StoreError: the run keeps no nodes.
    """
    if commit.digests.nodes is None:
        raise StoreError(f"{folder} contains no states of nodes")
    file = NodeFile(path_of(folder, "nodes", commit.round), writable=False)
    try:
        return file.row(node)
    finally:
        file.close()
