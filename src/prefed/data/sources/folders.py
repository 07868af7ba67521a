"""Find the data files in a folder, and read datasets saved with ``datasets``' ``save_to_disk``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prefed.core.text import did_you_mean
from prefed.data.errors import DataError, require

_NAMES: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Split → names of its file."""
_SET = ("state.json", "dataset_info.json")
_SPLITS = "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Whether the folder is a saved dataset, with or without splits."""
    return (folder / _SPLITS).is_file() or all((folder / name).is_file() for name in _SET)


def saved_home(item: Path, top: Path) -> Path | None:
    """Return the saved dataset that contains a file: ``top`` or a folder in it, or ``None``."""
    within = [folder for folder in item.parents if folder == top or top in folder.parents]
    return next((folder for folder in reversed(within) if is_saved(folder)), None)


def saved_parts(folder: Path, split: str | None) -> list[Path]:
    """Return the folders of a saved dataset: itself, or those of its splits. ``None`` selects all splits.

    Raises:
        DataError: the dataset has no such split.
    """
    if not (folder / _SPLITS).is_file():
        return [folder]
    names = [str(name) for name in _read(folder / _SPLITS, "splits")]
    if split is not None and split not in names:
        raise DataError(f"{folder}: no split {split!r} in this saved dataset; its splits: {', '.join(names)}")
    return [folder / name for name in names if split in (None, name)]


def saved_files(folder: Path) -> list[Path]:
    """Return the row files of a saved dataset without splits, in order."""
    return [folder / str(entry["filename"]) for entry in _read(folder / _SET[0], "_data_files")]


def saved_rows(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a saved dataset without splits.

    Raises:
        DataError: ``datasets`` is not installed, or the dataset cannot be read.
    """
    require("datasets", f"{folder}: a saved dataset")
    from datasets import load_from_disk

    try:
        yield from load_from_disk(str(folder))
    except Exception as error:  # errors of the library and of Arrow
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"{folder}: cannot read this saved dataset: {reason}") from error


def _read(path: Path, key: str) -> list[Any]:
    try:
        value = json.loads(path.read_text("utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not written by save_to_disk ({type(error).__name__}: {error})") from error
    return list(value)


_KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
SUFFIXES = ", ".join(_KINDS)
NOT_TEXT = {
    b"PAR1": "a Parquet file: its name should end in .parquet",
    b"PK\x03\x04": "a zip archive or an Excel workbook: unpack it, or save the sheet as CSV UTF-8",
    b"\xd0\xcf\x11\xe0": "an Excel workbook: save the sheet as CSV UTF-8",
    b"\x28\xb5\x2f\xfd": "a zstd file: unpack it",
    b"BZh": "a bzip2 file: unpack it",
    b"\xfd7zX": "an xz file: unpack it",
}
"""Magic bytes → type of file, and a remedy."""


def file_kind(path: Path) -> str | None:
    """Return the kind of a file by its name, a value of ``_KINDS``, or ``None`` if unknown."""
    name = data_stem(path)
    if name == path.name:
        return None
    return _KINDS[Path(path.name[len(name) :].lower().removesuffix(".gz")).name]


def data_stem(path: Path) -> str:
    """Return the name of a data file without its suffixes. Other names are unchanged.

    >>> data_stem(Path("wards/dr.ann.jsonl.gz")), data_stem(Path("notes.txt"))
    ('dr.ann', 'notes.txt')
    """
    name = path.name[:-3] if path.name.lower().endswith(".gz") else path.name
    stem, dot, end = name.rpartition(".")
    kind = _KINDS.get(f".{end.lower()}") if stem and dot else None
    return path.name if kind is None or (kind == "parquet" and name != path.name) else stem


def data_files(path: Path, split: str | None = None) -> list[Path]:
    """Return the data files at ``path``: the file itself, or those in a folder and its subfolders, sorted.

    A saved dataset is represented by its folder.

    Args:
        split: split of saved datasets, and of folders with a file per split; ``None`` selects all splits.

    Raises:
        DataError: there is no file of a known type or of this split.
    """
    text = ", ".join(suffix for suffix, kind in _KINDS.items() if kind != "parquet")
    known = f"{text} (each also .gz) and .parquet"
    if path.is_file():
        if file_kind(path) is None:
            with path.open("rb") as stream:
                head = stream.read(4)
            archive = next((what for magic, what in NOT_TEXT.items() if head.startswith(magic)), "")
            what = f"its first bytes indicate {archive}" if archive else "unknown file type"
            raise DataError(f"{path}: {what}; supported types: {known}")
        return [path]
    if not path.is_dir():
        siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings, show=lambda near: str(path.with_name(near)))
        raise DataError(f"{path}: no such file or folder{hint}")
    found = {saved_home(item, path) or item for item in _visible(path) if file_kind(item) is not None}
    items = [part for item in found for part in (saved_parts(item, split) if item.is_dir() else [item])]
    if not items:
        raise DataError(f"{path}: no data files in this folder; supported types: {known}")
    own = _of_split(items, split)
    if not own:
        names = ", ".join(sorted({str(_split_of(item)) for item in items}))
        raise DataError(f"{path}: no split {split!r} in this folder; its splits: {names}")
    return sorted(own, key=lambda item: item.relative_to(path).as_posix())


def _of_split(items: Iterable[Path], split: str | None) -> list[Path]:
    """Select the files of a split in each folder with one file per split, and all files of other folders.

    All files of such a folder, one of them for training, have names of :data:`_NAMES`, or names with the
    hub's numbers, as in ``train_prefs-00000-of-00002``.
    """
    folders: dict[Path, dict[Path, str | None]] = {}
    for item in items:
        folders.setdefault(item.parent, {})[item] = None if item.is_dir() else _split_of(item)
    chosen = list[Path]()
    for named in folders.values():
        names = set(named.values())
        whole = split is None or None in names or len(names) < 2
        whole = whole or not any(str(name).startswith("train") for name in names)
        chosen += [
            item for item, name in named.items() if whole or name in (split, *_NAMES.get(str(split), ()))
        ]
    return chosen


def _split_of(file: Path) -> str | None:
    """Return the split that a file is named after, if any."""
    stem = data_stem(file)
    numbered = re.fullmatch(r"(.+)-\d+-of-\d+", stem)
    if numbered is not None:
        return numbered[1]
    return stem if any(stem in names for names in _NAMES.values()) else None


def other_files(path: Path) -> list[str]:
    """Return the names of visible files in a folder that are not data files, and of links to nothing read."""
    others = (item for item in _visible(path) if file_kind(item) is None and saved_home(item, path) is None)
    links = (item for item in _visible(path, Path.is_symlink) if not item.is_file())
    return sorted(item.relative_to(path).as_posix() for item in {*others, *links})


def _visible(folder: Path, wanted: Callable[[Path], bool] = Path.is_file) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders that are not hidden."""
    for item in folder.rglob("*"):
        if wanted(item) and not any(part.startswith(".") for part in item.relative_to(folder).parts):
            yield item
