"""An annotator's session: current question, answers, undo."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prefed.core import Key
from prefed.core.text import control_character
from prefed.data.record import plain_prompt
from prefed.runs.append_log import Journal
from prefed.train.metrics.intervals import Agreement, agreement
from prefed.ui.collect.pairs import Choices, CollectError, Question, Questions

Answer = Literal["left", "right", "neither", "good", "bad"]

STRENGTHS = {1: "slightly", 2: "clearly", 3: "very much"}
"""Margin of the chosen pair → its name on the page."""

_SIDES: tuple[Answer, Answer] = ("left", "right")
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Shown:
    """A question as shown on the page.

    Attributes:
        order: indices of the left and the right response in ``question.responses``.
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
    """Numbers of questions.

    Attributes:
        chosen: with a chosen response.
        neither: answered with "neither".
        of: in total.
        thumbs: answered with "both good" or "both bad".
    """

    chosen: int
    neither: int
    of: int
    thumbs: int = 0

    @property
    def done(self) -> int:
        """Number of answered questions."""
        return self.chosen + self.neither + self.thumbs


class Session:
    """A session of one annotator.

    Choices are lines in the file of pairs, answers "both good" and "both bad" two lines in the file of
    thumbs, answers "neither" rows in the journal. Each answer is one write to one file.

    Args:
        thumbs: the file of thumbs; ``None`` without these answers.
        journal: the answers "neither".
        key: random key of the sides, which stay the same after a restart.

    Attributes:
        client: the annotator's name; ``None`` until it is entered.
        changed: lock of the session, notified when a question becomes ready.
        failure: error message of the response generator, if it failed.
    """

    def __init__(
        self,
        questions: Questions,
        choices: Choices,
        journal: Journal,
        key: Key,
        thumbs: Choices | None = None,
    ) -> None:
        self.questions, self.choices, self.thumbs = questions, choices, thumbs
        self._journal, self._key = journal, key
        self.client: str | None = None
        self.changed = threading.Condition(threading.RLock())
        self.failure: str | None = None
        self._chosen: dict[int, Mapping[str, Any]] = {}

    def name(self, client: str) -> None:
        """Set the annotator's name.

        Raises:
            CollectError: the name is invalid.
        """
        client = client.strip()
        control = control_character(client)
        if not client or len(client) > _LONGEST_NAME or control:
            problem = f"a control character, {control}" if control else f"{len(client)} characters"
            raise CollectError(
                f"a name must have 1 to {_LONGEST_NAME} characters in one line, but this one has {problem}"
            )
        with self.changed:
            self.client = client
            self._read()
            self.changed.notify_all()

    def judged(self) -> Collection[int]:
        """Numbers of the answered questions."""
        with self.changed:
            return frozenset(self._chosen) | self._neither().keys() | self._thumbs().keys()

    def progress(self) -> Progress:
        """Count answered and all questions."""
        with self.changed:
            numbers = set(self.questions.numbers())
            chosen = numbers & self._chosen.keys()
            thumbs = (numbers & self._thumbs().keys()) - chosen
            neither = (numbers & self._neither().keys()) - chosen - thumbs
            return Progress(len(chosen), len(neither), len(numbers), len(thumbs))

    def current(self) -> Shown | None:
        """The first unanswered question that is ready, if any."""
        with self.changed:
            judged = self.judged()
            waiting = (n for n in self.questions.numbers() if n not in judged)
            ready = (question for n in waiting if (question := self.questions.get(n)) is not None)
            return next((self._shown(question) for question in ready), None)

    def choose(self, number: int, answer: Answer, strength: int | None = None) -> bool:
        """Save an answer to disk.

        Args:
            strength: a key of :data:`STRENGTHS`, if given.

        Returns:
            ``False`` if the question was already answered, e.g. because a form was sent twice.

        Raises:
            CollectError: there is no such question.
            WriteError: the answer cannot be written, e.g. because the disk is full.
        """
        with self.changed:
            question = self.questions.get(number)
            if self.client is None or question is None:
                raise CollectError("this question does not exist; reload the page")
            if number in self.judged():
                return False
            if answer == "neither":
                self._keep_neither(number, {**self._neither_by(number), self.client: self._count() + 1})
            elif answer in ("good", "bad"):
                if self.thumbs is None:
                    raise CollectError("thumbs have no file; start prefed collect with --thumbs FILE")
                self.thumbs.append(*self._thumb_rows(question, up=answer == "good"))
            else:
                row = self._row(question, answer, strength)
                self.choices.append(row)
                self._chosen[number] = row
            self.changed.notify_all()
            return True

    def take_back(self) -> bool:
        """Undo the annotator's last answer, including answers from before a restart.

        Returns:
            ``False`` if there is none.

        Raises:
            CollectError: someone else has chosen since, or another program changed the file.
        """
        with self.changed:
            count, neither = self._count(), self._neither()
            if self.client is None or not count:
                return False
            last = max(neither, key=lambda number: neither[number], default=None)
            if self.thumbs is not None and max(self._thumbs().values(), default=0) >= count:
                # One, if the process was killed while it wrote the answer.
                rows = [row for row in self.thumbs.of(self.client) if row.get("answer", 0) >= count]
                self.thumbs.take_back(self.client, len(rows))
            elif last is not None and neither[last] >= count:
                others = {who: at for who, at in self._neither_by(last).items() if who != self.client}
                self._keep_neither(last, others)
            else:
                self.choices.take_back(self.client)
                self._read()
            self.changed.notify_all()
            return True

    def agreement(self) -> Agreement | None:
        """Agreement of the annotator's sides with the recorded choices, without answers "neither".

        Returns:
            ``None`` without recorded choices, or before the first answer.
        """
        with self.changed:
            # The file may have answers to other questions, too.
            chosen = (self._chosen[number] for number in self.questions.numbers() if number in self._chosen)
            rows = [row for row in chosen if "agrees" in row and row.get("side") in _SIDES]
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

    def _thumb_rows(self, question: Question, *, up: bool) -> list[dict[str, Any]]:
        order = self._shown(question).order
        return [
            {
                **question.columns,
                "prompt": plain_prompt(question.prompt),
                "completion": question.responses[place],
                "label": up,
                "client": self.client,
                "side": side,
                "question": question.number,
                "answer": self._count() + 1,
            }
            for side, place in zip(_SIDES, order, strict=True)
        ]

    def _thumbs(self) -> dict[int, int]:
        """Number of a question answered with thumbs → the annotator's count of answers at that time."""
        rows = self.thumbs.of(self.client) if self.thumbs is not None and self.client is not None else ()
        return {row["question"]: row["answer"] for row in rows if "question" in row and "answer" in row}

    def _shown(self, question: Question) -> Shown:
        key = self._key.at("client", self.client).at("question", question.number).at("side")
        left = int(key.numpy().integers(2))
        return Shown(question, (left, 1 - left))

    def _read(self) -> None:
        rows = self.choices.of(self.client) if self.client is not None else ()
        found = ((self.questions.number_of(row), row) for row in rows)
        self._chosen = {number: row for number, row in found if number is not None}

    def _neither(self) -> dict[int, int]:
        """Number of a question answered "neither" → the annotator's count of answers at that time."""
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
        chosen = len(self.choices.of(self.client)) if self.client else 0
        return chosen + len(self._neither()) + len(self._thumbs())


def _other(side: str) -> str:
    return _SIDES[1 - _SIDES.index(side)]
