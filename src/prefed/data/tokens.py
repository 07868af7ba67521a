"""Preference pairs on disk, as token ids and records: written once and read by row."""

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
from prefed.data.encoding import Encoded, Encoder, Note, TooLong
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
    """Return the file of a column with raw little-endian values, e.g. ``lengths.i32``."""
    kind = COLUMNS[column]
    return folder / f"{column}.{kind[1]}{8 * int(kind[2])}"


class Pair(NamedTuple):
    """The token ids of one pair, each ``int32 [length]``.

    For a policy, ``chosen`` and ``rejected`` continue the prompt and end with the end-of-text token. Of a
    thumb, ``chosen`` is the response, and ``rejected`` is empty or, as ``other`` of :meth:`TokenSet.pair`, an
    unrelated response.

    For a selector, the prompt contains the question, and the branches contain both responses in the two
    orders. ``chosen`` shows the alphabetically first response as A and ends with the letter A; ``rejected``
    shows it as B and ends with the letter B. The last token of either branch thus prefers this response.
    """

    prompt: Ids
    chosen: Ids
    rejected: Ids


def thumbs(lengths: NDArray[np.int32]) -> NDArray[np.int8]:
    """Return the thumbs of rows ``[n]`` with these lengths ``[n, 3]``: 1 is up, −1 is down, 0 is a pair."""
    present = (lengths[:, 1:] > 0).astype(np.int8)
    return np.asarray(present[:, 0] - present[:, 1])


