"""The responses of a pair, each as a policy writes it: after the prompt, up to end-of-text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from prefed.data.encoding import Encoded, PolicyEncoder, Template, Tokenizer, TooLong
from prefed.data.errors import DataError, RowError
from prefed.data.record import Record
from prefed.data.tokens import Pair


class ResponseEncoder:
    """Token ids of a pair's responses in alphabetical order, so which of them is chosen changes none.

    Prompts and responses are tokenised as :class:`PolicyEncoder` does it. Where a response leaves no room for
    the prompt, the prompt gets up to half of the room: it loses its beginning, and the responses lose what
    comes before their end-of-text token.

    Args:
        tokenizer: a transformers tokenizer.
        template: renders conversations for it.
        max_length: tokens of the prompt and the longer response together.

    Raises:
        DataError: the tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, max_length: int) -> None:
        self._most = max_length
        self._fits, self._whole = (
            PolicyEncoder(tokenizer, template, max_length=most, too_long="drop")
            for most in (max_length, sys.maxsize)
        )

    def encode(self, records: Sequence[Record]) -> list[Pair]:
        """Prompt, first and second response of each record.

        Raises:
            DataError: the chat template refuses a conversation.
        """
        ordered = []
        for record in records:
            first, second = sorted((record.chosen, record.rejected))
            ordered.append(Record(record.prompt, first, second))
        outcomes = self._fits.encode(ordered)
        return [self._pair(record, outcome) for record, outcome in zip(ordered, outcomes, strict=True)]

    def _pair(self, record: Record, outcome: object) -> Pair:
        if isinstance(outcome, TooLong):
            (outcome,) = self._whole.encode([record])
            assert isinstance(outcome, Encoded)
            outcome = _shortened(outcome, self._most)
        if isinstance(outcome, RowError):
            raise DataError(f"a pair that was read before is now rejected: {outcome}")
        assert isinstance(outcome, Encoded)
        return Pair(*(np.array(ids, np.int32) for ids in (outcome.prompt, *outcome.branches)))


def _shortened(encoded: Encoded, most: int) -> Encoded:
    """The prompt's end, and the responses' beginnings with their last token."""
    room = min(len(encoded.prompt), most // 2)
    keep = most - room
    first, second = (ids if len(ids) <= keep else [*ids[: keep - 1], ids[-1]] for ids in encoded.branches)
    return Encoded(encoded.prompt[len(encoded.prompt) - room :], (first, second), cut=True, shortened=True)
