"""Trains selectors: the trainer of losses, on log-odds of choices."""

from __future__ import annotations

import torch

from prefed.core import Objective
from prefed.train.loss_trainer import LossTrainer
from prefed.train.losses import CHOICE, ChoiceBatch, PairLoss
from prefed.train.pair_cache import PairScoreCache, Rows


class ChoiceTrainer(LossTrainer):
    """Trains on :data:`prefed.train.losses.CHOICE`.

    Every other objective is refused with ``ValueError``.
    """

    def _find(self, objective: Objective) -> PairLoss:
        if objective.name != CHOICE.name:
            raise ValueError(
                f"objective {objective.name!r} reads log-probabilities of responses, and these pairs are a "
                f"selector's: it trains on {CHOICE.name!r} alone"
            )
        return CHOICE

    def _batch(
        self, outputs: torch.Tensor, rows: Rows, loss: PairLoss, references: PairScoreCache
    ) -> ChoiceBatch:
        return ChoiceBatch(outputs, torch.from_numpy(self._model.signs(rows)).to(outputs.device))
