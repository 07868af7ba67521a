"""Health of the text that a model writes: whether its answers end, loop, repeat words or are nonsense.

Accuracy on pairs compares two given responses, so a model may order every pair correctly and write nonsense.
Loops are more likely under the base model than its own answers, and nonsense is less likely: health has two
sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from prefed.core.records import TextHealth, TextRecord
from prefed.core.text import pluralize
from prefed.train.metrics.intervals import wilson_interval
from prefed.train.metrics.run_warnings import TEXT_REMEDY
from prefed.train.metrics.table import FOURFOLD, LONG

BAND = (0.1, 0.9)
"""Quantiles over answers that bound the band of surprise."""
UNLIKELY = 2.0
"""Maximum nats per token by which surprise of healthy text exceeds the band of the base model's answers."""


@dataclass(frozen=True)
class WrittenAnswer:
    """An answer of a model.

    Attributes:
        prompt: text of the last turn of the prompt.
        text: the answer as text.
        tokens: its token ids, without the end-of-text token.
        ended: whether the model ended it; ``False`` if it was cut at the limit of tokens.
        surprise: −log p under the base model in nats a token, including the end-of-text token if it ended.
        worded: ``tokens`` without numbers, by which the items of a list differ even if it repeats one; see
            :func:`without_numbers`.
    """

    prompt: str
    text: str
    tokens: Sequence[int]
    ended: bool
    surprise: float
    worded: Sequence[int] = ()

    @property
    def loops(self) -> bool:
        """Whether it loops, with or without its numbers; see :func:`loops`."""
        return loops(self.tokens) or loops(self.worded)

    @property
    def empty(self) -> bool:
        """Whether it has no letter and no digit, or starts with the whole prompt."""
        return not any(map(str.isalnum, self.text)) or (
            bool(prompt := _plain(self.prompt)) and _plain(self.text).startswith(prompt)
        )


