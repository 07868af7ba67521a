"""Pairs that a run has never seen, given to its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefed.data import DataError, Record, Source, Template, TokenSet, TokenWriter
from prefed.data.assign import label
from prefed.data.config import ByColumn, Partition
from prefed.data.errors import Problems
from prefed.data.sources import Tally, records
from prefed.runs.loaded import LoadedRun

__all__ = ["EVERYBODY", "Pairs", "read_pairs"]

EVERYBODY = "everybody"
"""Stands for all clients, where they have one model and one set of pairs."""


@dataclass(frozen=True)
class Pairs:
    """Pairs and who is judged on them.

    Attributes:
        tokens: the pairs.
        rows: client → its rows; or all rows under :data:`EVERYBODY`.
        common: whether it is the latter: a client may have that name too.
        notes: what was left out, and whether the run has trained on any of the pairs.
    """

    tokens: TokenSet
    rows: Mapping[str, NDArray[np.int64]]
    common: bool
    notes: tuple[str, ...]


def read_pairs(run: LoadedRun, file: str, folder: Path, *, everyone: bool) -> Pairs:
    """Read, tokenise and hand out the pairs of ``file`` as the run's own were.

    Args:
        run: gives formats, template, lengths, and the partition's column.
        file: a file, a folder of files or a hub name; relative to the working folder.
        folder: where to keep the tokens.
        everyone: everybody is given all pairs, whatever the partition's column says.

    Raises:
        DataError: rows that cannot be used, or no row that belongs to a client of the run.
    """
    # How many rows of each of its own sources the run read says nothing about this one.
    config, clients = run.experiment.data.model_copy(update={"rows": None}), run.clients
    groups = None if everyone else _groups(config.partition, clients)
    hint = "Repair them, or judge every client on all rows with --everyone." if groups else "Repair them."
    problems, tally = Problems(hint=hint, forgiving=config.invalid == "drop"), Tally()
    writer = TokenWriter(
        folder,
        run.backbone.tokenizer,
        Template(run.backbone.tokenizer, config.template),
        max_length=config.max_length,
        too_long=config.too_long,
        problems=problems,
        codes=1,
    )
    strangers = 0
    try:
        for record, where in records(Source(path=file), config, "test", None, None, problems, tally):
            try:
                client = _client(config.partition, record, groups)
            except ValueError as error:
                problems.add(where, str(error))
                continue
            if client is None:
                strangers += 1
                continue
            writer.add(record, where, None, client)
        writer.flush()
        problems.finish()
        held = np.array(writer.codes[0], dtype=np.int64)
        if not len(held):
            raise DataError(f"{file}: {_nobody(strangers, config.partition, clients)}")
        turned = run.place.federation.flipped if groups else frozenset()
        writer.finish(np.isin(held, [k for k, name in enumerate(clients) if name in turned]))
    finally:
        writer.close()
    tokens = TokenSet.open(folder)
    rows = {EVERYBODY: np.arange(len(held))}
    if groups is not None:
        rows = {clients[k]: np.flatnonzero(held == k) for k in np.unique(held)}
    lost = {
        "pairs are of no client of the run": strangers,
        "pairs have two equal responses": tally.identical,
        "pairs are ties": tally.ties,
        "pairs are malformed": problems.count,
        "pairs are too long": writer.too_long,
    }
    notes = [f"left out: {count:,} {why}" for why, count in lost.items() if count]
    return Pairs(tokens, rows, groups is None, (*notes, *_trained(run, tokens)))


def _groups(partition: Partition, clients: tuple[str, ...]) -> Mapping[str, int] | None:
    """Value of the partition's column → index of its client; ``None`` if no column names clients."""
    if not isinstance(partition, ByColumn):
        return None
    index = {name: k for k, name in enumerate(clients)}
    if partition.groups is None:
        return index
    return {
        value: index[name] for name, values in partition.groups.items() if name in index for value in values
    }


def _client(partition: Partition, record: Record, groups: Mapping[str, int] | None) -> int | None:
    return 0 if groups is None else groups.get(label(partition, record, None))


def _nobody(strangers: int, partition: Partition, clients: tuple[str, ...]) -> str:
    if not strangers:
        return "holds no usable pair"
    column = getattr(partition, "column", "")
    shown = ", ".join(clients[:8]) + (", …" if len(clients) > 8 else "")
    return f"no row's {column!r} is a client of the run ({shown}); --everyone judges every client on all rows"


def _trained(run: LoadedRun, tokens: TokenSet) -> list[str]:
    """A note if the run has trained on some of the pairs."""
    if not run.has_data:
        return []
    federation = run.place.federation
    rows = np.concatenate([data.train for data in federation.clients.values()])
    known = int(np.isin(tokens.pairs, federation.tokens.pairs[rows]).sum())
    if not known:
        return []
    return [f"the run has trained on {known:,} of these {len(tokens):,} pairs, some client or other"]
