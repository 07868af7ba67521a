"""Preference pairs as token ids on disk, with their records. Memory holds a few small columns alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefed.data.errors import DataError
from prefed.data.record import Record

Ids: TypeAlias = NDArray[np.int32]

MANIFEST = "tokens.json"
VERSION = 1
IDS, RECORDS = "ids.i32", "records.jsonl"
COLUMNS: dict[str, str] = {
    "lengths": "<i4",
    "offsets": "<i8",
    "lines": "<i8",
    "margins": "<f4",
    "prompts": "<u8",
    "pairs": "<u8",
    "categories": "<i4",
    "flipped": "|u1",
    "orientations": "|u1",
    "sources": "<i4",
    "rows": "<i4",
}


def column_path(folder: Path, column: str) -> Path:
    """The file of a column: raw little-endian values, e.g. ``lengths.i32``."""
    kind = COLUMNS[column]
    return folder / f"{column}.{kind[1]}{8 * int(kind[2])}"


class Pair(NamedTuple):
    """The token ids of one pair, each ``int32 [length]``.

    A policy reads the prompt followed by a response. Each response ends with the end-of-text token.

    A selector reads a prompt that holds the question, followed by both responses. Here the two branches are
    no responses but the two orders in which these are shown. Take the response that comes first in
    alphabetical order. ``chosen`` shows it as A and ends with the letter A; ``rejected`` shows it as B and
    ends with the letter B. So the last token of either branch says that this response is the better one.
    """

    prompt: Ids
    chosen: Ids
    rejected: Ids


class TokenSet:
    """The tokenised preference pairs that a :class:`TokenWriter` finished in a folder.

    Pairs are read from disk when they are used. The sizes of the files are checked;
    :meth:`prefed.data.FederatedDataset.open` checks their contents.

    Attributes:
        letters: token ids of the letters A and B that a selector answers with; ``None`` for a policy's pairs.
        lengths: ``int32 [n, 3]``, tokens of prompt, chosen and rejected, or of a selector's two branches.
        margins: ``float32 [n]``, NaN where the source gives none.
        prompts: ``uint64 [n]``, equal where the prompts are.
        pairs: ``uint64 [n]``, equal where the prompt and the set of the two responses are equal.
        categories: ``int32 [n]``, index into ``category_names``, −1 for none.
        category_names: tuple of names.
        flipped: ``uint8 [n]``, 1 where chosen and rejected are swapped relative to the source.
        orientations: ``uint8 [n]``, 1 where chosen comes before rejected in alphabetical order. Two rows with
            equal ``pairs`` and different orientations contradict each other.
        rows: ``int32 [n]``, the row of the source that a pair was read from, from 1.
        fingerprint: SHA-256 over all tokens, texts and flips. Equal fingerprints mean equal data.

    Raises:
        DataError: the folder holds no set, the set is of another version, or a file has a wrong size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(f"{folder} holds no tokenised data ({MANIFEST} is missing)") from None
        except ValueError as error:
            raise self._damaged(MANIFEST, error) from error
        if manifest["version"] != VERSION:
            raise DataError(f"{folder} was written in another version ({manifest['version']}) of the format")
        self._length = int(manifest["pairs"])
        self.fingerprint: str = manifest["fingerprint"]
        self.category_names: tuple[str, ...] = tuple(manifest["categories"])
        letters = manifest.get("letters")
        self.letters: tuple[int, int] | None = None if letters is None else (letters[0], letters[1])
        self.lengths: NDArray[np.int32] = self._column("lengths", 3).reshape(-1, 3)
        self.margins: NDArray[np.float32] = self._column("margins")
        self.prompts: NDArray[np.uint64] = self._column("prompts")
        self.pairs: NDArray[np.uint64] = self._column("pairs")
        self.categories: NDArray[np.int32] = self._column("categories")
        self.flipped: NDArray[np.uint8] = self._column("flipped")
        self.orientations: NDArray[np.uint8] = self._column("orientations")
        self._offsets: NDArray[np.int64] = self._column("offsets")
        self._lines: NDArray[np.int64] = self._column("lines")
        self.rows: NDArray[np.int32] = self._column("rows")
        self._column("sources")
        self._check_size(IDS, 4 * int(self._offsets[-1]) if self._length else 0)
        self._check_size(RECORDS, int(self._lines[-1]) if self._length else 0)
        # Neither is mapped: pages of a mapped file count as memory of the process once they are touched.
        # Several threads or forked processes may read at once, each from a position of its own (pread).
        self._ids = (folder / IDS).open("rb", buffering=0)
        self._records = (folder / RECORDS).open("rb", buffering=0)

    @classmethod
    def empty(cls) -> TokenSet:
        """A set without pairs, for a dataset whose pairs are not on this machine."""
        tokens = cls.__new__(cls)
        tokens._length, tokens.fingerprint, tokens.category_names = 0, "", ()
        tokens.letters = None
        tokens.lengths = np.empty((0, 3), np.int32)
        for name in ("margins", "prompts", "pairs", "categories", "flipped", "orientations", "rows"):
            setattr(tokens, name, np.empty(0, COLUMNS[name]))
        return tokens

    def _check_size(self, name: str, size: int) -> None:
        """Refuse a file of another size. Reads beyond its end would give fewer tokens."""
        path = self.folder / name
        actual = path.stat().st_size if path.exists() else 0
        if actual != size:
            raise self._damaged(name, f"{actual:,} bytes in the place of {size:,}")

    def _damaged(self, name: str, problem: object) -> DataError:
        return DataError(
            f"{self.folder / name} is damaged ({problem}); delete {self.folder} to have it made again"
        )

    def _column(self, name: str, width: int = 1) -> Any:
        path = column_path(self.folder, name)
        count = (self._length + (name in ("offsets", "lines"))) * width
        if count == 0:
            return np.empty(0, dtype=COLUMNS[name])
        self._check_size(path.name, count * np.dtype(COLUMNS[name]).itemsize)
        try:
            return np.memmap(path, dtype=COLUMNS[name], mode="r", shape=(count,))
        except (OSError, ValueError) as error:
            raise self._damaged(path.name, error) from error

    def __len__(self) -> int:
        return self._length

    def _check_index(self, index: int) -> int:
        if not 0 <= index < self._length:
            raise IndexError(f"no row {index} among {self._length}")
        return int(index)

    def pair(self, index: int) -> Pair:
        """The token ids of one pair, read from disk."""
        index = self._check_index(index)
        start, stop = int(self._offsets[index]), int(self._offsets[index + 1])
        # A copy: an array over bytes is read-only, and torch warns about those.
        ids: Ids = np.frombuffer(
            os.pread(self._ids.fileno(), 4 * (stop - start), 4 * start), dtype="<i4"
        ).astype(np.int32)
        prompt, chosen, rejected = (int(n) for n in self.lengths[index])
        # A selector's branches stay: a flip changes which of the two responses is chosen, no text.
        if self.flipped[index] and self.letters is None:
            return Pair(ids[:prompt], ids[prompt + rejected :], ids[prompt : prompt + rejected])
        return Pair(ids[:prompt], ids[prompt : prompt + chosen], ids[prompt + chosen :])

    def record(self, index: int) -> Record:
        """The record of one pair, read from disk. Its responses are swapped where the row is flipped."""
        index = self._check_index(index)
        start, stop = int(self._lines[index]), int(self._lines[index + 1])
        record = Record.from_json(os.pread(self._records.fileno(), stop - start, start))
        return record.swapped() if self.flipped[index] else record
