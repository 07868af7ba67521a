"""Builds a federated dataset in a folder from the ``[data]`` table."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefed.core import files
from prefed.core.key import Key
from prefed.core.text import did_you_mean
from prefed.data.assign import ROLES, Assignment, RowTable, assign_clients, client_names, natural_partition
from prefed.data.choices import ChoiceEncoder
from prefed.data.config import DataConfig, SelectorConfig
from prefed.data.dataset import (
    CLIENTS,
    FederatedDataset,
    Findings,
    RowCounts,
    read_manifest,
    similar_names,
)
from prefed.data.encoding import Encoder, PolicyEncoder
from prefed.data.errors import DataError, DataMismatchError, ErrorCollector
from prefed.data.per_file import with_named_files
from prefed.data.read import read_rows
from prefed.data.sources import ReadCounts, source_digests
from prefed.data.sources.found import other_files
from prefed.data.splits import ClientSplits, duplicate_mask, leak_mask, split_clients
from prefed.data.templates import Template, Tokenizer
from prefed.data.tokens import MANIFEST
from prefed.data.writer import TokenWriter, tokenizer_digest


def build_dataset(
    config: DataConfig, tokenizer: Tokenizer, key: Key, folder: Path, selector: SelectorConfig | None = None
) -> FederatedDataset:
    """Read, tokenise, partition and split the data into ``folder``, or open the dataset that is there.

    Sources are streamed to disk; memory holds some 50 bytes per row. The folder is either complete or absent.

    Args:
        config: the ``[data]`` table. Relative paths start from the working folder.
        tokenizer: a transformers tokenizer. For a policy it has an end-of-text token.
        key: the randomness of partition, splits and limits.
        folder: holds tokens, texts and the clients' rows. It is made here.
        selector: the pairs become a selector's questions as this says; ``None``: they are a policy's.

    Raises:
        DataError: rows cannot be used (the message names file and row), or the data cannot be divided as
            configured.
        DataMismatchError: the folder holds a dataset that was built from other inputs.
    """
    folder, given, config = Path(folder), config, with_named_files(config)
    inputs = _inputs(config, tokenizer, key, selector)
    if (folder / CLIENTS).exists():
        before = read_manifest(folder)["inputs"]
        changed = sorted(n for n in inputs.keys() | before.keys() if inputs.get(n) != before.get(n))
        if changed:
            raise DataMismatchError(
                f"{folder} holds data made from other {' and '.join(changed)}; "
                "use another folder, or delete this one",
                files.digest(json.dumps(inputs, sort_keys=True).encode()),
            )
        return FederatedDataset.open(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    files.private_folder(partial)
    try:
        ignored = _ignored_files(given)
        _build(config, make_encoder(config, tokenizer, selector), key, partial, inputs, ignored)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
        files.sync(folder.parent)
    except OSError as error:
        raise DataError(str(files.write_error(folder, files.folder_size(partial), error))) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return FederatedDataset.open(folder)


def make_encoder(config: DataConfig, tokenizer: Tokenizer, selector: SelectorConfig | None) -> Encoder:
    """What makes token ids of the pairs: a selector's questions, or a policy's pairs with ``None``.

    Raises:
        DataError: the tokenizer lacks an end-of-text token, a chat template, or tokens for a
            selector's letters.
    """
    if selector is not None:
        return ChoiceEncoder(tokenizer, selector, max_length=config.max_length)
    template = Template(tokenizer, config.template)
    whole = config.score == "whole"
    return PolicyEncoder(
        tokenizer, template, max_length=config.max_length, too_long=config.too_long, shortens=whole
    )


def _inputs(
    config: DataConfig, tokenizer: Tokenizer, key: Key, selector: SelectorConfig | None
) -> dict[str, Any]:
    """Everything that decides the result. Sources are described by their content, not by their path."""
    settings = config.model_dump(mode="json", exclude={"train", "validation", "test"})
    sources = []
    for role, name, source in config.sources():
        options = source.model_dump(mode="json", exclude={"path"})
        sources.append([role, name, options, source_digests(source)])
    return {
        "settings": settings,
        "source files": sources,
        "tokenizer": tokenizer_digest(tokenizer),
        "seed": [key.seed, *key.path],
        **({} if selector is None else {"selector": selector.model_dump(mode="json")}),
    }


def _ignored_files(config: DataConfig) -> tuple[str, ...]:
    """The files in the sources' folders that are not read."""
    folders = (Path(source.path).expanduser() for _, _, source in config.sources())
    own = (folder for folder in folders if folder.is_dir())
    return tuple(dict.fromkeys(f"{folder.name}/{name}" for folder in own for name in other_files(folder)))


