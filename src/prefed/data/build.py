"""Build a federated dataset in a folder from the ``[data]`` table: read, assign, split and write."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from prefed.core import files
from prefed.core.random_keys import Key
from prefed.core.text import control_character, did_you_mean, listed
from prefed.data.config import ByColumn, ByFile, BySource, DataConfig, SelectorConfig, Source
from prefed.data.dataset import CLIENTS, FederatedDataset, Findings, RowCounts, read_manifest, similar_names
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
from prefed.data.record import Record, pair_digest
from prefed.data.sources import ReadCounts, read_records, source_digests
from prefed.data.sources.folders import data_files, data_stem, is_saved, other_files, saved_home
from prefed.data.sources.formats import POST_FIELDS
from prefed.data.tokens import MANIFEST, TokenWriter, tokenizer_digest

_log = logging.getLogger("prefed")

ENCODING = 2
"""The version of the rules in :mod:`prefed.data.encoding`; tokens of another one are not read."""


def build_dataset(
    config: DataConfig, tokenizer: Tokenizer, key: Key, folder: Path, selector: SelectorConfig | None = None
) -> FederatedDataset:
    """Read, tokenise, partition and split the data into ``folder``, or open the dataset in it.

    Sources are streamed to disk; memory use is about 50 bytes per row. ``folder`` appears only once it is
    complete.

    Args:
        config: the ``[data]`` table. Paths are relative to the working directory.
        tokenizer: a transformers tokenizer. A policy requires an end-of-text token.
        key: randomness of partition, splits and limits.
        folder: where to write tokens, texts and the rows of each client.
        selector: how to turn pairs into selector questions; ``None`` for a policy.

    Raises:
        DataError: rows cannot be used (the message names file and row), or the data cannot be divided as
            configured.
        DataMismatchError: the folder contains a dataset built from other inputs.
    """
    folder, given, config = Path(folder), config, without_excluded(with_named_files(config))
    inputs = _inputs(config, tokenizer, key, selector)
    if (folder / CLIENTS).exists():
        before = read_manifest(folder)["inputs"]
        changed = sorted(n for n in inputs.keys() | before.keys() if inputs.get(n) != before.get(n))
        # Rows that are left out may be deleted from their source.
        deleted = changed == ["source files"] and bool(config.exclude or config.exclude_pairs)
        if before.get("encoding") != ENCODING or deleted:
            # Resuming a run checks that the new tokens are the same.
            shutil.rmtree(folder)
            return build_dataset(given, tokenizer, key, folder, selector)
        if changed:
            raise DataMismatchError(
                f"{folder} contains data prepared from different {' and '.join(changed)}; "
                "use another folder, or delete this one",
                files.digest(json.dumps(inputs, sort_keys=True).encode()),
            )
        return FederatedDataset.open(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    files.private_folder(partial)
    try:
        names = _file_names(given, config)
        _build(config, make_encoder(config, tokenizer, selector), key, partial, inputs, names, selector)
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
    """Return the encoder of selector questions, or of policy pairs if ``selector`` is ``None``.

    Raises:
        DataError: the tokenizer lacks an end-of-text token, a chat template, or tokens for the letters of a
            selector.
    """
    if selector is not None:
        from prefed.data.choices import ChoiceEncoder

        return ChoiceEncoder(tokenizer, selector, max_length=config.max_length)
    return PolicyEncoder(
        tokenizer,
        Template.of(tokenizer, config),
        max_length=config.max_length,
        too_long=config.too_long,
        shortens=config.score == "whole",
    )


def _inputs(
    config: DataConfig, tokenizer: Tokenizer, key: Key, selector: SelectorConfig | None
) -> dict[str, Any]:
    """Return everything that determines the result, with sources identified by content, not by path."""
    # Tokens from before these settings existed are still read.
    unused = {name for name in ("exclude", "exclude_pairs") if not getattr(config, name)}
    settings = config.model_dump(mode="json", exclude={"train", "validation", "test", *unused})
    sources = []
    for role, name, source in config.sources():
        options = source.model_dump(mode="json", exclude={"path"})
        sources.append([role, name, options, source_digests(source)])
    return {
        "settings": settings,
        "source files": sources,
        "tokenizer": tokenizer_digest(tokenizer),
        "encoding": ENCODING,
        "seed": [key.seed, *key.path],
        **({} if selector is None else {"selector": selector.model_dump(mode="json")}),
    }


class _FileNames(NamedTuple):
    """Names of the files in source folders.

    Attributes:
        read: path → name of those that are read.
        ignored: those of an unknown type or of another split.
    """

    read: dict[str, str]
    ignored: tuple[str, ...]


def _file_names(config: DataConfig, used: DataConfig) -> _FileNames:
    read, found = set[Path](), dict[Path, str]()
    named = {Path(source.path) for _, _, source in used.sources()}
    for role, _, source in config.sources():
        folder = Path(source.path).expanduser()
        if folder.is_dir():
            own = data_files(folder, source.split or role)
            # Not the files of excluded clients.
            read.update(named.intersection(own) if isinstance(config.partition, ByFile) else own)
            names = [*map(folder.joinpath, other_files(folder)), *data_files(folder)]
            found |= {file: (folder.name / file.relative_to(folder)).as_posix() for file in names}
    return _FileNames(
        {str(file): name for file, name in found.items() if file in read},
        tuple(name for file, name in found.items() if file not in read),
    )


def _build(
    config: DataConfig,
    encoder: Encoder,
    key: Key,
    folder: Path,
    inputs: Mapping[str, Any],
    names: _FileNames,
    selector: SelectorConfig | None,
) -> None:
    excluded = _Excluded(config)
    config, counts = excluded.config, ReadCounts()
    errors = ErrorCollector(
        hint='Fix them, or drop such rows with [data] invalid = "drop".',
        count_only=config.invalid == "drop",
    )
    writer = TokenWriter(folder, encoder, errors=errors, codes=2)
    try:
        table = _read_rows(config, excluded, writer, errors, counts)
        responses = writer.response_hashes()
        table, repeated = _deduplicate(config, table, writer, responses)
        assignment = assign_clients(config.partition, table, key.at("partition"))
        splits = split_clients(config, assignment, table, writer.column("pairs"), key, responses)
        flipped = _flipped(config, assignment, splits.ids)
        _check_metadata(config, counts)
        findings = _findings(config, table, writer, splits).model_copy(
            update={
                "ignored": names.ignored,
                "unread": unread_columns(counts, selector),
                "promptless": counts.promptless,
                "implicit": counts.implicit,
                "contradicted": counts.contradicted,
                "garbled": dict(sorted(counts.garbled.items())),
                "empty": tuple(
                    name
                    for path, name in names.read.items()
                    if config.rows is None and path not in counts.files
                ),
            }
        )
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
        **cast(Mapping[str, int], writer.notes),
        **(Counter(repeated) + Counter(splits.counts)),
    )
    _write(folder, splits, flipped, fingerprint, row_counts, findings, inputs)


def _deduplicate(
    config: DataConfig, table: RowTable, writer: TokenWriter, responses: NDArray[np.uint64] | None
) -> tuple[RowTable, dict[str, int]]:
    """Mark duplicates, and training rows that are also test pairs, as unusable.

    If the data name the clients, rows are compared within each client; otherwise across the whole dataset.

    Returns:
        The updated table, and the numbers of ``duplicates`` and ``leaks``.

    Raises:
        DataError: ``duplicates = "error"`` and there are some, or no training pair is left.
    """
    pair, orientation = writer.column("pairs"), writer.column("orientations")
    natural = natural_partition(config.partition, table)
    scope = np.zeros(len(pair), dtype=np.int64) if natural is None else natural.client
    duplicates = duplicate_mask(scope, table.role, pair, orientation)
    if config.duplicates == "error":
        errors = ErrorCollector(hint='Remove them, or set [data] duplicates = "drop" or "keep".')
        for row in np.flatnonzero(duplicates):
            errors.add(writer.location(int(row)), "repeats an earlier pair")
        errors.raise_if_any()
    if config.duplicates == "keep":
        duplicates[:] = False
    leaks = leak_mask(scope, table.role, pair, responses) & ~duplicates
    table = replace(table, usable=table.usable & ~duplicates & ~leaks)
    counts = {"duplicates": int(duplicates.sum()), "leaks": int(leaks.sum())}
    if not len(table.rows_of(0)):
        others = ", ".join(f"{len(table.rows_of(k)):,} for {ROLES[k]}" for k in (1, 2))
        raise DataError(
            f"no training pairs are left; usable pairs: {others}; {counts['leaks']:,} were removed from "
            "training because they are also test pairs"
        )
    return table, counts


def _findings(config: DataConfig, table: RowTable, writer: TokenWriter, splits: ClientSplits) -> Findings:
    """Report lost and similarly named clients if the data name the clients."""
    names = client_names(config.partition, table.values)
    if names is None:
        return Findings()
    lost: Counter[str] = Counter()
    trained = {names[value] for value in table.value[table.role == 0]}
    for (role, value), count in writer.left_out.items():
        lost[names[value]] += count
        trained |= {names[value]} if role == 0 else set()
    for row in (*np.flatnonzero(~table.usable), *splits.tested):
        lost[names[table.value[row]]] += 1
    gone = tuple(sorted(trained - set(splits.ids)))
    return Findings(lost=dict(lost), gone=gone, similar=similar_names(names))


def _check_metadata(config: DataConfig, counts: ReadCounts) -> None:
    """Check that rows have the columns that ``data.metadata`` names."""
    columns = sorted(map(str, counts.columns))
    for name in config.metadata:
        if not counts.columns & {name, name.partition(".")[0]}:
            raise DataError(f"[data] metadata: no row has the column {name!r}{did_you_mean(name, columns)}")


def unread_columns(counts: ReadCounts, selector: SelectorConfig | None) -> tuple[str, ...]:
    """Return the columns that were not used."""
    shown = POST_FIELDS if selector is not None and selector.template == "summary" else ()
    return tuple(name for name in counts.unread if name not in shown)


def _flipped(config: DataConfig, assignment: Assignment, ids: list[str]) -> set[str]:
    """Return the clients with chosen and rejected swapped by either the partition or ``flip``, not both."""
    flipped = {*assignment.flipped}
    for name in config.flip:
        if name in config.exclude:
            continue
        if name not in ids:
            raise DataError(f"[data] flip: no client {name!r}{did_you_mean(name, ids)}")
        flipped ^= {name}
    return flipped & set(ids)


def _flipped_rows(splits: ClientSplits, flipped: set[str], count: int) -> NDArray[np.bool_]:
    """Mark the rows of the flipped clients, ``bool [count]``."""
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
    """Write the rows of the clients, and ``clients.json`` with the digests of all other files."""
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
    config: DataConfig,
    excluded: _Excluded,
    writer: TokenWriter,
    errors: ErrorCollector,
    counts: ReadCounts,
) -> RowTable:
    """Read every source into ``writer``, with two codes per record: its role and its partition value.

    Returns:
        The columns that the partition needs, for the rows kept by the writer.

    Raises:
        DataError: rows cannot be used, a source has no rows, or no row is usable.
    """
    values: dict[str, int] = {}
    if isinstance(config.train, dict) and config.partition.by == "source":
        # Number the clients in the order of the table.
        values = {name: k for k, name in enumerate(config.train)}
    missing, empty = _MissingColumn(errors, _without_column(config)), list[str]()
    kinds: dict[str, tuple[bool, RowLocation]] = {}
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
            if excluded(value, record):
                continue
            split = record.split if role == "train" and record.split else role
            thumb, first = kinds.setdefault(split, (record.label is not None, location))
            if thumb != (record.label is not None):
                here, there = ("a pair", "a thumb") if thumb else ("a thumb", "a pair")
                errors.add(location, f"this {split} row is {here}, but {first} is {there}", _ONE_KIND)
                continue
            category = record.category or value or record.domain
            code = values.setdefault(value, len(values))
            writer.add(record, location, category, ROLES.index(split), code)
        if counts.read + errors.count == before:
            empty.append(source.path)
    if empty:
        what = "this source" if len(empty) == 1 else "these sources"
        raise DataError(f"{listed(empty, str)}: there are no rows; add some, or remove {what}")
    missing.raise_if_everywhere()
    excluded.warn()
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


_ONE_KIND = 'Keep pairs and thumbs apart, or read every pair as two thumbs: [data] format = "thumbs".'


class _MissingColumn:
    """Report rows without the partition's column: one error if no row has it, otherwise one per row.

    Errors are held back until a row with the column is read.

    Args:
        errors: receives one error per row.
        hint: end of the single error.
    """

    def __init__(self, errors: ErrorCollector, hint: str) -> None:
        self._errors, self._hint = errors, hint
        self._rows: list[tuple[RowLocation, MissingColumnError]] = []
        self._count = 0
        self._exists = False

    def add(self, location: RowLocation, error: MissingColumnError) -> None:
        """Record a row without the column."""
        if self._exists:
            self._errors.add(location, str(error))
            return
        self._count += 1
        if len(self._rows) < self._errors.limit:
            self._rows.append((location, error))
        elif not self._errors.count_only:
            self.raise_if_everywhere()

    def column_exists(self) -> None:
        """Report all earlier rows, since a row with the column was read."""
        if self._exists:
            return
        self._exists = True
        # There are more rows than stored locations only with ``count_only``, which needs just their number.
        self._errors.count += self._count - len(self._rows)
        for location, error in self._rows:
            self._errors.add(location, str(error))

    def raise_if_everywhere(self) -> None:
        """Raise a single error if no row had the column. Call this when reading stops.

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
            f"other columns: {', '.join(error.columns) or 'none'}"
            + (did_you_mean(error.column, error.columns) or self._hint)
        )


