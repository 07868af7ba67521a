"""A federated dataset: clients, the rows of each client, and the tokens of all rows on disk."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
"""Fields of :class:`RowCounts` that count dropped rows."""


class ClientSizes(NamedTuple):
    """The number of pairs of one client in each split."""

    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class ClientData:
    """The rows of one client by split: sorted ``int64`` indices into the token set."""

    id: str
    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


class RowCounts(StrictModel):
    """Numbers of rows read, dropped and used.

    Attributes:
        read: rows read, counting each comparison of a row.
        invalid: dropped: malformed or blank (with ``invalid = "drop"``).
        identical: dropped: equal responses.
        ties: dropped: the source prefers neither response.
        too_long: dropped: response or selector question too long.
        cut: prompts that lost their beginning, or a conversation its oldest turns.
        shortened: selector pairs or whole texts truncated at the end.
        short: dropped: a text has fewer than ``min_characters`` characters.
        prefixes: pairs with a prompt removed from both responses.
        duplicates: dropped: repeated pairs.
        leaks: dropped from training (or validation): also test pairs.
        unplaced: validation and test rows without a training client.
        limited: dropped by ``limit``.
        dropped: clients dropped for lack of training pairs.
        control: rows with a control token within a text, which is encoded as text.
        ends: rows with an end-of-text token before the end of a response.
        unlike: rows whose prompt the chat template renders differently with a response.
        plain: rows with a text prompt for a model with a chat template.
        glued: rows with no blank between a text and its response.
        kept: rows assigned to a client.
        needed: smallest ``max_length`` that would fit all pairs; 0 if all fit.
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
    control: int = 0
    ends: int = 0
    unlike: int = 0
    plain: int = 0
    glued: int = 0
    kept: int = 0
    needed: int = 0

    @property
    def left_out(self) -> dict[str, int]:
        """The nonzero counts of dropped rows, by field name."""
        return {name: count for name in LEFT_OUT if (count := getattr(self, name))}

    @property
    def rows(self) -> int:
        """The number of kept and dropped rows."""
        return self.kept + sum(self.left_out.values())


class Findings(StrictModel):
    """Warnings about the clients and files of a dataset.

    Attributes:
        lost: client → number of dropped rows, if the data name the clients. Rows beyond ``data.limit`` do not
            count.
        gone: clients that lost all training rows.
        similar: groups of names that may denote the same client.
        ignored: files in source folders that were not read.
        unread: columns that were neither used nor named as metadata.
        promptless: pairs with an empty prompt, unless it is asked for.
        implicit: rows whose prompt is the common beginning of two texts without marks of turns.
        contradicted: pairs of rows that rate the rejected response higher.
        empty: files in source folders without rows.
        garbled: characters that a wrong encoding gives, or U+FFFD → number of pairs with them.
    """

    lost: dict[str, int] = Field(default_factory=dict)
    gone: tuple[str, ...] = ()
    similar: tuple[tuple[str, ...], ...] = ()
    ignored: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    promptless: int = 0
    implicit: int = 0
    contradicted: int = 0
    empty: tuple[str, ...] = ()
    garbled: dict[str, int] = Field(default_factory=dict)


def similar_names(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Group names that differ only in case, whitespace or Unicode normalisation.

    A name with leading or trailing whitespace is a group by itself.

    >>> similar_names(["Ann", "ben", "ann ", "Ann Lee", "Ann  Lee"])
    (('Ann', 'ann '), ('Ann  Lee', 'Ann Lee'))
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        plain = " ".join(unicodedata.normalize("NFKC", name).split()).casefold()
        groups.setdefault(plain, []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1 or group[0] != group[0].strip())


class _Clients(Mapping[str, ClientData]):
    """Clients by id, created on access from one array of all rows."""

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
    """Clients, and the token set indexed by their rows.

    Attributes:
        clients: id → client, each with at least one training pair.
        sizes: client → numbers of pairs, also known if the pairs are not on this machine.
        tokens: tokens and texts of all rows.
        flipped: clients with chosen and rejected swapped.
        row_counts: numbers of rows read, dropped and used.
        fingerprint: SHA-256 of the data and their assignment to clients. A resumed run requires the same one.
        findings: warnings about clients and files.
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
            DataError: the folder contains no dataset, or a file is damaged.
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
                raise ValueError(f"held.i64 has row numbers outside the {len(tokens):,} rows")
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
        """Return a dataset of which only the clients and their sizes are on this machine."""
        none = np.zeros(0, np.int64)
        clients = {name: ClientData(name, none, none, none) for name in sizes}
        return cls(clients, sizes, TokenSet.empty(), frozenset(), RowCounts(), "")

    def renamed(self, names: Mapping[str, str]) -> FederatedDataset:
        """Return the dataset with only the clients in ``names``: client → its new name."""
        clients = {new: replace(self.clients[old], id=new) for old, new in names.items()}
        return replace(self, clients=clients, sizes={new: self.sizes[old] for old, new in names.items()})

    def among(self, members: Iterable[str], held_out: int) -> FederatedDataset:
        """Return the dataset with the names of all ``members`` of a federation.

        Sizes of the others are unknown: each gets one training pair, and ``held_out`` validation and test
        pairs.
        """
        others = {name: ClientSizes(1, held_out, held_out) for name in members}
        return replace(self, sizes={**others, **self.sizes})

    @property
    def has_pairs(self) -> bool:
        """Whether the pairs are on this machine."""
        return len(self.tokens) > 0


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``clients.json``: clients, inputs, and the digests of all other files.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return files.loads_with_digest((folder / CLIENTS).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(_damaged(folder, f"{CLIENTS}: {error}")) from error


def _damaged(folder: Path, error: object) -> str:
    return f"{folder} is not a complete dataset ({error}); delete it to rebuild it"
