"""Builds a federated dataset in a folder from the ``[data]`` table: reads, assigns, splits and writes."""

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
from prefed.core.random_keys import Key
from prefed.core.text import control_character, did_you_mean, listed
from prefed.data.choices import ChoiceEncoder
from prefed.data.config import ByColumn, ByFile, BySource, DataConfig, SelectorConfig, Source
from prefed.data.dataset import (
    CLIENTS,
    FederatedDataset,
    Findings,
    RowCounts,
    read_manifest,
    similar_names,
)
from prefed.data.encoding import Encoder, PolicyEncoder, Template, Tokenizer
from prefed.data.errors import DataError, DataMismatchError, ErrorCollector, MissingColumnError, RowLocation
from prefed.data.partition import (
    ROLES,
    Assignment,
    ClientSplits,
    RowTable,
    assign_clients,
    client_names,
    duplicate_mask,
    leak_mask,
    natural_partition,
    partition_value,
    split_clients,
)
from prefed.data.sources import ReadCounts, read_records, source_digests
from prefed.data.sources.folders import (
    data_files,
    data_stem,
    is_saved,
    other_files,
    saved_home,
)
from prefed.data.tokens import MANIFEST, TokenWriter, tokenizer_digest


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
                f"{folder} holds data prepared from different {' and '.join(changed)}; "
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
        hint='Fix them, or drop such rows with [data] invalid = "drop".',
        count_only=config.invalid == "drop",
    )
    writer = TokenWriter(folder, encoder, errors=errors, codes=2)
    try:
        table = _read_rows(config, writer, errors, counts)
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
            f"no training pairs are left; usable: {others}; {counts['leaks']:,} were removed from "
            "training because they are also test pairs"
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
            raise DataError(f"flip: no client is called {name!r}{did_you_mean(name, ids)}")
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


def _read_rows(
    config: DataConfig, writer: TokenWriter, errors: ErrorCollector, counts: ReadCounts
) -> RowTable:
    """Read every source into ``writer``, which takes two codes per record: role and value of the partition.

    Returns:
        The columns that the partition needs, for the rows that the writer kept.

    Raises:
        DataError: rows that cannot be used, a source without rows, or no usable row at all.
    """
    values: dict[str, int] = {}
    if isinstance(config.train, dict) and config.partition.by == "source":
        # Clients have the order of the table.
        values = {name: k for k, name in enumerate(config.train)}
    missing, empty = _MissingColumn(errors, _per_client(config)), list[str]()
    for role, name, source in config.sources():
        before = counts.read + errors.count
        for record, location in read_records(source, config, role, name, errors, counts):
            try:
                value = partition_value(config.partition, record, name)
            except MissingColumnError as error:
                missing.add(location, error)
                continue
            except ValueError as error:
                errors.add(location, str(error))
                continue
            missing.column_exists()
            split = record.split if role == "train" and record.split else role
            category = record.category or value or record.domain
            code = values.setdefault(value, len(values))
            writer.add(record, location, category, ROLES.index(split), code)
        if counts.read + errors.count == before:
            empty.append(source.path)
    if empty:
        one, several = "the file has no rows", "the files have no rows"
        raise DataError(f"{listed(empty, str)}: {one if len(empty) == 1 else several}")
    missing.raise_if_everywhere()
    writer.flush()
    errors.raise_if_any()
    if not len(writer):
        raise DataError(_no_pair(config, writer, errors, counts))
    return RowTable(
        role=np.array(writer.codes[0], dtype=np.int64),
        value=np.array(writer.codes[1], dtype=np.int64),
        values=list(values),
        margin=writer.column("margins"),
        prompt=writer.column("prompts"),
        usable=np.ones(len(writer), dtype=np.bool_),
    )