def _without_column(config: DataConfig) -> str:
    """Suggest another partition for data without its column: one client per file, or shuffled rows."""
    train = config.train
    if not isinstance(train, Source) or not isinstance(config.partition, ByColumn):
        return ""
    folder = Path(train.path).expanduser()
    if not folder.is_dir() or len(data_files(folder, train.split or "train")) < 2:
        return (
            "; set it to the one that names the client, add the column, or shuffle the rows: "
            '[data] partition = {by = "iid", clients = 10}'
        )
    return '; if each file contains the rows of one client, set [data] partition = {by = "file"}'


def _no_pair(config: DataConfig, writer: TokenWriter, errors: ErrorCollector, counts: ReadCounts) -> str:
    """Return the error message for data in which no row is a usable pair."""
    text = "response" if writer.letters is None else "selector question"
    reasons = {
        "identical responses": counts.identical + writer.identical,
        "no preference": counts.ties,
        f"malformed or blank, the first: {errors.first}": errors.count,
        f"{text} longer than max_length = {config.max_length}": writer.too_long,
    }
    lines = [f"  {count:,}: {reason}" for reason, count in reasons.items() if count]
    if writer.too_long:
        lines.append(f"The shortest of these long pairs needs max_length = {writer.shortest}.")
    names = ", ".join(source.path for _, _, source in config.sources())
    return "\n".join([f"{names}: no usable pairs. Rows dropped:", *lines])


