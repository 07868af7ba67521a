"""Pairs from memory: written to the run directory as JSON lines, and read from there like any file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

from prefed.config import ConfigError, Experiment
from prefed.core import files
from prefed.core.text import listed
from prefed.data import DataError
from prefed.data.partition import ROLES
from prefed.store import RunWriter, StoreError

Rows: TypeAlias = Any
"""A ``datasets.Dataset``, a ``pandas.DataFrame``, or a list of dicts."""

FOLDER = "data"
"""The folder of a run directory with the pairs that were passed from memory."""


@contextmanager
def from_memory(
    experiment: Experiment, data: Rows | Mapping[Any, Any], writer: RunWriter
) -> Iterator[Experiment]:
    """Yield the experiment with ``data`` as its only sources, written to the run directory.

    Within the block, a DataError names rows by the expression that selects them: ``data['anna'], row 3``.

    Args:
        data: as for :func:`prefed.runs.run.run`.

    Raises:
        TypeError: rows are of another type.
        ConfigError: ``data`` does not fit ``[data]``, e.g. because there is no partition.
        DataError: a row cannot be written as JSON.
        StoreError: the run has rounds, and ``data`` changed.
    """
    folder = writer.path.resolve() / FOLDER
    tables = experiment.tables()
    settings = {name: value for name, value in tables["data"].items() if name not in ROLES}
    if settings["partition"]["by"] == "file":  # of other sources: rows have no files
        del settings["partition"]
    sources: dict[Path, tuple[str, Rows]] = {}
    splits = _by_split(data)
    for role, each in splits.items():
        label = f"data[{role!r}]" if splits is data else "data"
        if isinstance(each, Mapping):
            settings[role] = {}
            for name, rows in each.items():
                path = folder / f"{role}-{len(settings[role]) + 1}.jsonl"
                _check_name(name, label, settings[role])
                settings[role][str(name)] = str(path)
                sources[path] = _checked(f"{label}[{name!r}]", rows)
        else:
            path = folder / f"{role}.jsonl"
            settings[role] = str(path)
            sources[path] = _checked(label, each)
    experiment = Experiment.from_tables({**tables, "data": settings}, "run(data=...)")
    _keep(sources, folder, writer)
    try:
        yield experiment
    except DataError as error:
        text = str(error)
        for path, (label, _) in sources.items():
            text = text.replace(str(path), label)
        error.args = (text,)
        raise


def _by_split(data: Rows | Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return split → rows, or client → rows; ``data`` itself if its keys are splits."""
    if not isinstance(data, Mapping) or not data.keys() & set(ROLES):
        return {"train": data}
    if "train" not in data or not data.keys() <= set(ROLES):
        raise ConfigError(
            f"run(data=...) has the keys {listed(list(data))}: it needs 'train', and may have 'validation' "
            "and 'test'; clients of these names go in data={'train': {client: rows, ...}}"
        )
    return data


def _check_name(name: Any, label: str, others: Mapping[str, str]) -> None:
    if not isinstance(name, str | Integral):
        raise TypeError(f"{label}: a client's name must be text or a whole number, not {name!r}")
    if str(name) in others:
        raise ConfigError(f"{label}: two clients are called {str(name)!r}; rename one of them")


def _checked(label: str, rows: Rows) -> tuple[str, Rows]:
    if isinstance(rows, list | tuple) or hasattr(rows, "iterrows") or hasattr(rows, "with_format"):
        return label, rows
    raise TypeError(
        f"{label} must be a datasets.Dataset, a pandas.DataFrame or a list of dicts, not "
        f"{type(rows).__name__}; for a file, set [data] train to its path"
    )


def _keep(sources: Mapping[Path, tuple[str, Rows]], folder: Path, writer: RunWriter) -> None:
    """Write the rows of each path in ``folder``, unless it has them already."""
    partial = folder.parent / "cache" / "rows.partial"
    shutil.rmtree(partial, ignore_errors=True)
    files.private_folder(partial.parent)
    files.private_folder(partial)
    try:
        for path, (label, rows) in sources.items():
            _write(partial / path.name, _each(rows, label), label)
        if folder.exists():
            if _digests(folder) == _digests(partial):
                return
            if writer.round:
                raise StoreError(
                    f"{writer.path} cannot continue: data= changed since it started; pass the original data, "
                    "or none with the experiment of its config.toml, or start a new run in another directory"
                )
            shutil.rmtree(folder)
        partial.rename(folder)
        files.sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: files.file_digest(path) for path in folder.iterdir()}


def _each(rows: Rows, label: str) -> Iterable[Any]:
    """Return the rows as Python objects, with ``None`` for a DataFrame's missing values."""
    if hasattr(rows, "iterrows"):
        if not rows.columns.is_unique:
            raise DataError(f"{label}: two columns have the same name; rename or remove one of them")
        records: Iterable[Any] = rows.astype(object).where(rows.notna(), None).to_dict("records")
        return records
    if hasattr(rows, "with_format"):
        python: Iterable[Any] = rows.with_format(None)
        return python
    each: Iterable[Any] = rows
    return each


def _write(path: Path, rows: Iterable[Any], label: str) -> None:
    path.touch(mode=0o600)
    try:
        with path.open("w", encoding="utf-8") as lines:
            for number, row in enumerate(rows, 1):
                try:
                    line = json.dumps(row, default=_plain)
                except (TypeError, ValueError, RecursionError) as error:
                    raise DataError(
                        f"{label}, row {number}: {error}; use text, numbers, lists and dicts"
                    ) from error
                lines.write(f"{line}\n")
        files.sync(path)
    except OSError as error:
        raise files.write_error(path, files.folder_size(path.parent), error) from error


def _plain(value: Any) -> Any:
    """Return an array, a NumPy number or a mapping as JSON types, and a time as ``None``: no column uses one.

    Raises:
        TypeError: JSON has no such type.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "isoformat"):
        return None
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")
