"""Trained selectors as a judge: they vote."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefed.core import Tensors
from prefed.data import Record, SelectorConfig, write_choices
from prefed.judge.base import Question, Verdict, blocks
from prefed.models import Backbone
from prefed.train import PairTrainer

BLOCK = 64
"""Questions whose tokens are written together."""


class SelectorJudge:
    """The response that most selectors prefer is the better one; the summed score breaks an even vote.

    A selector's score is symmetrised over both orders, so it does not depend on the order of a question.

    Args:
        selectors: name → tensors (full layout) of each selector.
        config: how the selectors are asked.
        max_length: tokens that they read.
        identity: what the selectors are, for :attr:`~prefed.judge.Judge.identity`.
        max_tokens: tokens of one forward pass.
        fast: use packed batches where the model's family allows them.
    """

    def __init__(
        self,
        backbone: Backbone,
        selectors: Mapping[str, Tensors],
        config: SelectorConfig,
        *,
        max_length: int,
        identity: Mapping[str, Any],
        max_tokens: int,
        fast: bool,
    ) -> None:
        self._backbone, self._selectors, self._config = backbone, selectors, config
        self._max_length, self._max_tokens, self._fast = max_length, max_tokens, fast
        self.identity = identity

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """A verdict for every question, block by block; both orders of a question are scored once."""
        for block in blocks(questions, BLOCK):
            pairs: dict[Any, Record | str] = {}
            for question in block:
                if _key(question) not in pairs:
                    pairs[_key(question)] = _record(question)
            scores = self._scores([pair for pair in pairs.values() if isinstance(pair, Record)])
            rows = iter(scores)
            by_pair = {
                key: (pair, next(rows)) if isinstance(pair, Record) else (pair, None)
                for key, pair in pairs.items()
            }
            for question in block:
                pair, values = by_pair[_key(question)]
                if values is None:
                    why = pair if isinstance(pair, str) else "the pair does not fit into [data] max_length"
                    yield Verdict(None, why)
                else:
                    assert isinstance(pair, Record)
                    yield self._verdict(values if pair.chosen == question.first else -values)

    def _scores(self, records: Sequence[Record]) -> list[npt.NDArray[np.float32] | None]:
        """``[selectors]`` scores of chosen over rejected for each record; ``None`` where it does not fit."""
        scores: list[npt.NDArray[np.float32] | None] = [None] * len(records)
        if not records:
            return scores
        with tempfile.TemporaryDirectory(prefix="prefed-questions-") as folder:
            tokens = write_choices(
                Path(folder), self._backbone.tokenizer, self._config, records, self._max_length
            )
            if not len(tokens):
                return scores
            trainer = PairTrainer(self._backbone, tokens, max_tokens=self._max_tokens, fast=self._fast)
            rows = np.arange(len(tokens))
            signs = np.where(tokens.orientations[rows] == 1, 1, -1)
            columns = [trainer.choice_scores(tensors, rows) * signs for tensors in self._selectors.values()]
            for row, values in zip(rows, np.stack(columns, axis=1), strict=True):
                # Rows name their records from 1.
                scores[int(tokens.rows[row]) - 1] = values
        return scores

    def _verdict(self, scores: npt.NDArray[np.float32]) -> Verdict:
        words = ", ".join(f"{name} {value:+.4f}" for name, value in zip(self._selectors, scores, strict=True))
        text = f"log-odds of the first: {words}"
        if not np.isfinite(scores).all():
            return Verdict(None, f"a score is not finite; {text}")
        lead = int(np.sign(scores).sum()) or float(scores.sum())
        return Verdict(0.5 if lead == 0 else float(lead > 0), text)


def _key(question: Question) -> Any:
    return question.prompt, frozenset((question.first, question.second))


def _record(question: Question) -> Record | str:
    """The question as a pair, or why it is none."""
    try:
        return Record(question.prompt, question.first, question.second, extra=question.fields)
    except ValueError as error:
        return f"a selector cannot be shown this pair: {error}"
