"""Training of the shared rewards of LoRe and PAL, and of a client's mixture of them, on hidden states.

The loss of a pair is that of Bradley and Terry, −log σ(r(chosen) − r(rejected)), with the rewards of
:mod:`prefed.models.mixed_rewards`. The language model runs once per pair; see
:class:`~prefed.train.tastes.ResponseFeatures`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import Key, Objective, PhaseResult, Tensors
from prefed.models.mixed_rewards import rewards
from prefed.train.losses import MIXED
from prefed.train.optimizer_steps import PhaseSteps, backward, batches
from prefed.train.pair_cache import Rows
from prefed.train.tastes import HiddenTrainer
from prefed.train.trainers import PhaseStart


class MixedRewardTrainer(HiddenTrainer):
    """Trains on the objective ``mixed``, and computes log-odds from rewards."""

    objective = MIXED

    def train(self, start: PhaseStart) -> PhaseResult:
        """Run a phase; its metrics are ``accuracy`` and ``margin``, means over the steps.

        With ``pairs`` in the settings of the objective, the batches are of that many pairs of the visit,
        drawn at its key.
        """
        few = int(MIXED.resolve(start.phase.objective.settings)["pairs"])
        rows = start.visit.rows
        self._features.fill(rows)
        if few:
            rows = start.visit.key.at("pairs").numpy().permutation(np.sort(rows))[:few]
        self._model.backbone.load(start.tensors)
        steps = PhaseSteps(self._model.backbone, start.phase)
        for batch in batches(rows, start.phase, start.key):
            steps.take(batch, self._backward(batch))
        return steps.result({})

    def _first_step(
        self, rows: Rows, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> Callable[[], dict[str, float]]:
        self._features.fill(rows)
        self._model.backbone.load(tensors)
        return partial(self._backward, batch)

    def outputs(self, tensors: Tensors, rows: Rows, z: torch.Tensor | None = None) -> npt.NDArray[np.float32]:
        """Return ``[n, 2]`` log-odds that the first response is better, equal for both orders."""
        self._features.fill(rows)
        self._model.backbone.load(tensors)
        with torch.no_grad():
            values: npt.NDArray[np.float32] = self._orders(rows).cpu().numpy()
        return values

    def _orders(self, rows: Rows) -> torch.Tensor:
        first, second = rewards(self._weights, self._features.get(rows)).unbind(1)
        return (first - second)[:, None].expand(-1, 2)

    def _backward(self, batch: Rows) -> dict[str, float]:
        """Set the gradient buffer to the gradient of the mean loss over ``batch``."""
        backbone = self._model.backbone
        backbone.grad.zero_()
        values, metrics = self._choice(self._orders(batch), batch)
        loss = values.mean()
        backward(backbone, loss)
        return {name: float(value.detach()) for name, value in {"loss": loss, **metrics}.items()}
