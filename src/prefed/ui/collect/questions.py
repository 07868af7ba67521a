"""What a person is asked about: pairs that exist already, or two responses that a model drew."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefed.data import Columns, DataConfig, Prompt, Record, Source
from prefed.data.errors import ErrorCollector
from prefed.data.prompts import parse_prompt, plain_prompt, read_prompts
from prefed.data.sources import ReadCounts, read_records
from prefed.data.tokens import pair_hash, prompt_hash
from prefed.runs.journal import Journal
from prefed.ui.collect.errors import CollectError


@dataclass(frozen=True)
class Question:
    """Two responses to a prompt.

    Attributes:
        number: tells it from every other one.
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
    """Where questions come from. A number stands for one that may not be ready yet."""

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
