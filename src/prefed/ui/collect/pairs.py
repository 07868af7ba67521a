"""Questions for the annotator, from recorded pairs or generated responses, and the file of chosen pairs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prefed.core import files
from prefed.data import Columns, DataConfig, Prompt, Record, Source
from prefed.data.errors import ErrorCollector
from prefed.data.prompts import read_prompts
from prefed.data.record import parse_prompt, plain_prompt
from prefed.data.sources import ReadCounts, read_records
from prefed.data.tokens import pair_hash, prompt_hash
from prefed.runs.append_log import Journal


class CollectError(ValueError):
    """Preferences cannot be collected, or a choice cannot be saved."""


class Choices:
    """Append-only JSON Lines file of chosen pairs or of thumbs, usable as ``data.train``.

    Opening the file truncates an incomplete last line, left by a killed process. Lines from other sources
    are kept. Only the owner can read a new file.

    Raises:
        CollectError: a line is not a JSON object, or the path does not end in ``.jsonl``.
    """

    def __init__(self, path: Path, option: str = "--out") -> None:
        self.path = path
        self._rows: list[Mapping[str, Any]] = []
        self._ends: list[int] = [0]
        if path.suffix.lower() != ".jsonl" or path.is_dir():
            raise CollectError(f"{option} {path}: the file name must end in .jsonl")
        if path.exists():
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, b"", mode=0o600)

    def of(self, client: str) -> Sequence[Mapping[str, Any]]:
        """A client's choices from this page, in order, without other rows of the same client."""
        return [row for row in self._rows if _is_choice(row, client)]

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append the rows of one answer in one write, and flush them to disk.

        Raises:
            WriteError: a row cannot be written, e.g. because the disk is full.
            CollectError: another program changed the file.
        """
        self._check_size()
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows]
        try:
            files.append(self.path, b"".join(lines))
        except files.WriteError:
            # Remove a partially written line.
            files.truncate(self.path, self._ends[-1])
            raise
        self._rows += rows
        for line in lines:
            self._ends.append(self._ends[-1] + len(line))

    def take_back(self, client: str, rows: int = 1) -> None:
        """Remove the client's answer in the last ``rows`` rows.

        Raises:
            CollectError: a row is not a choice of the client, or another program changed the file.
        """
        self._check_size()
        last = self._rows[-rows:]
        if len(last) < rows or not all(_is_choice(row, client) for row in last):
            raise CollectError(f"nothing to undo: the last line of {self.path} is not a choice by {client}")
        files.truncate(self.path, self._ends[-rows - 1])
        files.sync(self.path)
        del self._rows[-rows:], self._ends[-rows:]

    def _check_size(self) -> None:
        if self.path.stat().st_size != self._ends[-1]:
            raise CollectError(
                f"{self.path} was changed by another program while the page was open; restart prefed collect"
            )

    def _read(self) -> None:
        for number, line in self._lines():
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:
                raise CollectError(f"{self.path}, line {number}: not JSON ({error}); correct it") from error
            if not isinstance(row, dict):
                raise CollectError(f"{self.path}, line {number}: not a JSON object; correct it")
            self._rows.append(row)
            self._ends.append(self._ends[-1] + len(line) + 1)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if data[end:]:
            if _is_whole(data[end:]):
                # Only the line break is missing.
                files.append(self.path, b"\n")
                data += b"\n"
            else:
                files.truncate(self.path, end)
                data = data[:end]
        yield from enumerate(data.split(b"\n")[:-1], 1)


def _is_choice(row: Mapping[str, Any], client: str) -> bool:
    return row.get("client") == client and row.get("side") in ("left", "right")


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@dataclass(frozen=True)
class Question:
    """Two responses to a prompt.

    Attributes:
        number: id of the question.
        responses: in an order independent of any recorded choice.
        recorded: index of the response chosen in the source; ``None`` without a recorded choice.
        columns: further columns of the source, copied to the chosen pair.
    """

    number: int
    prompt: Prompt
    responses: tuple[str, str]
    recorded: int | None = None
    columns: Mapping[str, str | float | int] = field(default_factory=dict)


class Questions(Protocol):
    """A source of questions. A number may belong to a question that is not ready yet."""

    def numbers(self) -> Sequence[int]:
        """The numbers of all questions, in order."""

    def get(self, number: int) -> Question | None:
        """The question; ``None`` while it is not ready."""

    def number_of(self, row: Mapping[str, Any]) -> int | None:
        """The number of the question that a chosen pair answers; ``None`` if the row is not a pair."""


class RecordedPairs:
    """Questions from pairs with a recorded choice, which the annotator does not see.

    Raises:
        CollectError: ``records`` is empty, or contains thumbs.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._questions: dict[int, Question] = {}
        for record in records:
            if record.label is not None:
                raise CollectError("--from: the file contains thumbs; give one with pairs")
            # Skip duplicates.
            number = pair_hash(record)
            self._questions.setdefault(number, _recorded(record, number))
        if not self._questions:
            raise CollectError("--from: the file contains no pairs")

    def numbers(self) -> Sequence[int]:
        """The pairs, in the order of the source."""
        return list(self._questions)

    def get(self, number: int) -> Question | None:
        """The pair, with its responses in alphabetical order."""
        return self._questions.get(number)

    def number_of(self, row: Mapping[str, Any]) -> int | None:
        """The pair with the prompt and responses of a row."""
        try:
            return pair_hash(Record(parse_prompt(row["prompt"]), row["chosen"], row["rejected"]))
        except (KeyError, TypeError, ValueError):
            return None