class TokenSet:
    """The preference pairs written to a folder by a :class:`TokenWriter`, read from disk on access.

    Only file sizes are checked; :meth:`prefed.data.FederatedDataset.open` checks the contents.

    Attributes:
        letters: token ids of the letters A and B of a selector; ``None`` for a policy.
        max_length: maximum number of tokens of a prompt with its longer response; known if there are thumbs.
        lengths: ``int32 [n, 3]``, numbers of tokens of prompt, chosen and rejected. For a thumb, one of the
            latter is 0; see :func:`thumbs`.
        margins: ``float32 [n]``, NaN if unknown.
        prompts: ``uint64 [n]``, equal for equal prompts.
        pairs: ``uint64 [n]``, equal for the same prompt with the same two responses.
        categories: ``int32 [n]``, index into ``category_names``, −1 for none.
        flipped: ``uint8 [n]``, 1 if chosen and rejected are swapped relative to the source.
        orientations: ``uint8 [n]``, 1 if chosen is alphabetically first. Rows with equal ``pairs`` and
            different orientations contradict each other.
        rows: ``int32 [n]``, row number in the source, from 1.
        sources: ``int32 [n]``, index into ``files``.
        files: paths, or hub names with their splits.
        fingerprint: SHA-256 of all tokens, texts and flips.

    Raises:
        DataError: the folder contains no token set, a file of wrong size, or another version of the format.
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
            raise DataError(
                f"{folder} has version {manifest['version']} of the token format, not {VERSION}; delete it "
                "to rebuild it"
            )
        self._length = int(manifest["pairs"])
        self.fingerprint: str = manifest["fingerprint"]
        self.category_names: tuple[str, ...] = tuple(manifest["categories"])
        letters = manifest.get("letters")
        self.letters: tuple[int, int] | None = None if letters is None else (letters[0], letters[1])
        self.max_length: int | None = manifest.get("max_length")
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
        self.sources: NDArray[np.int32] = self._column("sources")
        self.files: tuple[str, ...] = tuple(manifest["files"])
        self._check_size(IDS, 4 * int(self._offsets[-1]) if self._length else 0)
        self._check_size(RECORDS, int(self._lines[-1]) if self._length else 0)
        # Not mapped, since touched pages of a mapped file count as memory of the process. pread allows
        # concurrent reads from several threads or forked processes.
        self._ids = (folder / IDS).open("rb", buffering=0)
        self._records = (folder / RECORDS).open("rb", buffering=0)

    @classmethod
    def empty(cls) -> TokenSet:
        """Return a token set without pairs, for a dataset that is not on this machine."""
        tokens = cls.__new__(cls)
        tokens._length, tokens.fingerprint, tokens.category_names, tokens.files = 0, "", (), ()
        tokens.letters = tokens.max_length = None
        tokens.lengths = np.empty((0, 3), np.int32)
        for name in COLUMNS.keys() - {"lengths", "offsets", "lines"}:
            setattr(tokens, name, np.empty(0, COLUMNS[name]))
        return tokens

    def _check_size(self, name: str, size: int) -> None:
        """Refuse a file of another size, since reads beyond its end would return fewer tokens."""
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
            raise IndexError(f"no row {index}: the data has {self._length} rows, counted from 0")
        return int(index)

    def pair(self, index: int, other: int | None = None) -> Pair:
        """Read the token ids of one pair or thumb.

        Args:
            other: of a thumb: the row of another thumb. Its response becomes ``rejected``, without its end
                if it does not fit after this prompt.
        """
        if other is not None:
            own, unrelated = self.pair(index), self.pair(other).chosen
            assert self.max_length is not None
            return Pair(own.prompt, own.chosen, unrelated[: self.max_length - len(own.prompt)])
        index = self._check_index(index)
        start, stop = int(self._offsets[index]), int(self._offsets[index + 1])
        # Copy, since torch warns about read-only arrays such as those over bytes.
        ids: Ids = np.frombuffer(
            os.pread(self._ids.fileno(), 4 * (stop - start), 4 * start), dtype="<i4"
        ).astype(np.int32)
        prompt, chosen, rejected = (int(n) for n in self.lengths[index])
        if not (chosen and rejected):
            return Pair(ids[:prompt], ids[prompt:], ids[:0])
        # A flip does not change the branches of a selector, which do not depend on the chosen response.
        if self.flipped[index] and self.letters is None:
            return Pair(ids[:prompt], ids[prompt + rejected :], ids[prompt : prompt + rejected])
        return Pair(ids[:prompt], ids[prompt : prompt + chosen], ids[prompt + chosen :])

    def record(self, index: int) -> Record:
        """Read the record of one pair. A flipped row has its responses swapped."""
        index = self._check_index(index)
        start, stop = int(self._lines[index]), int(self._lines[index + 1])
        record = Record.from_json(os.pread(self._records.fileno(), stop - start, start))
        return record.swapped() if self.flipped[index] else record


_BATCH = 256


class TokenWriter:
    """Tokenise records and write them to a folder.

    Args:
        folder: an existing, empty folder.
        errors: receives rows that cannot be rendered.
        codes: number of integers that :meth:`add` takes with each record.

    Attributes:
        shortened: number of pairs with a truncated response.
        identical: number of pairs dropped because both responses have the same tokens.
        shortest: smallest ``max_length`` that would fit one more pair; 0 if all fit.
        longest: smallest ``max_length`` that would fit all pairs; 0 if all fit.
        left_out: codes → number of dropped records.
        notes: number of records with each :data:`~prefed.data.encoding.Note`.
        codes: one array of rows per code.
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
        # Columns are written batch by batch, since they grow with the number of rows.
        self._columns = {name: column_path(self._folder, name).open("wb") for name in COLUMNS}
        self._batch: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self._count = self._offset = self._line = 0
        self._thumbs = False
        self._batch["offsets"].append(0)
        self._batch["lines"].append(0)
        self._categories: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self.truncated = self.shortened = self.identical = self.shortest = self.longest = 0
        self.left_out: Counter[tuple[int, ...]] = Counter()
        self.notes: Counter[Note] = Counter()
        self.codes: tuple[array[int], ...] = tuple(array("i") for _ in range(codes))

    @property
    def too_long(self) -> int:
        """The number of pairs dropped because of their length."""
        return self._long.count

    @property
    def letters(self) -> tuple[int, int] | None:
        """Token ids of the letters A and B of a selector; ``None`` for a policy."""
        return self._encoder.letters

    def __len__(self) -> int:
        return self._count

    def add(self, record: Record, location: RowLocation, category: str | None = None, *codes: int) -> None:
        """Add one record. ``codes`` are integers below 2^31 stored with its row."""
        self._pending.append((record, location, category, codes))
        if len(self._pending) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Tokenise and write the pending records.

        Raises:
            DataError: the limit of unusable rows is reached.
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
                self.notes.update(outcome.notes)
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
        self._thumbs |= record.label is not None
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
        """Return the values of a column of :class:`TokenSet`, up to the last flushed row."""
        if not self._columns[name].closed:
            self._columns[name].flush()
        return np.fromfile(column_path(self._folder, name), dtype=COLUMNS[name])

    def response_hashes(self) -> NDArray[np.uint64] | None:
        """Return the :func:`response_hashes` of the flushed rows, ``None`` if all are of one kind."""
        if len(np.unique(thumbs(self.column("lengths").reshape(-1, 3)) == 0)) < 2:
            return None
        self._records.flush()
        with (self._folder / RECORDS).open("rb") as lines:
            return response_hashes(map(Record.from_json, lines))

    def finish(self, flipped: NDArray[np.bool_] | None = None) -> str:
        """Write the columns and the manifest, and return the fingerprint.

        Args:
            flipped: ``bool [n]``, rows with chosen and rejected swapped.

        Raises:
            DataError: the encoder refuses pairs that are too long.
        """
        self.flush()
        self._long.raise_if_any()
        self.close()
        paths = {name: column_path(self._folder, name) for name in COLUMNS}
        if flipped is not None and flipped.any():
            # The branches of a selector do not depend on the chosen response.
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
        if self._thumbs:
            manifest["max_length"] = self._encoder.max_length
        (self._folder / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False), encoding="utf-8")
        return fingerprint

    def close(self) -> None:
        """Close the files. May be called before :meth:`finish`."""
        for stream in (self._ids, self._records, *self._columns.values()):
            stream.close()

    def location(self, index: int) -> RowLocation:
        """Return the file and row of a pair."""
        return RowLocation(list(self._files)[self.column("sources")[index]], int(self.column("rows")[index]))


