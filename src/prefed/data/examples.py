"""Prompts that begin with examples: other pairs of the same client, with their chosen responses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from prefed.core import Key
from prefed.data.encoding import Encoded, PolicyEncoder, Template, Tokenizer
from prefed.data.errors import DataError
from prefed.data.record import Message, Prompt, Record
from prefed.data.tokens import Pair


def with_examples(prompt: Prompt, examples: Sequence[Record]) -> Prompt:
    r"""Return ``prompt`` after the prompts and chosen responses of ``examples``, in their order.

    A conversation continues that of the examples; system turns of examples are left out, and that of the
    prompt comes first. A text is separated from the one before by an empty line. Examples whose prompts are
    of the other kind are left out.

    >>> with_examples("Name a fruit.", [Record("Name a colour.", " Red.", " No.")])
    'Name a colour. Red.\n\nName a fruit.'
    """
    if isinstance(prompt, str):
        texts = [f"{e.prompt}{e.chosen}" for e in examples if isinstance(e.prompt, str)]
        return "".join(
            text if not before or text.startswith("\n") else f"\n\n{text}"
            for before, text in enumerate([*texts, prompt])
        )
    system = [turn for turn in prompt[:1] if turn.role == "system"]
    turns = list(system)
    for example in examples:
        if not isinstance(example.prompt, str):
            turns += [turn for turn in example.prompt if turn.role != "system"]
            turns.append(Message("assistant", example.chosen))
    return (*turns, *prompt[len(system) :])


class ExampleEncoder:
    """Encode pairs whose prompts begin with as many examples as fit.

    Args:
        max_length: maximum number of tokens of a prompt with the longer response.
        key: random key of the draws of examples.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, max_length: int, key: Key) -> None:
        self.max_length, self._key = max_length, key
        self._whole = PolicyEncoder(tokenizer, template, max_length=sys.maxsize, too_long="drop")
        self._cut = PolicyEncoder(tokenizer, template, max_length=max_length, too_long="error")

    def draw(self, client: str, rows: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """Draw ``count`` of a client's training rows, or all; a larger count only adds rows."""
        drawn: npt.NDArray[np.int64] = self._key.at("client", client).numpy().permutation(np.sort(rows))
        return drawn[:count]

    def encode(self, record: Record, examples: Sequence[Record]) -> Pair:
        """Return prompt, chosen and rejected response; the last examples are left out first.

        An example that repeats the pair, which would reveal its label, is left out too. Without room for an
        example the pair is as in training, where a long prompt loses its beginning.

        Raises:
            DataError: the chat template rejects the conversation.
        """
        examples = [example for example in examples if _texts(example) != _texts(record)]
        for count in range(len(examples), 0, -1):
            longer = replace(record, prompt=with_examples(record.prompt, examples[:count]))
            (outcome,) = self._whole.encode([longer])
            if isinstance(outcome, Encoded) and _length(outcome) <= self.max_length:
                return _pair(outcome)
            if not isinstance(outcome, Encoded):
                raise DataError(f"cannot put examples before a pair: {outcome}")
        (outcome,) = self._cut.encode([record])
        if not isinstance(outcome, Encoded):
            raise DataError(f"cannot encode a pair of this dataset: {outcome}")
        return _pair(outcome)


def _texts(record: Record) -> tuple[Prompt, frozenset[str]]:
    return record.prompt, frozenset((record.chosen, record.rejected))


def _length(encoded: Encoded) -> int:
    return len(encoded.prompt) + max(map(len, encoded.branches))


def _pair(encoded: Encoded) -> Pair:
    return Pair(*(np.array(ids, np.int32) for ids in (encoded.prompt, *encoded.branches)))
