"""Selector questions: which of two responses is better, asked in both orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from prefed.data.config import SelectorConfig
from prefed.data.encoding import (
    MARK,
    Encoded,
    Outcome,
    Tokenizer,
    TooLong,
    dialogue,
    start_tokens,
    text_of,
    token_ids,
    triple_ids,
)
from prefed.data.errors import DataError, RowError
from prefed.data.record import Prompt, Record
from prefed.data.tokens import TokenSet, write_records

Tokens: TypeAlias = tuple[list[int], list[int], list[int]]
"""Token ids of a question and of its two continuations."""

SHORTEST = 8
"""Minimum number of tokens of a truncated response."""


@dataclass(frozen=True)
class Wording:
    """The wording of a question.

    Attributes:
        head: text before the query, with ``fields`` of the record in braces.
        responses: template of both responses with their labels.
        tail: text after the responses, followed by a space and the letter.
        query: field with the query; ``None`` for the record's prompt.
        fields: required fields of :attr:`Record.extra <prefed.data.Record>`.
    """

    head: str
    responses: str
    tail: str
    query: str | None = None
    fields: tuple[str, ...] = ()


WORDINGS = {
    "general": Wording("Query: ", "\nA: {}\nB: {}", "\nBetter:"),
    "summary": Wording(
        "Below is a forum post followed by two summaries. Pick a more precise and concise one that "
        "summarizes the most important points in the given forum post, without including unimportant or "
        "irrelevant details. State your choice with a single capital letter, i.e., “A” if SUMMARY A is "
        "better, “B” if SUMMARY B is better.\n\n### SUBREDDIT: r/{subreddit}\n### TITLE: {title}\n### POST: ",
        "\n### SUMMARY A: {}\n### SUMMARY B: {}",
        "\n### YOUR CHOICE:",
        query="post",
        fields=("subreddit", "title", "post"),
    ),
    "answer": Wording(
        "Below is a query followed by two responses. Pick a helpful response that is precise, concise, and "
        "casual. State your choice with a single capital letter, i.e., “A” if RESPONSE A is better, “B” if "
        "RESPONSE B is better.\n\n### QUERY: ",
        "\n### RESPONSE A: {}\n### RESPONSE B: {}",
        "\n### YOUR CHOICE:",
    ),
}
"""Wording of each ``[selector] template``; ``summary`` and ``answer``: FedBiscuit (ICLR 2025), figure 4."""


class ChoiceTemplate:
    """Render selector questions for one tokenizer.

    Texts are stripped. A single user turn is rendered as its text, a longer conversation in the
    Human/Assistant form.

    Attributes:
        letters: token ids of the letters A and B at the end of a question.

    Raises:
        DataError: the letters are not two distinct tokens after the same prefix.
    """

    def __init__(
        self, tokenizer: Tokenizer, kind: Literal["general", "summary", "answer"] = "general"
    ) -> None:
        self._wording, self._kind = WORDINGS[kind], kind
        self.letters = _letters(tokenizer, self._wording.tail)

    def question(self, record: Record) -> tuple[str, str]:
        """Return the beginning of the question, and the query.

        Raises:
            RowError: the record lacks a field of the template.
        """
        wording = self._wording
        missing = [name for name in wording.fields if record.extra.get(name) is None]
        if missing:
            raise RowError(
                f"no {' and no '.join(missing)}",
                f'[selector] template = "{self._kind}" requires these fields. Use rows with them, or set '
                'template = "general".',
            )
        fields = {name: str(record.extra[name]).strip() for name in wording.fields}
        query = _plain(record.prompt) if wording.query is None else fields[wording.query]
        return wording.head.format(**fields), query.strip()

    def branches(self, first: str, second: str) -> tuple[str, str]:
        """Return the two continuations in which ``first`` is better: shown as A, and shown as B."""
        first, second = first.strip(), second.strip()
        return self._branch(first, second, "A"), self._branch(second, first, "B")

    def _branch(self, shown_as_a: str, shown_as_b: str, letter: str) -> str:
        return f"{self._wording.responses.format(shown_as_a, shown_as_b)}{self._wording.tail} {letter}"


class ChoiceEncoder:
    """Encode pairs as selector questions with the responses in both orders.

    The responses are sorted alphabetically, so the tokens do not depend on which one is chosen. The question
    and its two continuations are tokenised separately, see
    :func:`~prefed.data.encoding.continuation_ids`. Each continuation ends with the letter of the
    alphabetically first response. This last token is a target and not an input.

    Args:
        max_length: maximum number of input tokens: the question and the longer continuation without its
            letter.

    Raises:
        DataError: the letters are not two distinct tokens after the same prefix.
    """

    hint = 'Raise max_length, or set [selector] too_long = "shorten" or "drop".'

    def __init__(self, tokenizer: Tokenizer, config: SelectorConfig, *, max_length: int) -> None:
        self._tokenizer, self.max_length = tokenizer, max_length
        self._template = ChoiceTemplate(tokenizer, config.template)
        self._start, self._mark = start_tokens(tokenizer), text_of(tokenizer)
        self._shortens = config.too_long == "shorten"
        self.refuses = config.too_long == "error"
        self.letters: tuple[int, int] | None = self._template.letters

    def encode(self, records: Sequence[Record]) -> list[Outcome]:
        """Encode each record; see :class:`~prefed.data.encoding.Encoder`."""
        texts: list[tuple[str, str, str]] = []
        parts: list[tuple[str, str, str, str] | RowError] = []
        for record in records:
            try:
                if record.label is not None:
                    raise RowError(
                        "this row has one response and a thumb, but a selector compares two responses",
                        "Use pairs, or a method that trains policies with objective = 'kto'.",
                    )
                head, query = self._template.question(record)
            except RowError as error:
                parts.append(error)
                continue
            first, second = (text.strip() for text in sorted((record.chosen, record.rejected)))
            parts.append((head, query, first, second))
            texts.append(self._texts(head + query, first, second))
        tokens = zip(texts, triple_ids(self._tokenizer, texts), strict=True)
        return [part if isinstance(part, RowError) else self._noted(part, *next(tokens)) for part in parts]

    def _noted(self, part: tuple[str, str, str, str], texts: tuple[str, str, str], tokens: Tokens) -> Outcome:
        outcome = self._fit(part, tokens)
        if isinstance(outcome, Encoded) and any(MARK in text for text in texts):
            return replace(outcome, notes=frozenset({"control"}))
        return outcome

    def _texts(self, question: str, first: str, second: str) -> tuple[str, str, str]:
        one, other = self._template.branches(first, second)
        return self._mark(question), self._mark(one), self._mark(other)

    def _fit(self, part: tuple[str, str, str, str], tokens: Tokens) -> Outcome:
        _, _, first, second = part
        if first == second:
            return None
        excess = self._excess(tokens)
        if excess <= 0:
            return self._encoded(tokens)
        if self._shortens:
            return self._shorten(*part, excess)
        return self._too_long(self.max_length + excess)

    def _shorten(self, head: str, query: str, first: str, second: str, excess: int) -> Outcome:
        """Truncate the responses to a common number of tokens, then cut the beginning of the query."""
        one, other, asked = (self._spans(text) for text in (first, second, query))
        needed = self.max_length + excess
        cap, room = max(len(one), len(other)), len(asked)
        while excess > 0:
            if cap > SHORTEST:
                target = _total(one, other, cap) - excess
                cap -= 1
                while cap > SHORTEST and _total(one, other, cap) > target:
                    cap -= 1
            elif room > 1:
                room = max(1, room - excess)
            else:
                return self._too_long(self.max_length + excess)
            short = _beginning(first, one, cap), _beginning(second, other, cap)
            if short[0].strip() == short[1].strip():
                # The responses differ only in the truncated part.
                return self._too_long(needed)
            texts = self._texts(head + _ending(query, asked, room).lstrip(), *short)
            (tokens,) = triple_ids(self._tokenizer, [texts])
            excess = self._excess(tokens)
        return self._encoded(tokens, cut=room < len(asked), shortened=short != (first, second))

    def _excess(self, tokens: Tokens) -> int:
        """The number of input tokens beyond ``max_length``."""
        prompt, *branches = tokens
        return len(self._start) + len(prompt) + max(map(len, branches)) - 1 - self.max_length

    def _encoded(self, tokens: Tokens, *, cut: bool = False, shortened: bool = False) -> Outcome:
        prompt, first, second = tokens
        if (first[-1], second[-1]) != self.letters:
            return RowError(
                "the tokenizer merges the answer letter of the selector question with the text before it; "
                "use a model with another tokenizer"
            )
        return Encoded([*self._start, *prompt], (first, second), cut, shortened)

    def _too_long(self, needed: int) -> TooLong:
        return TooLong(
            f"the selector question has {needed} tokens, but max_length is {self.max_length}", needed
        )

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each token in the text."""
        if not getattr(self._tokenizer, "is_fast", False):
            raise DataError(
                "this tokenizer does not report token offsets, so long pairs cannot be shortened; set "
                '[selector] too_long = "drop"'
            )
        encoding = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        return list(encoding["offset_mapping"])