def loops(tokens: Sequence[int]) -> bool:
    """Return whether a sequence of tokens occurs four times in a row, or three times over 12 tokens or more.

    The third time may lack its last token: the last item of a list has no line break, or another one. With
    period p, token i equals token i − p. A run of L such tokens is ``(L + p) / p`` repetitions.

    >>> just, a_sentence = [7], [5, 3, 9, 2]
    >>> loops([1, 2, *just * 4, 3]), loops([1, 2, *just * 3, 3])
    (True, False)
    >>> loops(a_sentence * 3), loops((a_sentence * 3)[:-1]), loops(a_sentence * 2)
    (True, True, False)
    """
    ids = np.asarray(tokens)
    for period in range(1, (len(ids) + 1) // 3 + 1):
        run = _longest_run(ids[period:] == ids[:-period]) + period
        if run >= FOURFOLD * period or (3 * period >= LONG and run >= 3 * period - 1):
            return True
    return False


def without_numbers(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that are not numbers, e.g. of the list "1. Be kind. 2. Be kind. 3. Be kind.".

    What separates numbers without words between them, as in "1, 2, 3, 4", is left out with them.
    """
    texts, found = [tokenizer.decode([token]).strip() for token in tokens], list[int]()
    for words, group in groupby(zip(texts, tokens, strict=True), lambda each: any(map(str.isalpha, each[0]))):
        own = list(group)
        # Digits of one number may be several tokens.
        numbers = sum(numeric for numeric, _ in groupby(text.isdigit() for text, _ in own))
        found += [token for text, token in own if words or (numbers < 2 and not text.isdigit())]
    return found


def distinct_2(tokens: Sequence[int]) -> float:
    """Return the share of the pairs of adjacent tokens that are different; 1 for fewer than two tokens.

    Source: Li et al., A diversity-promoting objective function for neural conversation models (NAACL 2016);
    here within an answer, so that it does not depend on the number of answers.

    >>> distinct_2([1, 2, 1, 2, 1]), distinct_2([1])
    (0.5, 1.0)
    """
    pairs = list(pairwise(tokens))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def text_health(answers: Sequence[WrittenAnswer]) -> TextHealth:
    """Compute the health of a set of answers; see :data:`~prefed.train.metrics.TEXT_METRICS`.

    Raises:
        ValueError: there are no answers.
    """
    if not answers:
        raise ValueError("there are no answers to measure")
    surprises = [answer.surprise for answer in answers]
    low, high = np.quantile(surprises, BAND).tolist()
    health = {
        "answers": len(answers),
        "ends": float(np.mean([answer.ended for answer in answers])),
        "loops": float(np.mean([answer.loops for answer in answers])),
        "distinct_2": float(np.mean([distinct_2(answer.tokens) for answer in answers])),
        "length": float(np.mean([len(answer.tokens) for answer in answers])),
        "empty": float(np.mean([answer.empty for answer in answers])),
        "surprise": float(np.median(surprises)),
        "surprise_band": [low, high],
    }
    return cast(TextHealth, health)  # metrics may be added


def unhealthy(own: TextHealth, base: TextHealth) -> list[str]:
    """Return in which ways text is worse than the base model's by more than the interval; empty if healthy.

    A share is worse if it is outside the 95% interval (Wilson) of the base model's share, on the side that
    is not the better one. Surprise is worse if it exceeds the band of the base model's answers by
    more than :data:`UNLIKELY`, and nine in ten of the responses that clients chose: these may be unlikely,
    too.
    """
    found = []
    for name, words in _SYMPTOMS.items():
        low, high = wilson_interval(base[name], base["answers"])
        if own[name] < low if name == "ends" else own[name] > high:
            found.append(words[0])
    if own["surprise"] > max(base["surprise_band"][1] + UNLIKELY, base.get("chosen_surprise", 0.0)):
        found.append("the text is unlikely under the base model")
    return found


def last_health(text: TextRecord) -> TextHealth | None:
    """Return the health of the models that clients use: of their own, else of the shared one."""
    return text.get("own", text.get("shared"))


def health_sentence(text: TextRecord) -> str:
    """Return :func:`health_line` of the models that clients use; empty if their text was not measured."""
    own = last_health(text)
    return health_line(own, text["base"]) if own else ""


def broken_text(text: TextRecord | None) -> list[str]:
    """Return :func:`unhealthy` of the models that clients use; empty if their text was not measured."""
    own = last_health(text) if text else None
    return unhealthy(own, text["base"]) if text and own else []


def text_warning(text: TextRecord, before: TextRecord | None) -> str:
    """Return the warning about text that has become worse than the base model's, or ``""``.

    Args:
        before: after the previous round, of which the warning is not repeated.
    """
    own, worse = last_health(text), broken_text(text)
    if own is None or not worse or broken_text(before):
        return ""
    return f"the models' text breaks: {health_line(own, text['base'])}; {TEXT_REMEDY}"


def health_line(own: TextHealth, base: TextHealth) -> str:
    """Return the health of text as a sentence, next to the base model's.

    >>> def health(loops, ends, surprise):
    ...     shares = {"answers": 20, "loops": loops / 20, "ends": ends / 20, "empty": 0.0, "distinct_2": 0.9}
    ...     return {**shares, "length": 30.0, "surprise": surprise, "surprise_band": [surprise, surprise]}
    >>> health_line(health(5, 18, 1.1), health(1, 9, 0.8))
    '5 of 20 answers loop; the base model: 1'
    >>> health_line(health(0, 20, 5.0), health(1, 9, 0.8))
    'answers are unlikely under the base model: 5.00 nats a token; its own: 0.80'
    >>> health_line(health(1, 18, 1.1), health(1, 9, 0.8))
    '18 of 20 answers end, 1 loops; the base model: 9 end, 1 loops'
    """
    n = own["answers"]

    def count(health: TextHealth, name: Literal["ends", "loops", "empty"]) -> int:
        return round(health[name] * n)

    worse = unhealthy(own, base)
    for name, (words, singular, plural) in _SYMPTOMS.items():
        if words in worse:
            bad = n - count(own, name) if name == "ends" else count(own, name)
            before = n - count(base, name) if name == "ends" else count(base, name)
            verb = singular if bad == 1 else plural
            return f"{bad:,} of {pluralize(n, 'answer', 'answers')} {verb}; the base model: {before:,}"
    if worse:
        return (
            f"answers are unlikely under the base model: {own['surprise']:.2f} nats a token; its own: "
            f"{base['surprise']:.2f}"
        )

    def ends_and_loops(health: TextHealth, of: str = "") -> str:
        ends = pluralize(count(health, "ends"), f"{of}ends", f"{of}end")
        return f"{ends}, {pluralize(count(health, 'loops'), 'loops', 'loop')}"

    own_line = ends_and_loops(own, f"of {pluralize(n, 'answer', 'answers')} ")
    return f"{own_line}; the base model: {ends_and_loops(base)}"


_SYMPTOMS: Mapping[Literal["loops", "empty", "ends"], tuple[str, str, str]] = {
    "loops": ("answers loop", "loops", "loop"),
    "empty": ("answers are empty or repeat the prompt", "is empty or repeats", "are empty or repeat"),
    "ends": ("answers do not end", "does not end", "do not end"),
}
"""Share → what is wrong if it is worse than the base model's; the verb for one answer, and for several."""


def _longest_run(values: npt.NDArray[np.bool_]) -> int:
    """Return the length of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], values, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
