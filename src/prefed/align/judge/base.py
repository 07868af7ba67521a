"""What a judge is asked and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, TypeVar

from prefed.data import Prompt

_T = TypeVar("_T")


class JudgeError(RuntimeError):
    """A judge cannot go on; the message says why and what to do. The verdicts that it gave are kept."""


@dataclass(frozen=True)
class Question:
    """Two responses to a prompt, in the order in which the judge sees them.

    Attributes:
        fields: further columns of the prompt's row, which a selector's template may show.
    """

    prompt: Prompt
    first: str
    second: str
    fields: Mapping[str, str | float | int] = field(default_factory=dict)

    def swapped(self) -> Question:
        """The same question in the other order."""
        return replace(self, first=self.second, second=self.first)


@dataclass(frozen=True)
class Verdict:
    """A judge's answer to a question.

    Attributes:
        preference: 1 where the first response is better, 0 where the second is, 0.5 for a tie; ``None`` if
            the answer cannot be used.
        text: the judge's own words or figures; of an answer that cannot be used also why.
    """

    preference: float | None
    text: str


class Judge(Protocol):
    """Compares responses."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What its verdicts depend on, as JSON has it: judging goes on only with an equal one."""

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """A verdict for every question, in their order, each as soon as it is there.

        Raises:
            JudgeError: (on the way) the judge cannot answer at all.
        """


def outcome(forward: Verdict, backward: Verdict) -> float | None:
    """The outcome of two verdicts, on a question and on the same question swapped.

    It is 1 if both prefer the question's first response, 0 if both prefer its second, and a tie, 0.5, if
    they disagree. ``None`` if either cannot be used.

    >>> always_first = Verdict(1.0, "A"), Verdict(1.0, "A")
    >>> outcome(*always_first), outcome(Verdict(1.0, "A"), Verdict(0.0, "B"))
    (0.5, 1.0)
    """
    if forward.preference is None or backward.preference is None:
        return None
    mirrored = 1.0 - backward.preference
    return forward.preference if forward.preference == mirrored else 0.5


def by_score(first: float, second: float, text: str) -> Verdict:
    """The verdict of a judge that scores: the higher score is better, and equal scores are a tie."""
    return Verdict(0.5 if first == second else float(first > second), text)


def blocks(items: Iterable[_T], size: int) -> Iterator[Sequence[_T]]:
    """Consecutive blocks of ``size`` items; the last one may be shorter.

    >>> list(blocks("abcde", 2))
    [('a', 'b'), ('c', 'd'), ('e',)]
    """
    iterator = iter(items)
    while block := tuple(islice(iterator, size)):
        yield block