def with_named_files(config: DataConfig) -> DataConfig:
    """Replace ``by = "file"`` with ``by = "source"``, where each file of a folder is a named source.

    Raises:
        DataError: a role has no folder, or two files have the same client name.
    """
    if not isinstance(config.partition, ByFile):
        return config
    sources = dict[str, dict[str, Source]]()
    for role, _, source in config.sources():
        sources[role] = _named(source, role, sources.get("train", {}))
    return config.model_copy(update={**sources, "partition": BySource()})


def client_of(file: Path, folder: Path, known: Container[str]) -> str:
    """Return the client of a file, or of a saved dataset, in ``folder``, which may be the file itself.

    It is the first of the parts of the path, beginning with the file's name, that is ``known``, or else the
    name.
    """
    home = saved_home(file, folder) or file
    parts = () if home == folder else home.relative_to(folder).parts
    own = (*parts[:-1], home.name if home.is_dir() else data_stem(home))
    spans = ("/".join(own[start:end]) for start, end in _spans(len(own)))
    return next((span for span in spans if span in known), own[-1])


def _spans(length: int) -> Iterator[tuple[int, int]]:
    """Yield the beginnings and ends of the parts of a path: short ones first, and then late ones."""
    for size in range(1, length + 1):
        yield from ((end - size, end) for end in range(length, size - 1, -1))