def _build(
    config: DataConfig,
    encoder: Encoder,
    key: Key,
    folder: Path,
    inputs: Mapping[str, Any],
    ignored: tuple[str, ...],
) -> None:
    counts = ReadCounts()
    errors = ErrorCollector(
        hint='Repair them, or leave such rows out with invalid = "drop".',
        count_only=config.invalid == "drop",
    )
    writer = TokenWriter(folder, encoder, errors=errors, codes=2)
    try:
        table = read_rows(config, writer, errors, counts)
        table, repeated = _deduplicate(config, table, writer)
        assignment = assign_clients(config.partition, table, key.at("partition"))
        splits = split_clients(config, assignment, table, writer.column("pairs"), key)
        flipped = _flipped(config, assignment, splits.ids)
        findings = _findings(config, table, writer, splits, ignored)
        fingerprint = writer.finish(_flipped_rows(splits, flipped, len(writer)))
    finally:
        writer.close()
    row_counts = RowCounts(
        read=counts.read,
        invalid=errors.count,
        identical=counts.identical + writer.identical,
        ties=counts.ties,
        too_long=writer.too_long,
        cut=writer.truncated,
        shortened=writer.shortened,
        short=counts.short,
        prefixes=counts.prefixes,
        kept=len(splits.rows),
        needed=writer.longest,
        **(Counter(repeated) + Counter(splits.counts)),
    )
    _write(folder, splits, flipped, fingerprint, row_counts, findings, inputs)


def _deduplicate(config: DataConfig, table: RowTable, writer: TokenWriter) -> tuple[RowTable, dict[str, int]]:
    """Leave out duplicates, and training rows whose pair is also tested on.

    Where the data name the clients, rows are compared within a client; otherwise within the whole set.

    Returns:
        The table without these rows among its usable ones, and how many there were of each.

    Raises:
        DataError: there are duplicates and they are an error, or no pair is left to train on.
    """
    pair, orientation = writer.column("pairs"), writer.column("orientations")
    natural = natural_partition(config.partition, table)
    scope = np.zeros(len(pair), dtype=np.int64) if natural is None else natural.client
    duplicates = duplicate_mask(scope, table.role, pair, orientation)
    if config.duplicates == "error":
        errors = ErrorCollector(hint='Remove them, or set duplicates = "drop" or "keep".')
        for row in np.flatnonzero(duplicates):
            errors.add(writer.location(int(row)), "repeats an earlier pair")
        errors.raise_if_any()
    if config.duplicates == "keep":
        duplicates[:] = False
    leaks = leak_mask(scope, table.role, pair) & ~duplicates
    table = replace(table, usable=table.usable & ~duplicates & ~leaks)
    counts = {"duplicates": int(duplicates.sum()), "leaks": int(leaks.sum())}
    if not len(table.rows_of(0)):
        others = ", ".join(f"{len(table.rows_of(k)):,} for {ROLES[k]}" for k in (1, 2))
        raise DataError(
            f"no pair is left to train on: usable are {others}; {counts['leaks']:,} were left out of "
            "training since they are also tested on"
        )
    return table, counts


def _findings(
    config: DataConfig, table: RowTable, writer: TokenWriter, splits: ClientSplits, ignored: tuple[str, ...]
) -> Findings:
    """What a person should know of the clients, where the data themselves name them."""
    names = client_names(config.partition, table.values)
    if names is None:
        return Findings(ignored=ignored)
    lost: Counter[str] = Counter()
    trained = {names[value] for value in table.value[table.role == 0]}
    for (role, value), count in writer.left_out.items():
        lost[names[value]] += count
        trained |= {names[value]} if role == 0 else set()
    for row in (*np.flatnonzero(~table.usable), *splits.tested):
        lost[names[table.value[row]]] += 1
    gone = tuple(sorted(trained - set(splits.ids)))
    return Findings(lost=dict(lost), gone=gone, similar=similar_names(names), ignored=ignored)


def _flipped(config: DataConfig, assignment: Assignment, ids: list[str]) -> set[str]:
    """The clients whose chosen and rejected are swapped. A flip by partition and by ``flip`` is none."""
    flipped = {name for name, flip in zip(assignment.ids, assignment.flipped, strict=True) if flip}
    for name in config.flip:
        if name not in ids:
            raise DataError(f"flip names client {name!r}, and there is none{did_you_mean(name, ids)}")
        flipped ^= {name}
    return flipped & set(ids)


def _flipped_rows(splits: ClientSplits, flipped: set[str], count: int) -> NDArray[np.bool_]:
    """The rows of the flipped clients, ``bool [count]``."""
    mask = np.zeros(count, dtype=np.bool_)
    for name, bounds in zip(splits.ids, splits.bounds, strict=True):
        if name in flipped:
            mask[splits.rows[bounds[0] : bounds[3]]] = True
    return mask


def _write(
    folder: Path,
    splits: ClientSplits,
    flipped: set[str],
    fingerprint: str,
    row_counts: RowCounts,
    findings: Findings,
    inputs: Mapping[str, Any],
) -> None:
    """Write the clients' rows, and ``clients.json`` with the digests of all other files."""
    splits.rows.astype("<i8").tofile(folder / "held.i64")
    splits.bounds.astype("<i8").tofile(folder / "bounds.i64")
    for name in ("held.i64", "bounds.i64", MANIFEST):
        files.sync(folder / name)
    digest = hashlib.sha256(json.dumps([fingerprint, splits.ids]).encode())
    digest.update(splits.rows.tobytes() + splits.bounds.tobytes())
    for path in folder.iterdir():
        path.chmod(0o600)
    clients = {
        "ids": splits.ids,
        "flipped": sorted(flipped),
        "report": row_counts.model_dump(),
        "findings": findings.model_dump(mode="json"),
        "fingerprint": digest.hexdigest(),
        "inputs": inputs,
        "digests": {path.name: files.file_digest(path) for path in sorted(folder.iterdir())},
    }
    files.write(folder / CLIENTS, files.dumps_with_digest(clients), mode=0o600)
