"""Preference pairs as token ids on disk, with their records: written once, read by row.

Memory holds only a few small columns.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefed.core import files
from prefed.data.encoding import Encoded, Encoder, TooLong
from prefed.data.errors import DataError, ErrorCollector, RowError, RowLocation
from prefed.data.record import Prompt, Record

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
            raise DataError(f"{folder} contains no tokenised data ({MANIFEST} is missing)") from None
        except ValueError as error:
            raise self._damaged(MANIFEST, error) from error
        if manifest["version"] != VERSION:
            raise DataError(f"{folder} uses another version ({manifest['version']}) of the format")
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
            raise self._damaged(name, f"{actual:,} bytes instead of {size:,}")

    def _damaged(self, name: str, problem: object) -> DataError:
        return DataError(f"{self.folder / name} is damaged ({problem}); delete {self.folder} to rebuild it")

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


_BATCH = 256


class TokenWriter:
    """Tokenises records one by one and writes them to a folder.

    Args:
        folder: an existing, empty folder.
        encoder: makes the token ids: those of a policy's pairs
            (:class:`~prefed.data.encoding.PolicyEncoder`), or of a selector's
            (:class:`~prefed.data.choices.ChoiceEncoder`).
        errors: takes rows that cannot be rendered.
        codes: the number of integers that :meth:`add` takes with each record.
    """

    def __init__(self, folder: Path, encoder: Encoder, *, errors: ErrorCollector, codes: int = 0) -> None:
        self._encoder = encoder
        self._errors = errors
        self._long = ErrorCollector(hint=encoder.hint, count_only=not encoder.refuses)
        self._folder = folder
        self._ids = (folder / IDS).open("wb")
        self._records = (folder / RECORDS).open("wb")
        self._hash = hashlib.sha256()
        self._pending: list[tuple[Record, RowLocation, str | None, tuple[int, ...]]] = []
        # Everything that grows with the rows goes to disk batch by batch, columns too.
        self._columns = {name: column_path(self._folder, name).open("wb") for name in COLUMNS}
        self._batch: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self._count = self._offset = self._line = 0
        self._batch["offsets"].append(0)
        self._batch["lines"].append(0)
        self._categories: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self.truncated = 0
        """The number of prompts that were truncated."""
        self.shortened = 0
        """The number of pairs with a response that was truncated."""
        self.identical = 0
        """The number of pairs left out since both responses are the same to the model."""
        self.shortest = self.longest = 0
        """The smallest and the largest ``max_length`` that pairs left out for their length would need."""
        self.left_out: Counter[tuple[int, ...]] = Counter()
        """How many records with these codes were left out."""
        self.codes: tuple[array[int], ...] = tuple(array("i") for _ in range(codes))
        """The codes that :meth:`add` took, one array of rows per code."""

    @property
    def too_long(self) -> int:
        """The number of pairs that were left out for their length."""
        return self._long.count

    @property
    def letters(self) -> tuple[int, int] | None:
        """The token ids of a selector's letters A and B; ``None`` for a policy's pairs."""
        return self._encoder.letters

    def __len__(self) -> int:
        return self._count

    def add(self, record: Record, location: RowLocation, category: str | None = None, *codes: int) -> None:
        """Add one record. ``codes`` are integers below 2^31 that are kept with its row."""
        self._pending.append((record, location, category, codes))
        if len(self._pending) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Tokenise and write the pending records.

        Raises:
            DataError: too many rows cannot be used.
        """
        pending, self._pending = self._pending, []
        outcomes = self._encoder.encode([record for record, *_ in pending])
        for (record, location, category, codes), outcome in zip(pending, outcomes, strict=True):
            if not isinstance(outcome, Encoded):
                self.left_out[codes] += 1
            if outcome is None:
                self.identical += 1
            elif isinstance(outcome, RowError):
                self._errors.add(location, str(outcome), outcome.remedy)
            elif isinstance(outcome, TooLong):
                self.shortest = min(self.shortest or outcome.needed, outcome.needed)
                self.longest = max(self.longest, outcome.needed)
                self._long.add(location, outcome.problem)
            else:
                self.truncated += outcome.cut
                self.shortened += outcome.shortened
                self._write(record, location, category, (outcome.prompt, *outcome.branches))
                for column, code in zip(self.codes, codes, strict=True):
                    column.append(code)
        for name, values in self._batch.items():
            self._columns[name].write(np.array(values, dtype=COLUMNS[name]).tobytes())
            values.clear()

    def _write(
        self,
        record: Record,
        location: RowLocation,
        category: str | None,
        tokens: tuple[list[int], list[int], list[int]],
    ) -> None:
        lengths = [len(ids) for ids in tokens]
        columns = self._batch
        ids = np.array([token for part in tokens for token in part], dtype="<i4").tobytes()
        line = record.to_json().encode() + b"\n"
        self._ids.write(ids)
        self._records.write(line)
        for part in (np.array(lengths, dtype="<i4").tobytes(), ids, line):
            self._hash.update(part)
        columns["lengths"].extend(lengths)
        self._count += 1
        self._offset += sum(lengths)
        self._line += len(line)
        columns["offsets"].append(self._offset)
        columns["lines"].append(self._line)
        columns["margins"].append(math.nan if record.margin is None else record.margin)
        columns["prompts"].append(prompt_hash(record.prompt))
        columns["pairs"].append(pair_hash(record))
        columns["categories"].append(
            -1 if category is None else self._categories.setdefault(category, len(self._categories))
        )
        columns["flipped"].append(0)
        columns["orientations"].append(record.chosen < record.rejected)
        columns["sources"].append(self._files.setdefault(location.file, len(self._files)))
        columns["rows"].append(location.row)

    def column(self, name: str) -> NDArray[Any]:
        """The values of a column of :class:`TokenSet`, up to the last row that was flushed."""
        if not self._columns[name].closed:
            self._columns[name].flush()
        return np.fromfile(column_path(self._folder, name), dtype=COLUMNS[name])

    def finish(self, flipped: NDArray[np.bool_] | None = None) -> str:
        """Write the columns and the manifest. Returns the fingerprint.

        Args:
            flipped: ``bool [n]``, rows whose chosen and rejected are swapped.

        Raises:
            DataError: pairs were too long and the encoder refuses them.
        """
        self.flush()
        self._long.raise_if_any()
        self.close()
        paths = {name: column_path(self._folder, name) for name in COLUMNS}
        if flipped is not None and flipped.any():
            # The branches of a choice are in alphabetical order, whichever is chosen.
            if self.letters is None:
                lengths = self.column("lengths").reshape(-1, 3)
                lengths[flipped] = lengths[flipped][:, [0, 2, 1]]
                lengths.tofile(paths["lengths"])
            flipped.astype(np.uint8).tofile(paths["flipped"])
            (self.column("orientations") ^ flipped).tofile(paths["orientations"])
        self._hash.update(paths["flipped"].read_bytes())
        for path in (*paths.values(), self._folder / IDS, self._folder / RECORDS):
            files.sync(path)
        fingerprint = self._hash.hexdigest()
        manifest: dict[str, Any] = {
            "version": VERSION,
            "pairs": len(self),
            "fingerprint": fingerprint,
            "categories": list(self._categories),
            "files": list(self._files),
        }
        if self.letters is not None:
            manifest["letters"] = list(self.letters)
        (self._folder / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False), encoding="utf-8")
        return fingerprint

    def close(self) -> None:
        """Close the files, also before :meth:`finish`."""
        for stream in (self._ids, self._records, *self._columns.values()):
            stream.close()

    def location(self, index: int) -> RowLocation:
        """The file and row that a pair was read from."""
        return RowLocation(list(self._files)[self.column("sources")[index]], int(self.column("rows")[index]))