def _distinct_names(found: Sequence[Path], folder: Path) -> set[str]:
    """Return names for files that have the same name in different folders: the shortest parts of their paths.

    Returns an empty set if the names of the files differ, or if the folders are not equally deep.
    """
    paths = [(*file.relative_to(folder).parts[:-1], client_of(file, folder, ())) for file in found]
    lengths = {len(path) for path in paths}
    for start, end in _spans(lengths.pop()) if len(lengths) == 1 else ():
        names = {"/".join(path[start:end]) for path in paths}
        if len(names) == len(paths):
            return names
    return set()


def without_excluded(config: DataConfig) -> DataConfig:
    """Return the settings without the sources and groups of the clients that ``exclude`` names.

    Raises:
        DataError: no client is left.
    """
    if not config.exclude:
        return config
    gone, changed = set(config.exclude), dict[str, Any]()
    if isinstance(config.partition, BySource):
        for role in ROLES:
            if isinstance(named := getattr(config, role), dict):
                changed[role] = {name: source for name, source in named.items() if name not in gone} or None
        if changed["train"] is None:
            raise DataError("[data] exclude names every client; leave one out of it")
    return config.model_copy(update=changed)


def clients_of_groups(config: DataConfig) -> dict[str, str]:
    """Return value of the partition's column → its client, for the values in groups."""
    groups = (config.partition.groups or {}) if isinstance(config.partition, ByColumn) else {}
    return {value: name for name, values in groups.items() for value in values}


