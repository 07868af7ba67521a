"""The reference's two numbers of every pair, computed once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prefed.train.pair_cache import PairScoreCache, Rows, split_rows
from prefed.train.pair_model import PairModel


class ReferenceLogprobs:
    """log π_ref of both responses of every pair; of a choice, the untouched model's log-odds in both orders.

    The last digits of a log-probability depend on the pairs that go through the model with it. Scoring and
    training group pairs differently, so each has a cache of its own.

    Attributes:
        scoring: the numbers that scoring reads.
        training: the numbers that steps read.
        one_by_one: for training, each pair goes through the model by itself. That costs little on a CPU;
            other devices would be idle.
    """

    def __init__(self, model: PairModel, folder: Path | None, name: str) -> None:
        self._model = model
        self.scoring = PairScoreCache(len(model.tokens), folder, name)
        self.training = PairScoreCache(len(model.tokens), folder, f"{name}-training")
        self.one_by_one = model.backbone.device.type == "cpu"

    def fill_scoring(self, rows: Rows) -> None:
        """Compute the numbers of ``rows`` for scoring, all of them if one is missing.

        Scoring takes a client's whole split, so a split's rows always go through in the same groups. The
        policy goes through in these groups too: where the two are the same model, their numbers are equal to
        the bit.
        """
        if self.scoring.missing(rows):
            self._compute(self.scoring, [rows])

    def fill_training(self, rows: Rows, client_rows: Rows) -> None:
        """Compute the numbers of ``rows`` for training, of as few other pairs as possible.

        Only the client's pairs decide which pairs go through the model together. So a pair's numbers are the
        same to the bit in any order of steps, and after a kill. ``client_rows`` are all pairs of the client,
        ``rows`` among them.
        """
        if not self.training.missing(rows):
            return
        blocks = (
            split_rows(np.unique(rows), 1) if self.one_by_one else self._model.groups(np.sort(client_rows))
        )
        self._compute(
            self.training,
            [block for block in blocks if np.isin(block, rows).any() and self.training.missing(block)],
        )

    def _compute(self, cache: PairScoreCache, blocks: list[Rows]) -> None:
        """Put the numbers of ``blocks`` into ``cache``; each block goes through the model by itself."""
        backbone = self._model.backbone
        backbone.load(backbone.reference)
        # Only the first two numbers are stored. But with a reward head the policy is scored with its rewards,
        # which packs the batch in another way. The reference is packed like the policy, for equal bits.
        rewards = backbone.reward is not None
        values = [self._model.outputs(block, rewards=rewards)[:, :2] for block in blocks]
        cache.put(np.concatenate(blocks), np.concatenate(values))