def write_records(folder: Path, encoder: Encoder, records: Iterable[Record], what: str) -> TokenSet:
    """Write pairs in memory, such as those to be labelled, into ``folder``, without clients.

    :attr:`TokenSet.rows` has the numbers of the records, from 1, without those that the encoder drops. An
    existing token set in the folder is replaced.

    Args:
        folder: is created if necessary.
        what: description of the records, for error messages.

    Raises:
        DataError: the encoder refuses a record.
    """
    files.private_folder(folder)
    # Without a manifest, the files of an interrupted call are not taken for a complete set.
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
    """Return the hexadecimal SHA-256 of everything that determines how a tokenizer splits text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # These depend on the last call to the tokenizer.
        state.pop("truncation", None)
        state.pop("padding", None)
    else:
        state = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    whole = [state, tokenizer.eos_token_id, tokenizer.bos_token_id, getattr(tokenizer, "chat_template", None)]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def prompt_hash(prompt: Prompt) -> int:
    """Return the value of :attr:`TokenSet.prompts` for a prompt."""
    return _hash64(_text(prompt))


def pair_hash(record: Record) -> int:
    """Return the value of :attr:`TokenSet.pairs` for a pair, regardless of which response is chosen."""
    return _hash64(_text(record.prompt), *sorted((record.chosen, record.rejected)))


def response_hashes(records: Iterable[Record]) -> NDArray[np.uint64]:
    """Return the :func:`pair_hash` of a thumb on either response, ``uint64 [n, 2]``; equal for a thumb."""
    values = (
        _hash64(_text(record.prompt), "", text)
        for record in records
        for text in (record.chosen or record.rejected, record.rejected or record.chosen)
    )
    return np.fromiter(values, dtype=np.uint64).reshape(-1, 2)


def comparable(
    one: TokenSet, rows: NDArray[np.int64], other: TokenSet, other_rows: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return hashes ``[n, k]`` and ``[m, k]`` of the rows of two sets; the same feedback shares one of them.

    Pairs are compared with pairs, and thumbs with thumbs and with either response of pairs.
    """
    parts = ((one, rows), (other, other_rows))
    kinds = {bool(thumbs(tokens.lengths[at]).all()) for tokens, at in parts if len(at)}
    first, second = (
        response_hashes(map(tokens.record, at)) if len(kinds) > 1 else np.asarray(tokens.pairs)[at, None]
        for tokens, at in parts
    )
    return first, second


def _text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else repr(prompt)


def _hash64(*texts: str) -> int:
    """Return a 64-bit hash. Different texts collide with probability 2^−64."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little")
