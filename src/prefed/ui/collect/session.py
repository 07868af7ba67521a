"""One person's way through the questions: what is asked, what was chosen, what can be taken back."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prefed.core import Key
from prefed.core.text import control_character
from prefed.data.record import plain_prompt
from prefed.runs.journal import Journal
from prefed.train.metrics.intervals import Agreement, agreement
from prefed.ui.collect.pairs import Choices, CollectError, Question, Questions

Answer = Literal["left", "right", "neither"]

STRENGTHS = {1: "slightly", 2: "clearly", 3: "very much"}
"""How much better a response is: the number that becomes the pair's margin, and its name on the page."""

_SIDES: tuple[Answer, Answer] = ("left", "right")
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Shown:
    """A question as the page shows it.

    Attributes:
        order: the places of the left and the right response in ``question.responses``.
    """

    question: Question
    order: tuple[int, int]

    @property
    def texts(self) -> tuple[str, str]:
        """The left and the right response."""
        first, second = (self.question.responses[place] for place in self.order)
        return first, second


@dataclass(frozen=True)
class Progress:
    """How far a person is.

    Attributes:
        chosen: questions with a chosen response.
        neither: questions of which neither response was better.
        of: all questions.
    """

    chosen: int
    neither: int
    of: int

    @property
    def done(self) -> int:
        """Questions that are answered."""
        return self.chosen + self.neither


class Session:
    """Asks one person.

    A choice is a line of the pairs. A question of which neither response is better is no pair: its answer
    is in the journal. So each answer is one write to one file, and a process that is killed has it
    whole or not at all.

    Args:
        questions: what is asked.
        choices: the file of chosen pairs.
        journal: further answers.
        key: the randomness of sides. A question has the same sides after another start.

    Attributes:
        client: the person; ``None`` until they give a name.
        changed: guards all of this, and is notified when a question becomes ready.
        failure: what ended the drawing of responses, in words.
    """

    def __init__(self, questions: Questions, choices: Choices, journal: Journal, key: Key) -> None:
        self.questions, self.choices = questions, choices
        self._journal, self._key = journal, key
        self.client: str | None = None
        self.changed = threading.Condition(threading.RLock())
        self.failure: str | None = None
        self._chosen: dict[int, Mapping[str, Any]] = {}

    def name(self, client: str) -> None:
        """Say who chooses.

        Raises:
            CollectError: it cannot be a client's name.
        """
        client = client.strip()
        control = control_character(client)
        if not client or len(client) > _LONGEST_NAME or control:
            problem = f"a control character, {control}" if control else f"{len(client)} characters"
            raise CollectError(
                f"a client's name is 1 to {_LONGEST_NAME} characters in one line; this has {problem}"
            )
        with self.changed:
            self.client = client
            self._read()
            self.changed.notify_all()

    def judged(self) -> Collection[int]:
        """The numbers of the questions that the person answered."""
        with self.changed:
            return frozenset(self._chosen) | self._neither().keys()

    def progress(self) -> Progress:
        """How far the person is."""
        with self.changed:
            numbers = set(self.questions.numbers())
            chosen = numbers & self._chosen.keys()
            return Progress(len(chosen), len((numbers & self._neither().keys()) - chosen), len(numbers))

    def current(self) -> Shown | None:
        """The first question that is ready and not answered; ``None`` if there is none."""
        with self.changed:
            judged = self.judged()
            waiting = (n for n in self.questions.numbers() if n not in judged)
            ready = (question for n in waiting if (question := self.questions.get(n)) is not None)
            return next((self._shown(question) for question in ready), None)

    def choose(self, number: int, answer: Answer, strength: int | None = None) -> bool:
        """Keep an answer. On return it is on the disk.

        Args:
            strength: a number of :data:`STRENGTHS`; ``None`` if the person does not say.

        Returns:
            Whether it counts. It does not if the question was answered before: a form may be sent twice.

        Raises:
            CollectError: there is no such question.
            WriteError: it cannot be written, e.g. the disk is full.
        """
        with self.changed:
            question = self.questions.get(number)
            if self.client is None or question is None:
                raise CollectError("there is no such question")
            if number in self.judged():
                return False
            if answer == "neither":
                self._keep_neither(number, {**self._neither_by(number), self.client: self._count() + 1})
            else:
                row = self._row(question, answer, strength)
                self.choices.append(row)
                self._chosen[number] = row
            self.changed.notify_all()
            return True

    def take_back(self) -> bool:
        """Take back the person's last answer, also one from before another start.

        Returns:
            Whether there was one.

        Raises:
            CollectError: someone else chose since, or another program changed the file.
        """
        with self.changed:
            count, neither = self._count(), self._neither()
            if self.client is None or not count:
                return False
            last = max(neither, key=lambda number: neither[number], default=None)
            if last is not None and neither[last] >= count:
                others = {who: at for who, at in self._neither_by(last).items() if who != self.client}
                self._keep_neither(last, others)
            else:
                self.choices.take_back(self.client)
                self._read()
            self.changed.notify_all()
            return True

    def agreement(self) -> Agreement | None:
        """Of the person with the recorded choices, over the sides on which the better response was seen.

        ``None`` if there are none, or no choice yet. Questions that ended with neither are left out.
        """
        with self.changed:
            rows = [row for row in self._chosen.values() if "agrees" in row and row.get("side") in _SIDES]
        own = [row["side"] for row in rows]
        recorded = [side if row["agrees"] else _other(side) for row, side in zip(rows, own, strict=True)]
        return agreement(own, recorded) if rows else None

    def _row(self, question: Question, side: Answer, strength: int | None) -> dict[str, Any]:
        order = self._shown(question).order
        better = order[_SIDES.index(side)]
        chosen, rejected = question.responses[better], question.responses[1 - better]
        return {
            **question.columns,
            "prompt": plain_prompt(question.prompt),
            "chosen": chosen,
            "rejected": rejected,
            **({} if strength is None else {"margin": strength}),
            "client": self.client,
            "side": side,
            **({} if question.recorded is None else {"agrees": int(better == question.recorded)}),
        }

    def _shown(self, question: Question) -> Shown:
        key = self._key.at("client", self.client).at("question", question.number).at("side")
        left = int(key.numpy().integers(2))
        return Shown(question, (left, 1 - left))

    def _read(self) -> None:
        """Find the person's rows: number of a question → the row that answers it."""
        rows = self.choices.of(self.client) if self.client is not None else ()
        found = ((self.questions.number_of(row), row) for row in rows)
        self._chosen = {number: row for number, row in found if number is not None}

    def _neither(self) -> dict[int, int]:
        """Number of a question that ended with neither → how many answers the person had given with it."""
        rows = self._journal.rows.items()
        return {
            number: row["neither"][self.client]
            for number, row in rows
            if self.client in row.get("neither", ())
        }

    def _neither_by(self, number: int) -> Mapping[str, int]:
        by: Mapping[str, int] = self._journal.rows.get(number, {}).get("neither", {})
        return by

    def _keep_neither(self, number: int, by: Mapping[str, int]) -> None:
        self._journal.append([{**self._journal.rows.get(number, {"row": number}), "neither": dict(by)}])

    def _count(self) -> int:
        """How many answers the person has given."""
        return (len(self.choices.of(self.client)) if self.client else 0) + len(self._neither())


def _other(side: str) -> str:
    return _SIDES[1 - _SIDES.index(side)]
