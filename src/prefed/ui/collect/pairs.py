"""The pairs that a person is asked about, recorded or drawn, and the file of those that they chose."""

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
from prefed.runs.journal import Journal


class CollectError(ValueError):
    """Preferences cannot be collected, or a choice not be kept; the message says what to do."""


class Choices:
    """The pairs that people chose, as ``data.train`` takes them.

    A line is appended for each choice. What a killed process wrote of a line is cut off when the file is
    opened; a whole line is kept. Lines that someone else wrote stay as they are. Only its owner can read a
    new file.

    Raises:
        CollectError: a line is no JSON object, or the path is not that of a ``.jsonl`` file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Mapping[str, Any]] = []
        self._ends: list[int] = [0]
        if path.suffix.lower() != ".jsonl" or path.is_dir():
            raise CollectError(f"--out {path}: give a file whose name ends in .jsonl")
        if path.exists():
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, b"", mode=0o600)

    def of(self, client: str) -> Sequence[Mapping[str, Any]]:
        """The rows that a client chose here, in that order; recorded pairs of its name are none of them."""
        return [row for row in self._rows if _is_choice(row, client)]

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row and bring it to the disk.

        Raises:
            WriteError: it cannot be written, e.g. the disk is full.
            CollectError: another program changed the file.
        """
        self._check_size()
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            files.append(self.path, line)
        except files.WriteError:
            # Part of the line may be there, and no other line can follow it.
            files.truncate(self.path, self._ends[-1])
            raise
        self._rows.append(row)
        self._ends.append(self._ends[-1] + len(line))

    def take_back(self, client: str) -> None:
        """Remove the last row, which is the client's.

        Raises:
            CollectError: the last row is not the client's, or another program changed the file.
        """
        self._check_size()
        if not self._rows or not _is_choice(self._rows[-1], client):
            raise CollectError(f"the last line of {self.path} is not a choice of {client}'s")
        files.truncate(self.path, self._ends[-2])
        files.sync(self.path)
        self._rows.pop()
        self._ends.pop()

    def _check_size(self) -> None:
        if self.path.stat().st_size != self._ends[-1]:
            raise CollectError(
                f"{self.path} was changed by another program while the page was open; start the command again"
            )

    def _read(self) -> None:
        for number, line in self._lines():
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:
                raise CollectError(f"{self.path}, line {number}: not JSON: {error}; repair it") from error
            if not isinstance(row, dict):
                raise CollectError(
                    f"{self.path}, line {number}: a row is an object with named columns; repair it"
                )
            self._rows.append(row)
            self._ends.append(self._ends[-1] + len(line) + 1)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if data[end:]:
            if _is_whole(data[end:]):
                # All of the line but its end.
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
        number: identifies it.
        responses: in an order that says nothing of which is better.
        recorded: the place of the one that was chosen before; ``None`` if nobody was asked.
        columns: what else the source says of the pair, and its copy will say too.
    """

    number: int
    prompt: Prompt
    responses: tuple[str, str]
    recorded: int | None = None
    columns: Mapping[str, str | float | int] = field(default_factory=dict)


class Questions(Protocol):
    """Where questions come from. A number identifies one that may not be ready yet."""

    def numbers(self) -> Sequence[int]:
        """All questions, in the order in which they are asked."""

    def get(self, number: int) -> Question | None:
        """The question; ``None`` while it is not ready."""

    def number_of(self, row: Mapping[str, Any]) -> int | None:
        """Which question a row of the chosen pairs answers; ``None`` if it is not a pair."""


class RecordedPairs:
    """Pairs with a recorded choice, which the person does not see.

    Raises:
        CollectError: there is no pair.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._questions: dict[int, Question] = {}
        for record in records:
            # A pair that comes twice is judged once.
            number = pair_hash(record)
            self._questions.setdefault(number, _recorded(record, number))
        if not self._questions:
            raise CollectError("--from: there is no pair in it")

    def numbers(self) -> Sequence[int]:
        """The pairs in the order of their source."""
        return list(self._questions)

    def get(self, number: int) -> Question | None:
        """The pair, its responses in alphabetical order."""
        return self._questions.get(number)

    def number_of(self, row: Mapping[str, Any]) -> int | None:
        """The pair of a row."""
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
    """Prompts with two responses each, as they are drawn. What was drawn is kept in a journal.

    Args:
        prompts: of a file; one that comes twice is asked once.
        journal: keeps the responses, and the prompts that the person typed.
        identity: says what the responses depend on. Responses of another model are drawn again.
    """

    def __init__(self, prompts: Iterable[Prompt], journal: Journal, identity: str) -> None:
        self._journal, self._identity = journal, identity
        self._prompts = {prompt_hash(prompt): prompt for prompt in prompts}
        typed = [row for row in journal.rows.values() if "typed" in row]
        self._typed = {
            row["row"]: parse_prompt(row["prompt"]) for row in sorted(typed, key=lambda row: row["typed"])
        }

    def numbers(self) -> Sequence[int]:
        """Typed prompts come first. Those to which the model has no two responses are left out."""
        every = {**self._typed, **self._prompts}
        return [number for number in every if "left_out" not in self._row(number)]

    def get(self, number: int) -> Question | None:
        """The prompt with its responses, once they are drawn."""
        row = self._row(number)
        if "responses" not in row:
            return None
        first, second = row["responses"]
        return Question(number, self.prompt(number), (first, second))

    def number_of(self, row: Mapping[str, Any]) -> int | None:
        """The prompt of a row. A prompt is asked once, also if its responses were of another model."""
        try:
            return prompt_hash(parse_prompt(row["prompt"]))
        except (KeyError, TypeError, ValueError):
            return None

    def prompt(self, number: int) -> Prompt:
        """The prompt with that number."""
        return self._typed[number] if number in self._typed else self._prompts[number]

    def add(self, prompt: Prompt) -> int:
        """Take in a prompt that the person typed, and bring it to the disk. Gives its number."""
        number = prompt_hash(prompt)
        if number not in self._typed and number not in self._prompts:
            row = {"row": number, "prompt": plain_prompt(prompt), "typed": len(self._typed)}
            self._journal.append([row])
            self._typed[number] = prompt
        return number

    def missing(self, judged: Collection[int], ahead: int) -> int | None:
        """The prompt to draw for next; ``None`` while ``ahead`` questions that are not judged are ready.

        A typed prompt does not wait for that: the person does.
        """
        waiting = [number for number in self.numbers() if number not in judged]
        missing = [number for number in waiting if self.get(number) is None]
        enough = len(waiting) - len(missing) >= ahead
        return missing[0] if missing and (missing[0] in self._typed or not enough) else None

    def keep(self, number: int, drawn: tuple[str, str] | str) -> None:
        """Keep two responses to a prompt, or why there are none."""
        base = {name: value for name, value in self._journal.rows.get(number, {}).items() if name in _KEPT}
        found = {"left_out": drawn} if isinstance(drawn, str) else {"responses": list(drawn)}
        prompt = plain_prompt(self.prompt(number))
        self._journal.append([{**base, "row": number, "prompt": prompt, "by": self._identity, **found}])

    def _row(self, number: int) -> Mapping[str, Any]:
        row = self._journal.rows.get(number, {})
        return row if row.get("by") == self._identity else {}


_KEPT = ("typed", "neither")
"""What a prompt's row has besides its responses."""


def recorded_pairs(path: str, limit: int | None) -> RecordedPairs:
    """The first ``limit`` pairs of a source that ``data.train`` would take.

    Raises:
        DataError: the source cannot be read, or has rows that are not a pair.
        CollectError: there is no pair in it.
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
    """The first ``limit`` prompts of a source; ``column`` names theirs.

    Raises:
        DataError: the source cannot be read, or has rows without a prompt.
    """
    source = Source(path=path, columns=None if column is None else Columns(prompt=column))
    prompts = [row.prompt for row, _ in read_prompts(source, naming="--prompt-column NAME")]
    return prompts[:limit]