class _Excluded:
    """Decides which rows are not used.

    Attributes:
        config: the settings without the groups of excluded clients.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config, self._named = config, isinstance(config.partition, ByColumn | BySource)
        self._clients, self._pairs, self._seen = set(config.exclude), set(config.exclude_pairs), set[str]()
        self._group = clients_of_groups(config)
        if isinstance(config.partition, ByColumn) and (groups := config.partition.groups) is not None:
            kept = {name: values for name, values in groups.items() if name not in self._clients}
            partition = config.partition.model_copy(update={"groups": kept})
            self.config = config.model_copy(update={"partition": partition})

    def __call__(self, value: str, record: Record) -> bool:
        """Whether to leave out a record with this value of the partition."""
        client = self._group.get(value, value) if self._named else ""
        self._seen.add(client)
        if client in self._clients:
            return True
        return bool(self._pairs) and pair_digest(client, record) in self._pairs

    def warn(self) -> None:
        """Warn of names that left out nothing but are nearly those of clients."""
        for name in sorted(self._clients - self._seen):
            if hint := did_you_mean(name, sorted(self._seen - self._clients)):
                _log.warning("[data] exclude: no row belongs to %r%s", name, hint)


def _named(source: Source, role: str, train: Mapping[str, Source]) -> dict[str, Source]:
    folder = Path(source.path).expanduser()
    if not folder.is_dir() or is_saved(folder):
        what = "not a folder" if not folder.exists() else "one dataset" if folder.is_dir() else "a file"
        raise DataError(
            f'[data.partition] by = "file": data.{role} = {source.path!r} is {what}; set it to a folder with '
            "one file per client, such as ann.jsonl"
        )
    named: dict[str, Source] = {}
    found = data_files(folder, source.split or role)
    known = train if role != "train" else _distinct_names(found, folder)
    for file in found:
        name = client_of(file, folder, known)
        control = control_character(name)
        if control is not None:
            raise DataError(f"{file}: a client's name cannot contain the control character {control}")
        if name in named:
            raise DataError(
                f"{named[name].path} and {file} both belong to client {name!r}; rename one of them, or merge "
                "the two files"
            )
        named[name] = source.model_copy(update={"path": str(file)})
    return named