def _recorded(record: Record, number: int) -> Question:
    first, second = sorted((record.chosen, record.rejected))
    named = {name: getattr(record, name) for name in ("category", "domain", "split")}
    columns = {**record.extra, **{name: value for name, value in named.items() if value is not None}}
    return Question(number, record.prompt, (first, second), int(record.chosen == second), columns)


class DrawnPairs:
    """Questions from prompts with generated responses, which a journal stores.

    Args:
        prompts: from a file; duplicates are asked once.
        journal: stores responses and typed prompts.
        identity: digest of everything the responses depend on; responses with another one are ignored.
    """

    def __init__(self, prompts: Iterable[Prompt], journal: Journal, identity: str) -> None:
        self._journal, self._identity = journal, identity
        self._prompts = {prompt_hash(prompt): prompt for prompt in prompts}
        typed = [row for row in journal.rows.values() if "typed" in row]
        self._typed = {
            row["row"]: parse_prompt(row["prompt"]) for row in sorted(typed, key=lambda row: row["typed"])
        }

    def numbers(self) -> Sequence[int]:
        """Typed prompts first. Prompts without two different responses are left out."""
        every = {**self._typed, **self._prompts}
        return [number for number in every if "left_out" not in self._row(number)]

    def get(self, number: int) -> Question | None:
        """The prompt with its responses; ``None`` until they are generated."""
        row = self._row(number)
        if "responses" not in row:
            return None
        first, second = row["responses"]
        return Question(number, self.prompt(number), (first, second))

    def number_of(self, row: Mapping[str, Any]) -> int | None:
        """The prompt of a row, whichever model generated the responses."""
        try:
            return prompt_hash(parse_prompt(row["prompt"]))
        except (KeyError, TypeError, ValueError):
            return None

    def prompt(self, number: int) -> Prompt:
        """The prompt of a question."""
        return self._typed[number] if number in self._typed else self._prompts[number]

    def add(self, prompt: Prompt) -> int:
        """Store a typed prompt on disk and return its number."""
        number = prompt_hash(prompt)
        if number not in self._typed and number not in self._prompts:
            row = {"row": number, "prompt": plain_prompt(prompt), "typed": len(self._typed)}
            self._journal.append([row])
            self._typed[number] = prompt
        return number

    def missing(self, judged: Collection[int], ahead: int) -> int | None:
        """The next prompt to generate responses for; ``None`` while ``ahead`` unanswered questions are ready.

        Typed prompts do not count towards ``ahead``, because the annotator waits for them.
        """
        waiting = [number for number in self.numbers() if number not in judged]
        missing = [number for number in waiting if self.get(number) is None]
        enough = len(waiting) - len(missing) >= ahead
        return missing[0] if missing and (missing[0] in self._typed or not enough) else None

    def keep(self, number: int, drawn: tuple[str, str] | str) -> None:
        """Store two responses to a prompt, or the reason why there are none."""
        base = {name: value for name, value in self._journal.rows.get(number, {}).items() if name in _KEPT}
        found = {"left_out": drawn} if isinstance(drawn, str) else {"responses": list(drawn)}
        prompt = plain_prompt(self.prompt(number))
        self._journal.append([{**base, "row": number, "prompt": prompt, "by": self._identity, **found}])

    def _row(self, number: int) -> Mapping[str, Any]:
        row = self._journal.rows.get(number, {})
        return row if row.get("by") == self._identity else {}


_KEPT = ("typed", "neither")
"""Keys of a journal row that new responses do not replace."""


def recorded_pairs(path: str, limit: int | None) -> RecordedPairs:
    """Read the first ``limit`` pairs of a source in any format of ``data.train``.

    Raises:
        DataError: the source cannot be read, or a row is not a pair.
        CollectError: the source contains no pairs.
    """
    config = DataConfig.model_validate(
        {"train": path, "partition": {"by": "iid", "clients": 1}, "rows": limit}
    )
    assert isinstance(config.train, Source)
    errors = ErrorCollector()
    records = [
        record for record, _ in read_records(config.train, config, "train", None, errors, ReadCounts())
    ]
    errors.raise_if_any()
    return RecordedPairs(records)


def file_prompts(path: str, column: str | None, limit: int | None) -> list[Prompt]:
    """Read the first ``limit`` prompts of a source.

    Raises:
        DataError: the source cannot be read, or a row has no prompt.
    """
    source = Source(path=path, columns=None if column is None else Columns(prompt=column))
    prompts = [row.prompt for row, _ in read_prompts(source, naming="--prompt-column NAME")]
    return prompts[:limit]