class _MissingColumn:
    """Rows without the partition's column: one error if no row has it, otherwise one error per row.

    Rows are held back until a row with the column is read.

    Args:
        hint: for the end of the one error.
    """

    def __init__(self, errors: ErrorCollector, hint: str) -> None:
        self._errors, self._hint = errors, hint
        self._rows: list[tuple[RowLocation, MissingColumnError]] = []
        self._count = 0
        self._exists = False

    def add(self, location: RowLocation, error: MissingColumnError) -> None:
        """Note a row without the column."""
        if self._exists:
            self._errors.add(location, str(error))
            return
        self._count += 1
        if len(self._rows) < self._errors.limit:
            self._rows.append((location, error))
        elif not self._errors.count_only:
            self.raise_if_everywhere()

    def column_exists(self) -> None:
        """A row has the column, so each row before it is an error of its own."""
        if self._exists:
            return
        self._exists = True
        # More rows than the limit are noted only with ``count_only``. Then their number is enough.
        self._errors.count += self._count - len(self._rows)
        for location, error in self._rows:
            self._errors.add(location, str(error))

    def raise_if_everywhere(self) -> None:
        """Call this at the end of the data, or where reading stops.

        Raises:
            DataError: no row has the column.
        """
        if self._exists or not self._rows:
            return
        (first, error), (last, _) = self._rows[0], self._rows[-1]
        rows = f"{first.file}, rows {first.row}" if first.file == last.file else str(first)
        rows += f" to {last.row if first.file == last.file else last}"
        setting = "by" if error.column == "margin" else "column"
        raise DataError(
            f"{rows}: no row has the column {error.column!r} of [data.partition] {setting}; "
            f"the columns there are {', '.join(error.columns) or 'none besides prompt, chosen and rejected'}"
            + (did_you_mean(error.column, error.columns) or self._hint)
        )


def _per_client(config: DataConfig) -> str:
    """What to do where rows have no client's name, but files may have: the data are a folder of several."""
    train = config.train
    if not isinstance(train, Source) or not isinstance(config.partition, ByColumn):
        return ""
    folder = Path(train.path).expanduser()
    if not folder.is_dir() or len(data_files(folder, train.split)) < 2:
        return ""
    return '; if each file holds one client\'s rows, set [data] partition = {by = "file"}'


def _no_pair(config: DataConfig, writer: TokenWriter, errors: ErrorCollector, counts: ReadCounts) -> str:
    """The message where rows were read and none of them is a usable pair."""
    text = "a response" if writer.letters is None else "a selector's question"
    reasons = {
        "two equal responses": counts.identical + writer.identical,
        "no preference": counts.ties,
        f"malformed or blank, the first {errors.first}": errors.count,
        f"{text} longer than max_length = {config.max_length}": writer.too_long,
    }
    lines = [f"  {count:,}: {reason}" for reason, count in reasons.items() if count]
    if writer.too_long:
        lines.append(f"The shortest of these long pairs needs max_length = {writer.shortest}.")
    names = ", ".join(source.path for _, _, source in config.sources())
    return "\n".join([f"{names}: no usable pairs; rows were dropped as:", *lines])


def with_named_files(config: DataConfig) -> DataConfig:
    """``config`` where each file of a folder is a source by its client's name, if the partition is by file.

    Raises:
        DataError: a role has no folder, or two files have one client's name.
    """
    if not isinstance(config.partition, ByFile):
        return config
    sources = {role: _named(source, role) for role, _, source in config.sources()}
    return config.model_copy(update={**sources, "partition": BySource()})


def client_of(file: Path, folder: Path) -> str:
    """The client whose file, or saved data set, this is in a folder; ``folder`` may be the file itself."""
    home = saved_home(file, folder) or file
    return home.name if home.is_dir() else data_stem(home)


def _named(source: Source, role: str) -> dict[str, Source]:
    folder = Path(source.path).expanduser()
    if not folder.is_dir() or is_saved(folder):
        what = "not a folder" if not folder.exists() else "one data set" if folder.is_dir() else "a file"
        raise DataError(
            f'partition by = "file": data.{role} = {source.path!r} is {what}; name a folder with a file for '
            "each client, such as ann.jsonl"
        )
    named: dict[str, Source] = {}
    for file in data_files(folder, source.split or role):
        name = client_of(file, folder)
        control = control_character(name)
        if control is not None:
            raise DataError(f"{file}: a client's name cannot contain the control character {control}")
        if name in named:
            raise DataError(
                f"{named[name].path} and {file} would both be client {name!r}: rename one of them, or put a "
                "client's rows into one file"
            )
        named[name] = source.model_copy(update={"path": str(file)})
    return named
