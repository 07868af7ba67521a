"""From the ``[data]`` table to a federation in a folder."""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefed import files
from prefed.core.key import Key
from prefed.data import splits
from prefed.data.assign import ROLES, Assignment, Rows, assign, label, natural
from prefed.data.config import DataConfig
from prefed.data.dataset import CLIENTS, FederatedDataset, Report, read_manifest
from prefed.data.errors import AbsentError, DataError, OtherDataError, Problems, Where
from prefed.data.sources import Tally, origin, records
from prefed.data.templates import Template, Tokenizer
from prefed.data.tokens import MANIFEST
from prefed.data.writer import TokenWriter, tokenizer_digest

__all__ = ["build_dataset"]

_PARTIAL = ".partial"
_GONE = -1
"""The role of rows that no client holds."""
_EVERY = 100
"""Rows between two words of progress."""


def build_dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    key: Key,
    folder: Path,
    base: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> FederatedDataset:
    """Read, tokenise and divide the data, into ``folder``; or open what an equal call left there.

    Sources are streamed to disk: memory holds some 50 bytes a row. The folder appears whole or not at all.

    Args:
        config: the ``[data]`` table.
        tokenizer: a transformers tokenizer with an end-of-text token.
        key: partition, splits and limits are drawn from it.
        folder: where tokens, texts and rows are kept; made here.
        base: folder that relative paths start from, the experiment file's.
        progress: told now and then how many rows have been read.

    Raises:
        DataError: rows that cannot be used (named with file and row), data that cannot be divided as asked,
            or a folder that holds other data.
    """
    folder = Path(folder)
    inputs = _inputs(config, tokenizer, key, base)
    if (folder / CLIENTS).exists():
        before = read_manifest(folder)["inputs"]
        changed = sorted(
            name for name in inputs.keys() | before.keys() if inputs.get(name) != before.get(name)
        )
        if changed:
            raise OtherDataError(
                f"{folder} holds data made from other {' and '.join(changed)}; "
                "use another folder, or delete this one"
            )
        return FederatedDataset.open(folder)
    partial = folder.with_name(folder.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    files.private_folder(partial)
    try:
        _build(config, tokenizer, key, partial, base, inputs, progress or (lambda read: None))
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
        files.sync(folder.parent)
    except OSError as error:
        raise DataError(str(files.write_error(folder, files.folder_size(partial), error))) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return FederatedDataset.open(folder)


def _inputs(config: DataConfig, tokenizer: Tokenizer, key: Key, base: Path | None) -> dict[str, Any]:
    """All that decides the result, told apart by content rather than by path."""
    settings = config.model_dump(mode="json", exclude={"train", "validation", "test"})
    sources = []
    for role, name, source in config.sources():
        options = source.model_dump(mode="json", exclude={"path"})
        sources.append([role, name, options, origin(source, base)])
    return {
        "settings": settings,
        "source files": sources,
        "tokenizer": tokenizer_digest(tokenizer),
        "seed": [key.seed, *key.path],
    }


def _build(
    config: DataConfig,
    tokenizer: Tokenizer,
    key: Key,
    folder: Path,
    base: Path | None,
    inputs: dict[str, Any],
    progress: Callable[[int], None],
) -> None:
    tally = Tally()
    problems = Problems(
        hint='Repair them, or leave such rows out with invalid = "drop".', forgiving=config.invalid == "drop"
    )
    writer = TokenWriter(
        folder,
        tokenizer,
        Template(tokenizer, config.template),
        max_length=config.max_length,
        too_long=config.too_long,
        problems=problems,
        codes=2,
    )
    try:
        rows = _read(config, base, writer, problems, tally, progress)
        pair, orientation = writer.column("pairs"), writer.column("orientations")
        counts = {"duplicates": 0, "leaks": 0}
        found = natural(config.partition, rows)
        scope = np.zeros(len(pair), dtype=np.int64) if found is None else found.client
        use = rows.use.copy()
        marks = splits.repeats(scope, rows.role, pair, orientation)
        if config.duplicates == "error" and marks.any():
            _refuse(marks, writer)
        if config.duplicates in ("drop", "drop_tested"):
            counts["duplicates"] = int(marks.sum())
            use &= ~marks
        marks = splits.leaks(scope, rows.role, pair) & use
        counts["leaks"] = int(marks.sum())
        use &= ~marks
        rows = Rows(rows.role, rows.label, rows.labels, rows.margin, rows.prompt, use)
        if not len(rows.of(0)):
            told = ", ".join(f"{len(rows.of(k)):,} for {ROLES[k]}" for k in (1, 2))
            raise DataError(
                f"no pair is left to train on: usable are {told}; {counts['leaks']:,} were left out of "
                "training since they are also tested on"
            )
        assignment = assign(config.partition, rows, key.at("partition"))
        group = rows.prompt if config.split_by == "prompt" else pair
        ids, held, bounds, more = _hold(config, assignment, rows, group, pair, key)
        counts["leaks"] += more.pop("leaks")
        counts |= more
        flipped = _flipped(config, assignment, ids)
        opposite = np.zeros(len(pair), dtype=np.bool_)
        for k in np.flatnonzero([name in flipped for name in ids]):
            opposite[held[bounds[k, 0] : bounds[k, 3]]] = True
        fingerprint = writer.finish(opposite)
    finally:
        writer.close()
    held.astype("<i8").tofile(folder / "held.i64")
    bounds.astype("<i8").tofile(folder / "bounds.i64")
    for name in ("held.i64", "bounds.i64", MANIFEST):
        files.sync(folder / name)
    digest = hashlib.sha256(json.dumps([fingerprint, ids]).encode() + held.tobytes() + bounds.tobytes())
    report = Report(
        read=tally.read,
        invalid=problems.count,
        identical=tally.identical,
        ties=tally.ties,
        too_long=writer.too_long,
        cut=writer.cut,
        prefixes=tally.prefixes,
        kept=len(held),
        **counts,
    )
    for path in folder.iterdir():
        path.chmod(0o600)
    held_by = {
        "ids": ids,
        "flipped": sorted(flipped),
        "report": report.model_dump(),
        "fingerprint": digest.hexdigest(),
        "inputs": inputs,
        "digests": {path.name: files.file_digest(path) for path in sorted(folder.iterdir())},
    }
    files.write(folder / CLIENTS, files.dumps_with_digest(held_by), mode=0o600)


def _read(
    config: DataConfig,
    base: Path | None,
    writer: TokenWriter,
    problems: Problems,
    tally: Tally,
    progress: Callable[[int], None],
) -> Rows:
    labels: dict[str, int] = {}
    if isinstance(config.train, dict) and config.partition.by == "source":
        # Clients come in the order of the table.
        labels = {name: k for k, name in enumerate(config.train)}
    absent = _Absent(problems)
    for role, name, source in config.sources():
        read = tally.read + problems.count
        for record, where in records(source, config, role, name, base, problems, tally):
            try:
                mark = label(config.partition, record, name)
            except AbsentError as error:
                absent.add(where, error)
                continue
            except ValueError as error:
                problems.add(where, str(error))
                continue
            absent.settle()
            part = record.split if role == "train" and record.split else role
            category = record.category or mark or record.domain
            writer.add(record, where, category, ROLES.index(part), labels.setdefault(mark, len(labels)))
            if tally.read % _EVERY == 0:
                progress(tally.read)
        if tally.read + problems.count == read:
            raise DataError(f"{source.path}: there is no row in it")
    absent.finish()
    writer.flush()
    progress(tally.read)
    problems.finish()
    if not len(writer):
        raise DataError(_nothing(config, writer, problems, tally))
    return Rows(
        role=np.array(writer.codes[0], dtype=np.int64),
        label=np.array(writer.codes[1], dtype=np.int64),
        labels=list(labels),
        margin=writer.column("margins"),
        prompt=writer.column("prompts"),
        use=np.ones(len(writer), dtype=np.bool_),
    )


class _Absent:
    """Rows without the partition's column: one mistake if all rows are such, else each row's own."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._rows: list[tuple[Where, AbsentError]] = []
        self._found = False
        self._count = 0

    def add(self, where: Where, error: AbsentError) -> None:
        if self._found:
            self._problems.add(where, str(error))
            return
        self._count += 1
        if len(self._rows) < self._problems.limit:
            self._rows.append((where, error))
        elif not self._problems.forgiving:
            self.finish()

    def settle(self) -> None:
        """A row has the column: those before it were at fault themselves."""
        if self._found:
            return
        self._found = True
        # Rows beyond those kept are forgiven ones, of which the number is all that matters.
        self._problems.count += self._count - len(self._rows)
        for where, error in self._rows:
            self._problems.add(where, str(error))

    def finish(self) -> None:
        """The end of the data, or as far as it is worth reading.

        Raises:
            DataError: no row has the column.
        """
        if self._found or not self._rows:
            return
        (first, error), (last, _) = self._rows[0], self._rows[-1]
        near = difflib.get_close_matches(error.column, error.there, n=1)
        rows = f"{first.file}, rows {first.row}" if first.file == last.file else str(first)
        rows += f" to {last.row if first.file == last.file else last}"
        named = "by" if error.column == "margin" else "column"
        raise DataError(
            f"{rows}: no row has {error.column!r}, which [data.partition] {named} names; "
            f"the columns there are {', '.join(error.there) or 'none besides prompt, chosen and rejected'}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )


def _nothing(config: DataConfig, writer: TokenWriter, problems: Problems, tally: Tally) -> str:
    """Why no pair is left of rows that were read."""
    reasons = {
        "two equal responses": tally.identical,
        "no preference": tally.ties,
        f"malformed or blank, the first {problems.first}": problems.count,
        f"a response longer than max_length = {config.max_length} allows": writer.too_long,
    }
    told = [f"  {count:,}: {reason}" for reason, count in reasons.items() if count]
    if writer.too_long:
        told.append(f"The shortest of the long pairs needs max_length = {writer.shortest}.")
    names = ", ".join(source.path for _, _, source in config.sources())
    return "\n".join([f"{names}: no usable pair; why rows were left out:", *told])


def _hold(
    config: DataConfig,
    assignment: Assignment,
    rows: Rows,
    group: NDArray[np.uint64],
    pair: NDArray[np.uint64],
    key: Key,
) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64], dict[str, int]]:
    """Each client's rows by role: ids, rows client by client, and where each role begins and ends."""
    fractions = _fractions(config, rows)
    usable = np.flatnonzero(rows.use & (assignment.client >= 0))
    order = usable[np.argsort(assignment.client[usable], kind="stable")]
    edges = np.searchsorted(assignment.client[order], np.arange(len(assignment.names) + 1))
    part = rows.role.copy()
    for k, name in enumerate(assignment.names):
        training = order[edges[k] : edges[k + 1]]
        training = training[part[training] == 0]
        if len(training):
            drawn = key.at("client", name).at("split")
            part[training] = splits.cut(group[training], *fractions(name), drawn)
    counts = {"unplaced": int(rows.use.sum()) - len(usable), "limited": 0, "dropped": 0, "leaks": 0}
    if config.duplicates == "drop_tested":
        # One scope for all clients, and only now: before, nobody's rows were drawn for a test.
        everybody = np.full(len(pair), -1, dtype=np.int64)
        everybody[usable] = 0
        part[splits.leaks(everybody, part, pair)] = _GONE
        counts["leaks"] = int((part[usable] == _GONE).sum())
    ids: list[str] = []
    # Filled in place of a list of many small arrays, of which there may be tens of thousands.
    held = np.empty(len(order), dtype=np.int64)
    ends = [0]
    for k, name in enumerate(assignment.names):
        mine = order[edges[k] : edges[k + 1]]
        train, validation, test = (mine[part[mine] == role] for role in range(3))
        if not len(train):
            counts["dropped"] += 1
            counts["unplaced"] += len(validation) + len(test)
            continue
        if config.limit is not None and len(train) > config.limit:
            counts["limited"] += len(train) - config.limit
            picked = key.at("client", name).at("limit").numpy().permutation(len(train))[: config.limit]
            train = train[np.sort(picked)]
        ids.append(name)
        for some in (train, validation, test):
            held[ends[-1] : ends[-1] + len(some)] = np.sort(some)
            ends.append(ends[-1] + len(some))
    if not ids:
        raise DataError('no client keeps a pair to train on: all are tested on; set duplicates = "drop"')
    every = np.array(ends, dtype=np.int64)
    bounds = np.stack([every[0:-1:3], every[1::3], every[2::3], every[3::3]], axis=1)
    return ids, held[: ends[-1]], bounds, counts


def _fractions(config: DataConfig, rows: Rows) -> Callable[[str], tuple[float, float]]:
    """The shares of a client's training rows to set apart, for validation and for test."""
    default = 0.1 if config.test_fraction is None else config.test_fraction
    if config.partition.by == "source":
        named = [
            set(table) if isinstance(table, dict) else set() for table in (config.validation, config.test)
        ]
        return lambda name: (
            0.0 if name in named[0] else config.validation_fraction,
            0.0 if name in named[1] else default,
        )
    validated, tested = (bool(len(rows.of(role))) for role in (1, 2))
    if (tested and config.test_fraction) or (validated and config.validation_fraction):
        raise DataError("the rows say which are for validation or test: leave that fraction out")
    return lambda name: (config.validation_fraction, 0.0 if tested else default)


def _flipped(config: DataConfig, assignment: Assignment, ids: list[str]) -> set[str]:
    flipped = {name for name, opposite in zip(assignment.names, assignment.flipped, strict=True) if opposite}
    for name in config.flip:
        if name not in ids:
            near = difflib.get_close_matches(name, ids, n=1)
            raise DataError(
                f"flip names client {name!r}, and there is none"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        flipped ^= {name}
    return flipped & set(ids)


def _refuse(marks: NDArray[np.bool_], writer: TokenWriter) -> None:
    problems = Problems(hint='Remove them, or set duplicates = "drop" or "keep".')
    for row in np.flatnonzero(marks):
        problems.add(writer.where(int(row)), "repeats an earlier pair")
    problems.finish()
