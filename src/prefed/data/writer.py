"""Tokenises records and writes the files of a :class:`prefed.data.TokenSet`."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prefed import files
from prefed.data.errors import DataError, ErrorCollector, RowError, RowLocation
from prefed.data.record import Record
from prefed.data.templates import Template, Tokenizer, start_tokens
from prefed.data.tokens import COLUMNS, IDS, MANIFEST, RECORDS, VERSION, column_path

_BATCH = 256


class TokenWriter:
    """Tokenises records one by one and writes them to a folder.

    A prompt and its responses are tokenised separately. The model reads the prompt's tokens followed by those
    of a response. The prompt begins with the beginning-of-text token if the tokenizer adds one. Each response
    ends with the end-of-text token. A prompt that is too long is truncated at its beginning, but it keeps its
    beginning-of-text token. A response is never truncated.

    Args:
        folder: an existing, empty folder.
        tokenizer: a transformers tokenizer.
        template: renders conversations for it.
        max_length: tokens of the prompt and the longer response together.
        too_long: what happens to a pair whose longer response leaves no room for a token of the prompt.
        errors: takes rows that the chat template refuses.
        codes: the number of integers that :meth:`add` takes with each record.

    Raises:
        DataError: the tokenizer has no end-of-text token.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        template: Template,
        *,
        max_length: int,
        too_long: Literal["drop", "error"],
        errors: ErrorCollector,
        codes: int = 0,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-text token; set its eos_token")
        self._tokenizer, self._template = tokenizer, template
        self._max_length = max_length
        self._errors = errors
        self._long = ErrorCollector(
            hint='A response is never cut: raise max_length, or leave such pairs out with too_long = "drop".',
            count_only=too_long == "drop",
        )
        self._end: int = tokenizer.eos_token_id
        self._start = start_tokens(tokenizer)
        self._empty = self._end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
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
        self.shortest = 0
        """The smallest ``max_length`` that one of the pairs left out for their length would need."""
        self.codes: tuple[array[int], ...] = tuple(array("i") for _ in range(codes))
        """The codes that :meth:`add` took, one array of rows per code."""

    @property
    def too_long(self) -> int:
        """The number of pairs that were left out for their length."""
        return self._long.count

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
        texts: list[str] = []
        ready = []
        for entry in self._pending:
            record, location, *_ = entry
            try:
                texts.extend(self._template.pair(record.prompt, record.chosen, record.rejected))
            except RowError as error:
                self._errors.add(location, str(error))
                continue
            ready.append(entry)
        self._pending = []
        if not ready:
            return
        tokens = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            padding=False,
            truncation=False,
            verbose=False,
        )["input_ids"]
        for k, (record, location, category, codes) in enumerate(ready):
            pair = self._fit(record, location, *(list(ids) for ids in tokens[3 * k : 3 * k + 3]))
            if pair is not None:
                self._write(record, location, category, pair)
                for column, code in zip(self.codes, codes, strict=True):
                    column.append(code)
        for name, values in self._batch.items():
            self._columns[name].write(np.array(values, dtype=COLUMNS[name]).tobytes())
            values.clear()

    def _fit(
        self,
        record: Record,
        location: RowLocation,
        prompt: list[int],
        chosen: list[int],
        rejected: list[int],
    ) -> tuple[list[int], list[int], list[int]] | None:
        """The pair with special tokens, within ``max_length``; ``None`` if a response is too long."""
        head: list[int] = [] if self._template.chat and not isinstance(record.prompt, str) else self._start
        if not head and prompt[:1] == [self._tokenizer.bos_token_id]:
            head, prompt = prompt[:1], prompt[1:]
        if not head and not prompt:
            head = [self._empty]
        chosen, rejected = (
            ids if ids[-1:] == [self._end] else [*ids, self._end] for ids in (chosen, rejected)
        )
        room = self._max_length - max(len(chosen), len(rejected))
        if room < 1:
            which = "chosen" if len(chosen) >= len(rejected) else "rejected"
            needed = self._max_length - room + 1
            self.shortest = min(self.shortest or needed, needed)
            self._long.add(
                location, f"{which} has {self._max_length - room} tokens and max_length is {self._max_length}"
            )
            return None
        if len(head) + len(prompt) > room:
            self.truncated += 1
            head = head[:room]
            prompt = prompt[len(prompt) - (room - len(head)) :]
        return [*head, *prompt], chosen, rejected

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
        text = record.prompt if isinstance(record.prompt, str) else repr(record.prompt)
        columns["prompts"].append(_hash64(text))
        columns["pairs"].append(_hash64(text, *sorted((record.chosen, record.rejected))))
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
            DataError: pairs were too long and ``too_long`` is ``error``.
        """
        self.flush()
        self._long.raise_if_any()
        self.close()
        paths = {name: column_path(self._folder, name) for name in COLUMNS}
        if flipped is not None and flipped.any():
            lengths = self.column("lengths").reshape(-1, 3)
            lengths[flipped] = lengths[flipped][:, [0, 2, 1]]
            lengths.tofile(paths["lengths"])
            flipped.astype(np.uint8).tofile(paths["flipped"])
            (self.column("orientations") ^ flipped).tofile(paths["orientations"])
        self._hash.update(paths["flipped"].read_bytes())
        for path in (*paths.values(), self._folder / IDS, self._folder / RECORDS):
            files.sync(path)
        fingerprint = self._hash.hexdigest()
        manifest = {
            "version": VERSION,
            "pairs": len(self),
            "fingerprint": fingerprint,
            "categories": list(self._categories),
            "files": list(self._files),
        }
        (self._folder / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False), encoding="utf-8")
        return fingerprint

    def close(self) -> None:
        """Close the files, also before :meth:`finish`."""
        for stream in (self._ids, self._records, *self._columns.values()):
            stream.close()

    def location(self, index: int) -> RowLocation:
        """The file and row that a pair was read from."""
        return RowLocation(list(self._files)[self.column("sources")[index]], int(self.column("rows")[index]))


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


def _hash64(*texts: str) -> int:
    """A 64-bit hash of texts. Different texts have equal hashes with a probability of 2^−64."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little")
