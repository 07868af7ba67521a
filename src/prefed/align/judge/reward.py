"""A reward model as a judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from prefed.align.judge.base import Question, Verdict, blocks, by_score
from prefed.train.rewards import RewardModel, model_fingerprint

KEY = "--judge reward"
BLOCK = 64
"""Questions whose responses are scored together."""


class RewardJudge:
    """The response with the higher reward is the better one.

    Texts are joined as for :class:`~prefed.train.rewards.RewardModel`.

    Args:
        folder: a sequence classification model: a folder or a hub name.

    Raises:
        ModelError: there is no such model, or it is no reward model.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        self._model = RewardModel(folder, device, KEY)
        self.identity: Mapping[str, Any] = {"model": model_fingerprint(folder, KEY)}

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """A verdict for every question, block by block; a text that a block has twice is scored once."""
        for block in blocks(questions, BLOCK):
            encoded: dict[Any, dict[str, list[int]]] = {}
            for question in block:
                texts = question.first, question.second
                codes = self._model.encode_texts(question.prompt, *texts)
                for text, code in zip(texts, codes, strict=True):
                    encoded.setdefault((question.prompt, text), code)
            scores = self._model.score(list(encoded.values()))
            rewards = dict(zip(encoded, map(float, scores), strict=True))
            for question in block:
                pair = [rewards[question.prompt, text] for text in (question.first, question.second)]
                if np.isfinite(pair).all():
                    yield by_score(pair[0], pair[1], f"reward {pair[0]:.6g} against {pair[1]:.6g}")
                else:
                    yield Verdict(None, f"a reward is not finite: {pair[0]} and {pair[1]}")