def write_choices(
    folder: Path, tokenizer: Tokenizer, config: SelectorConfig, records: Iterable[Record], max_length: int
) -> TokenSet:
    """Write selector questions about ``records`` with :func:`~prefed.data.tokens.write_records`.

    Raises:
        DataError: a record lacks a field of the template, or is too long and ``too_long`` is ``error``.
    """
    encoder = ChoiceEncoder(tokenizer, config, max_length=max_length)
    return write_records(folder, encoder, records, "the pairs to be judged")


def _letters(tokenizer: Tokenizer, tail: str) -> tuple[int, int]:
    """Return the last tokens of the tail followed by A and by B."""
    a, b = token_ids(tokenizer, [f"{tail} A", f"{tail} B"])
    unknown = getattr(tokenizer, "unk_token_id", None)
    if not a or not b or a[:-1] != b[:-1] or a[-1] == b[-1] or unknown in (a[-1], b[-1]):
        raise DataError(
            f'a selector needs a tokenizer that encodes "{tail.strip()} A" and "{tail.strip()} B" with the '
            f"same prefix and two distinct last tokens, not as {a} and {b}; use another model"
        )
    return a[-1], b[-1]


def _plain(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return prompt[0].content if [turn.role for turn in prompt] == ["user"] else dialogue(prompt)


def _total(one: Sequence[object], other: Sequence[object], cap: int) -> int:
    return min(len(one), cap) + min(len(other), cap)


def _beginning(text: str, spans: Sequence[tuple[int, int]], count: int) -> str:
    """Return the first ``count`` tokens of a text, without a character shared with the next token."""
    return text if count >= len(spans) else text[: min(spans[count - 1][1], spans[count][0])]


def _ending(text: str, spans: Sequence[tuple[int, int]], count: int) -> str:
    """Return the last ``count`` tokens of a text, without a character shared with the token before."""
    first = len(spans) - count
    return text if first <= 0 else text[max(spans[first - 1][1], spans[first][0]) :]