def write_records(folder: Path, encoder: Encoder, records: Iterable[Record], what: str) -> TokenSet:
    """Write pairs that are in memory, such as those to be labelled, into ``folder``, without clients.

    Row k of :attr:`TokenSet.rows` is the number of its record, from 1. Pairs that the encoder leaves out are
    absent, so numbers may be. What the folder holds of an earlier call is replaced.

    Args:
        folder: it is made if it is absent.
        what: the records in words, for messages.

    Raises:
        DataError: the encoder refuses a record.
    """
    files.private_folder(folder)
    # A call that is killed leaves no manifest, so nothing takes its files for a whole set.
    (folder / MANIFEST).unlink(missing_ok=True)
    errors = ErrorCollector()
    writer = TokenWriter(folder, encoder, errors=errors)
    try:
        for number, record in enumerate(records, 1):
            writer.add(record, RowLocation(what, number))
        writer.flush()
        errors.raise_if_any()
        writer.finish()
    finally:
        writer.close()
    return TokenSet(folder)


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256, in hexadecimal, of everything that decides how a tokenizer splits text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # These depend on the last call of the tokenizer.
        state.pop("truncation", None)
        state.pop("padding", None)
    else:
        state = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    whole = [state, tokenizer.eos_token_id, tokenizer.bos_token_id, getattr(tokenizer, "chat_template", None)]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def prompt_hash(prompt: Prompt) -> int:
    """The value that :attr:`TokenSet.prompts` has for a prompt."""
    return _hash64(_text(prompt))


def pair_hash(record: Record) -> int:
    """The value that :attr:`TokenSet.pairs` has for a pair: equal whichever response is chosen."""
    return _hash64(_text(record.prompt), *sorted((record.chosen, record.rejected)))


def _text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else repr(prompt)


def _hash64(*texts: str) -> int:
    """A 64-bit hash of texts. Different texts have equal hashes with a probability of 2^−64."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little")
