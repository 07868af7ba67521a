"""A policy's answers to held-out prompts, compared with those of the initial policy by the labeller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefed.align.alignment import Alignment, Scorer
from prefed.align.labels import won
from prefed.align.prompts_and_policy import own_prompts
from prefed.align.stages import dumps
from prefed.align.tastes import at_prompts
from prefed.core import Tensors, files
from prefed.data import Record
from prefed.train.generation import Completion, Sampling, surprises, write_answers
from prefed.train.metrics import WrittenAnswer, text_health

ANSWERED = 32
"""Largest number of held-out prompts that are answered after an epoch."""


def win_rate(
    alignment: Alignment,
    scorer: Scorer,
    rows: Sequence[Mapping[str, Any]],
    tastes: Mapping[int, torch.Tensor] | None = None,
) -> float | None:
    """Return the share of answers that a labeller prefers to the initial policy's; a tie is half of one.

    Answers that it does not judge are left out. ``None`` if it judges none.

    Args:
        rows: number of the ``prompt``, ``answer`` and ``initial`` answer.
        tastes: number of a prompt → ``[d_z]``, for a policy that takes tastes.
    """
    wins, judged, prompts = list[float](), list[tuple[int, Record]](), own_prompts(alignment)
    for row in rows:
        own, other, prompt = row["answer"].strip(), row["initial"].strip(), prompts[row["prompt"]]
        if own == other:
            wins.append(0.5)
        elif not own or not other:
            wins.append(float(bool(own)))
        else:
            record = Record(prompt.prompt, row["answer"], row["initial"], extra=dict(prompt.extra))
            judged.append((row["prompt"], record))
    if judged:
        z = at_prompts(tastes, (number for number, _ in judged))
        wins += won(alignment, scorer, [record for _, record in judged], z).tolist()
    return float(np.mean(wins)) if wins else None


class HeldOutAnswers:
    """Answers held-out prompts, most likely token by token, and has the labeller compare the answers.

    Args:
        scorer: the labeller.
        numbers: of the held-out prompts; the first :data:`ANSWERED` are answered.
        max_tokens: maximum length of an answer.
        tastes: number of a prompt → ``[d_z]``, for a policy that takes tastes.
    """

    def __init__(
        self,
        alignment: Alignment,
        scorer: Scorer,
        numbers: Sequence[int],
        max_tokens: int,
        tastes: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._alignment, self._scorer, self._tastes = alignment, scorer, tastes
        self._numbers = numbers[:ANSWERED]
        self._how = Sampling(max_tokens=max_tokens, temperature=0)

    @cached_property
    def _start(self) -> list[WrittenAnswer]:
        return self._write(self._alignment.policy.reference)

    def measure(self, tensors: Tensors, path: Path) -> dict[str, Any]:
        """Return ``win_rate`` of a policy's answers over the initial policy's, their health, and ``kl``.

        ``text`` is a :class:`~prefed.core.records.TextRecord` with the initial policy as the base model.
        ``kl`` is how much more probable the answers are than under the initial policy, in nats per token.

        Args:
            tensors: full layout.
            path: where to write the rows for :func:`win_rate`.
        """
        answers = self._write(tensors)
        rows = [
            {"prompt": number, "answer": own.text, "initial": first.text}
            for number, own, first in zip(self._numbers, answers, self._start, strict=True)
        ]
        files.write(path, dumps(rows))
        text = {"base": text_health(self._start), "shared": text_health(answers)}
        rate = win_rate(self._alignment, self._scorer, rows, self._tastes)
        return {"win_rate": rate, "text": text, "kl": self._kl(tensors, answers)}

    def _kl(self, tensors: Tensors, answers: Sequence[WrittenAnswer]) -> float | None:
        """Return the mean log-ratio of a policy's answers; ``None`` for one that takes tastes."""
        if self._tastes is not None:
            return None
        policy = self._alignment.policy
        end = policy.tokenizer.eos_token_id
        completions = [Completion([*own.tokens], end if own.ended else None) for own in answers]
        after = surprises(policy, [ids for _, ids in self._asked], completions, tensors)
        return float(np.mean([own.surprise for own in answers]) - np.mean(after))

    @cached_property
    def _asked(self) -> list[tuple[str, list[int]]]:
        """The text of the last turn and the token ids of each prompt."""
        prompts = [own_prompts(self._alignment)[number].prompt for number in self._numbers]
        turns = [prompt if isinstance(prompt, str) else prompt[-1].content for prompt in prompts]
        return list(zip(turns, map(self._alignment.template.prompt_ids, prompts), strict=True))

    def _write(self, tensors: Tensors) -> list[WrittenAnswer]:
        tastes = at_prompts(self._tastes, self._numbers)
        return write_answers(self._alignment.policy, tensors, self._asked, self._how, ANSWERED, tastes)
