"""A federation: clients, the rows each holds, and the tokens of all of them on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefed import files
from prefed.core.strict import Strict
from prefed.data.assign import ROLES
from prefed.data.errors import DataError
from prefed.data.tokens import TokenSet

__all__ = ["ClientData", "FederatedDataset", "Report"]

CLIENTS = "clients.json"


@dataclass(frozen=True)
class ClientData:
    """One client's rows: sorted ``int64`` indices into the token set, no pair in two of them."""

    id: str
    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


class Report(Strict):
    """What became of the rows that were read.

    Attributes:
        read: rows read.
        invalid: left out as malformed or blank (with ``invalid = "drop"``).
        identical: left out because both responses are the same.
        ties: left out because the source prefers neither response.
        too_long: left out because a response does not fit.
        cut: prompts that lost their beginning to fit.
        prefixes: pairs whose responses repeated the prompt, and lost it.
        duplicates: left out as repeats.
        leaks: left out of training (or validation) because the pair is also tested on.
        unplaced: validation and test rows that belong to no client that trains.
        limited: training pairs left out by ``limit``.
        dropped: clients without a training pair, left out.
        kept: rows that clients hold.
    """

    read: int = 0
    invalid: int = 0
    identical: int = 0
    ties: int = 0
    too_long: int = 0
    cut: int = 0
    prefixes: int = 0
    duplicates: int = 0
    leaks: int = 0
    unplaced: int = 0
    limited: int = 0
    dropped: int = 0
    kept: int = 0


class _Clients(Mapping[str, ClientData]):
    """Clients by id, made when asked for from one array of rows."""

    def __init__(self, ids: tuple[str, ...], rows: NDArray[np.int64], bounds: NDArray[np.int64]) -> None:
        self._index = {name: k for k, name in enumerate(ids)}
        self._rows, self._bounds = rows, bounds

    def __getitem__(self, name: str) -> ClientData:
        a, b, c, d = (int(n) for n in self._bounds[self._index[name]])
        return ClientData(name, self._rows[a:b], self._rows[b:c], self._rows[c:d])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index


@dataclass(frozen=True)
class FederatedDataset:
    """Clients and the token set that their rows index.

    Attributes:
        clients: by id; every one has a training pair.
        tokens: the tokens and texts of all rows.
        flipped: clients whose chosen and rejected stand swapped from what the source says.
        report: what became of the rows that were read.
        fingerprint: SHA-256 over the data and who holds them: a run resumes only on an equal one.
    """

    clients: Mapping[str, ClientData]
    tokens: TokenSet
    flipped: frozenset[str]
    report: Report
    fingerprint: str

    def __repr__(self) -> str:
        return f"Federation({len(self.clients)} clients, {self.report.kept} pairs)"

    @classmethod
    def open(cls, folder: Path) -> FederatedDataset:
        """The federation that :func:`prefed.data.build_dataset` left in ``folder``.

        Raises:
            DataError: there is none, or a file is damaged.
        """
        held = kept_clients(folder)
        try:
            _unchanged(folder, held.get("digests", {}))
            tokens = TokenSet.open(folder)
            ids = tuple(held["ids"])
            rows = np.fromfile(folder / "held.i64", dtype="<i8").astype(np.int64, copy=False)
            ends = np.fromfile(folder / "bounds.i64", dtype="<i8").astype(np.int64, copy=False)
            if len(ends) != 4 * len(ids):
                raise ValueError(f"bounds.i64 has {len(ends):,} numbers for {len(ids):,} clients, not 4 each")
            bounds = ends.reshape(-1, 4)
            ends = np.append(0, bounds[:, 3])
            if not np.array_equal(bounds[:, 0], ends[:-1]) or len(rows) != ends[-1]:
                raise ValueError(f"held.i64 and bounds.i64 differ: {len(rows):,} rows, not {ends[-1]:,}")
            if len(rows) and not (rows.min() >= 0 and rows.max() < len(tokens)):
                raise ValueError(f"held.i64 has rows beyond the {len(tokens):,} that there are")
        except DataError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise DataError(_damaged(folder, error)) from error
        return cls(
            _Clients(ids, rows, bounds),
            tokens,
            frozenset(held["flipped"]),
            Report(**held["report"]),
            held["fingerprint"],
        )

    def pooled(self) -> FederatedDataset:
        """All rows as one client named ``pooled``: what centralised training sees."""
        every = list(self.clients.values())
        parts = [np.sort(np.concatenate([getattr(data, role) for data in every])) for role in ROLES]
        ends = np.cumsum([0, *map(len, parts)])
        clients = _Clients(("pooled",), np.concatenate(parts), ends.reshape(1, 4).astype(np.int64))
        return FederatedDataset(clients, self.tokens, frozenset(), self.report, self.fingerprint)


def kept_clients(folder: Path) -> dict[str, Any]:
    """What ``clients.json`` holds: who has which rows, from what, and the digests of all other files.

    Raises:
        DataError: it is not there, or damaged.
    """
    try:
        return files.unsealed((folder / CLIENTS).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(_damaged(folder, f"{CLIENTS}: {error}")) from error


def _unchanged(folder: Path, digests: Mapping[str, str]) -> None:
    """Refuse files that are not what was written; an earlier version wrote no digests."""
    for name, digest in digests.items():
        if files.digest_of(folder / name) != digest:
            raise ValueError(f"{name} is not what was written")


def _damaged(folder: Path, error: object) -> str:
    return f"{folder} holds no whole federation ({error}); delete it to have it made again"
