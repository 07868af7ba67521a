"""A federated dataset: its clients, the rows of each client, and the tokens of all rows on disk."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from prefed.core import files
from prefed.core.strict_settings import StrictModel
from prefed.data.errors import DataError
from prefed.data.tokens import TokenSet

CLIENTS = "clients.json"
LEFT_OUT = (
    *("invalid", "identical", "ties", "too_long", "short", "duplicates", "leaks", "unplaced", "limited"),
)
"""The counts of rows that were left out: names of fields of :class:`RowCounts`."""


class ClientSizes(NamedTuple):
    """How many pairs one client has in each split."""

    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class ClientData:
    """One client's rows by split: sorted ``int64`` indices into the token set. No pair is in two splits."""

    id: str
    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


class RowCounts(StrictModel):
    """Counts of the rows that were read, left out and used.

    Attributes:
        read: rows read; where a row has several comparisons, each of them.
        invalid: left out as malformed or blank (with ``invalid = "drop"``).
        identical: left out because both responses are the same.
        ties: left out because the source prefers neither response.
        too_long: left out because a response, or a selector's question, is longer than the limit.
        cut: prompts whose beginning was cut off so that they fit.
        shortened: pairs of a selector, or whole texts, that were cut at their ends so that they fit.
        short: left out because a text has fewer characters than ``min_characters``.
        prefixes: pairs whose responses repeated the prompt; the repetition was removed.
        duplicates: left out as repeats.
        leaks: left out of training (or validation) because the pair is also a test pair.
        unplaced: validation and test rows that belong to no client that trains.
        limited: training pairs left out by ``limit``.
        dropped: clients without a training pair, left out.
        kept: rows that belong to a client.
        needed: the ``max_length`` with which no pair would be too long; 0 where none is.
    """

    read: int = 0
    invalid: int = 0
    identical: int = 0
    ties: int = 0
    too_long: int = 0
    cut: int = 0
    shortened: int = 0
    short: int = 0
    prefixes: int = 0
    duplicates: int = 0
    leaks: int = 0
    unplaced: int = 0
    limited: int = 0
    dropped: int = 0
    kept: int = 0
    needed: int = 0

    @property
    def left_out(self) -> dict[str, int]:
        """Why rows were left out, by the names above → how many; none that are 0."""
        return {name: count for name in LEFT_OUT if (count := getattr(self, name))}

    @property
    def rows(self) -> int:
        """All rows: those kept and those left out."""
        return self.kept + sum(self.left_out.values())


class Findings(StrictModel):
    """What a person should know of the clients of a dataset, where the data themselves name them.

    Attributes:
        lost: client → rows of it that were left out, as far as it is known whose they were. Rows beyond
            ``data.limit`` do not count.
        gone: clients that have training rows, of which none is left.
        similar: names that may be meant as one.
        ignored: files in the sources' folders that were not read.
    """

    lost: dict[str, int] = Field(default_factory=dict)
    gone: tuple[str, ...] = ()
    similar: tuple[tuple[str, ...], ...] = ()
    ignored: tuple[str, ...] = ()


def similar_names(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of names that differ in case, in blanks or in how a letter is encoded, and in nothing else.

    A name with blanks around it is such a group by itself.

    >>> similar_names(["Ann", "ben", "ann ", "Ann Lee", "Ann  Lee"])
    (('Ann', 'ann '), ('Ann  Lee', 'Ann Lee'))
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        plain = " ".join(unicodedata.normalize("NFKC", name).split()).casefold()
        groups.setdefault(plain, []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1 or group[0] != group[0].strip())


class _Clients(Mapping[str, ClientData]):
    """Clients by id. Each is made from one array of all rows when it is asked for."""

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


@dataclass(frozen=True)
class FederatedDataset:
    """Clients and the token set that their rows index.

    Attributes:
        clients: by id; each has a training pair.
        sizes: client → its number of pairs in each split. They are known without the pairs too.
        tokens: the tokens and texts of all rows.
        flipped: clients whose chosen and rejected responses are swapped.
        row_counts: counts of the rows that were read.
        fingerprint: SHA-256 over the data and their owners. A run resumes only on an equal one.
        findings: what a person should know of the clients.
    """

    clients: Mapping[str, ClientData]
    sizes: Mapping[str, ClientSizes]
    tokens: TokenSet
    flipped: frozenset[str]
    row_counts: RowCounts
    fingerprint: str
    findings: Findings = field(default_factory=Findings)

    def __repr__(self) -> str:
        return f"FederatedDataset({len(self.clients)} clients, {self.row_counts.kept} pairs)"

    @classmethod
    def open(cls, folder: Path) -> FederatedDataset:
        """Open the dataset that :func:`prefed.data.build_dataset` wrote into ``folder``.

        Raises:
            DataError: the folder holds none, or a file is damaged.
        """
        manifest = read_manifest(folder)
        try:
            for name, digest in manifest["digests"].items():
                if files.file_digest(folder / name) != digest:
                    raise ValueError(f"{name} does not match its digest")
            tokens = TokenSet(folder)
            ids = tuple(manifest["ids"])
            rows = np.fromfile(folder / "held.i64", dtype="<i8").astype(np.int64, copy=False)
            ends = np.fromfile(folder / "bounds.i64", dtype="<i8").astype(np.int64, copy=False)
            if len(ends) != 4 * len(ids):
                raise ValueError(f"bounds.i64 has {len(ends):,} numbers for {len(ids):,} clients, not 4 each")
            bounds = ends.reshape(-1, 4)
            ends = np.append(0, bounds[:, 3])
            if not np.array_equal(bounds[:, 0], ends[:-1]) or len(rows) != ends[-1]:
                raise ValueError(f"held.i64 and bounds.i64 differ: {len(rows):,} rows, not {ends[-1]:,}")
            if len(rows) and not (rows.min() >= 0 and rows.max() < len(tokens)):
                raise ValueError(f"held.i64 refers to rows beyond the last of {len(tokens):,}")
        except DataError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise DataError(_damaged(folder, error)) from error
        return cls(
            _Clients(ids, rows, bounds),
            {name: ClientSizes(*counts) for name, counts in zip(ids, np.diff(bounds).tolist(), strict=True)},
            tokens,
            frozenset(manifest["flipped"]),
            RowCounts(**manifest["report"]),
            manifest["fingerprint"],
            Findings.model_validate_json(json.dumps(manifest["findings"])),
        )

    @classmethod
    def without_pairs(cls, sizes: Mapping[str, ClientSizes]) -> FederatedDataset:
        """A dataset whose pairs are not on this machine: it knows its clients and their sizes alone."""
        none = np.zeros(0, np.int64)
        clients = {name: ClientData(name, none, none, none) for name in sizes}
        return cls(clients, sizes, TokenSet.empty(), frozenset(), RowCounts(), "")

    @property
    def has_pairs(self) -> bool:
        """Whether the pairs are on this machine."""
        return len(self.tokens) > 0


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``clients.json``: the clients, the sources of their rows, and the digests of all other files.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return files.loads_with_digest((folder / CLIENTS).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(_damaged(folder, f"{CLIENTS}: {error}")) from error


def _damaged(folder: Path, error: object) -> str:
    return f"{folder} holds no complete federation ({error}); delete it to rebuild it"
