"""Tokenises records and writes the files of a :class:`prefed.data.TokenSet`."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefed.core import files
from prefed.data.encoding import Encoded, Encoder, TooLong
from prefed.data.errors import ErrorCollector, RowError, RowLocation
from prefed.data.record import Prompt, Record
from prefed.data.tokens import COLUMNS, IDS, MANIFEST, RECORDS, VERSION, TokenSet, column_path

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
