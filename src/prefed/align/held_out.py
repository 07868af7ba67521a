"""A policy's answers to held-out prompts, compared with those of the initial policy by the labeller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefed.align.alignment import Alignment
from prefed.align.labels import won
from prefed.align.start import own_prompts
from prefed.core import Tensors
from prefed.data import Record
from prefed.train.generation import Sampling, write_answers
from prefed.train.metrics import WrittenAnswer, text_health

ANSWERED = 32
"""Largest number of held-out prompts that are answered after an epoch."""


class HeldOutAnswers:
    """Answers held-out prompts, most likely token by token, and has the labeller compare the answers.

    Args:
        numbers: of the held-out prompts; the first :data:`ANSWERED` are answered.
        max_tokens: maximum length of an answer.
        tastes: ``[len(numbers), d_z]``, for a policy that takes tastes.
    """

    def __init__(
        self,
        alignment: Alignment,
        numbers: Sequence[int],
        max_tokens: int,
        tastes: torch.Tensor | None = None,
    ) -> None:
        self._alignment = alignment
        self._prompts = [own_prompts(alignment)[number] for number in numbers[:ANSWERED]]
        self._how = Sampling(max_tokens=max_tokens, temperature=0)
        self._tastes = None if tastes is None else tastes[:ANSWERED]

    @cached_property
    def _start(self) -> list[WrittenAnswer]:
        return self._write(self._alignment.policy.reference)

    def measure(self, tensors: Tensors) -> dict[str, Any]:
        """Return ``win_rate`` of a policy's answers over the initial policy's, and their health as ``text``.

        ``text`` is a :class:`~prefed.core.records.TextRecord` with the initial policy as the base model.

        Args:
            tensors: full layout.
        """
        answers = self._write(tensors)
        text = {"base": text_health(self._start), "shared": text_health(answers)}
        return {"win_rate": self._win_rate(answers), "text": text}

    def _write(self, tensors: Tensors) -> list[WrittenAnswer]:
        alignment = self._alignment
        template, asked = alignment.template, [row.prompt for row in self._prompts]
        turns = [prompt if isinstance(prompt, str) else prompt[-1].content for prompt in asked]
        prompts = list(zip(turns, map(template.prompt_ids, asked), strict=True))
        return write_answers(alignment.policy, tensors, prompts, self._how, ANSWERED, self._tastes)

    def _win_rate(self, answers: Sequence[WrittenAnswer]) -> float | None:
        """The share of answers that the labeller prefers; a tie is half of one.

        Answers that it does not judge are left out. ``None`` if it judges none.
        """
        wins, records, places = list[float](), list[Record](), list[int]()
        for place, (answer, first) in enumerate(zip(answers, self._start, strict=True)):
            own, other, row = answer.text.strip(), first.text.strip(), self._prompts[place]
            if own == other:
                wins.append(0.5)
            elif not own or not other:
                wins.append(float(bool(own)))
            else:
                records.append(Record(row.prompt, answer.text, first.text, extra=dict(row.extra)))
                places.append(place)
        if records:
            tastes = None if self._tastes is None else self._tastes[places]
            wins += won(self._alignment, records, tastes).tolist()
        return float(np.mean(wins)) if wins else None
