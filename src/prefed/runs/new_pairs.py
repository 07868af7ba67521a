"""Pairs of another file, assigned to the clients of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefed.data import DataError, Source, TokenSet, TokenWriter, make_encoder
from prefed.data.build import client_of
from prefed.data.config import ByColumn, ByFile, Partition
from prefed.data.errors import ErrorCollector
from prefed.data.partition import partition_value
from prefed.data.sources import ReadCounts, read_records
from prefed.runs.build import selector_settings
from prefed.runs.loaded import LoadedRun

EVERYBODY = "everybody"
"""Stands for all clients together, where all pairs belong to each of them."""


@dataclass(frozen=True)
class NewPairs:
    """Pairs, and the clients that are evaluated on them.

    Attributes:
        rows: client → its rows; or :data:`EVERYBODY` → all rows.
        common: whether ``rows`` has one entry for everybody. A client of the run may have that name too.
        notes: sentences on rows that were left out, and on pairs that the run has trained on.
    """

    tokens: TokenSet
    rows: Mapping[str, NDArray[np.int64]]
    common: bool
    notes: tuple[str, ...]


def read_pairs(run: LoadedRun, file: str, folder: Path, *, everyone: bool) -> NewPairs:
    """Read and tokenise the pairs of ``file``, and assign them to clients, as the run did with its own.

    With a partition by file, ``file`` is such a folder too, or the file of one client.

    Args:
        file: a file, a folder of files or a hub name; relative to the working folder.
        folder: the tokens are written there.
        everyone: all pairs belong to everybody, whatever the partition says.

    Raises:
        DataError: a row cannot be used, or no row belongs to a client of the run.
    """
    # [data] rows limits the run's own sources, not this one.
    config, clients = run.experiment.data.model_copy(update={"rows": None}), run.clients
    groups = None if everyone else _groups(config.partition, clients)
    hint = "Repair them, or judge every client on all rows with --everyone." if groups else "Repair them."
    errors, counts = ErrorCollector(hint=hint, count_only=config.invalid == "drop"), ReadCounts()
    encoder = make_encoder(config, run.backbone.tokenizer, selector_settings(run.experiment))
    writer = TokenWriter(folder, encoder, errors=errors, codes=1)
    strangers, by_file = 0, isinstance(config.partition, ByFile)
    try:
        for record, location in read_records(Source(path=file), config, "test", None, errors, counts):
            try:
                named = client_of(Path(location.file), Path(file).expanduser()) if by_file else None
                client = 0 if groups is None else groups.get(partition_value(config.partition, record, named))
            except ValueError as error:
                errors.add(location, str(error))
                continue
            if client is None:
                strangers += 1
                continue
            writer.add(record, location, None, client)
        writer.flush()
        errors.raise_if_any()
        owners = np.array(writer.codes[0], dtype=np.int64)
        if not len(owners):
            raise DataError(f"{file}: {_nobody(strangers, config.partition, clients)}")
        flipped = run.trainers.dataset.flipped if groups else frozenset()
        writer.finish(np.isin(owners, [k for k, name in enumerate(clients) if name in flipped]))
    finally:
        writer.close()
    tokens = TokenSet(folder)
    rows = {EVERYBODY: np.arange(len(owners))}
    if groups is not None:
        rows = {clients[k]: np.flatnonzero(owners == k) for k in np.unique(owners)}
    skipped_pairs = {
        "pairs are of no client of the run": strangers,
        "pairs have two equal responses": counts.identical + writer.identical,
        "pairs are ties": counts.ties,
        "pairs are malformed": errors.count,
        "pairs are too long": writer.too_long,
    }
    notes = [f"left out: {count:,} {why}" for why, count in skipped_pairs.items() if count]
    return NewPairs(tokens, rows, groups is None, (*notes, *_trained_on(run, tokens)))


def _groups(partition: Partition, clients: tuple[str, ...]) -> Mapping[str, int] | None:
    """Value of the partition's column, or name of a file → index of its client.

    It is ``None`` if neither columns nor files name clients.
    """
    if not isinstance(partition, ByColumn | ByFile):
        return None
    index = {name: k for k, name in enumerate(clients)}
    if isinstance(partition, ByFile) or partition.groups is None:
        return index
    return {
        value: index[name] for name, values in partition.groups.items() if name in index for value in values
    }


def _nobody(strangers: int, partition: Partition, clients: tuple[str, ...]) -> str:
    if not strangers or not isinstance(partition, ByColumn | ByFile):
        return "holds no usable pair"
    named = "file is called as" if isinstance(partition, ByFile) else f"row's {partition.column!r} is"
    shown = ", ".join(clients[:8]) + (", …" if len(clients) > 8 else "")
    return f"no {named} a client of the run ({shown}); --everyone judges every client on all rows"


def _trained_on(run: LoadedRun, tokens: TokenSet) -> list[str]:
    """A note if the run has trained on some of the pairs."""
    dataset = run.trainers.dataset
    rows = np.concatenate([data.train for data in dataset.clients.values()])
    count = int(np.isin(tokens.pairs, dataset.tokens.pairs[rows]).sum())
    note = f"the run has trained on {count:,} of these {len(tokens):,} pairs, some client or other"
    return [note] if count else []
