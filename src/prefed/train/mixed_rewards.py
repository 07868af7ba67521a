"""Training of the shared rewards of LoRe and PAL, and of a client's mixture of them, on hidden states.

The loss of a pair is that of Bradley and Terry, −log σ(r(chosen) − r(rejected)), with the rewards of
:mod:`prefed.models.mixed_rewards`. The language model runs once per pair; see
:class:`~prefed.train.tastes.ResponseFeatures`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import Key, Objective, Owner, Phase, PhaseResult, Tensors
from prefed.models.mixed_rewards import rewards
from prefed.train.losses import CHOICE, MIXED, ChoiceBatch
from prefed.train.optimizer_steps import PhaseSteps, Visit, backward, batches, read_gradient
from prefed.train.pair_cache import Rows
from prefed.train.pair_model import PairModel
from prefed.train.tastes import ResponseFeatures


class MixedRewardTrainer:
    """Trains on the objective ``mixed``, and computes log-odds from rewards."""

    def __init__(self, model: PairModel, features: ResponseFeatures) -> None:
        self._model, self._features = model, features
        self._weights: Mapping[str, torch.Tensor] = model.backbone.parameters

    def train(self, visit: Visit, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run ``phase`` from ``tensors``; its metrics are ``accuracy`` and ``margin``, means over the steps.

        With ``pairs`` in the settings of the objective, the batches are of that many pairs of the visit,
        drawn at its key.
        """
        few = int(MIXED.resolve(phase.objective.settings)["pairs"])
        rows = visit.rows
        self._features.fill(rows)
        if few:
            rows = visit.key.at("pairs").numpy().permutation(np.sort(rows))[:few]
        self._model.backbone.load(tensors)
        steps = PhaseSteps(self._model.backbone, phase)
        for batch in batches(rows, phase, visit.key.at("phase", phase.name)):
            steps.take(batch, self._backward(batch))
        return steps.result({})

    def gradient(
        self, visit: Visit, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> tuple[Tensors, float]:
        """Return gradient and value of the mean loss over ``batch``, a subset of the visit's pairs."""
        backbone = self._model.backbone
        self._features.fill(visit.rows)
        backbone.load(tensors)
        backbone.train_only(visit.ownership.names(Owner.SHARED, Owner.PERSONAL))
        loss = self._backward(batch)["loss"]
        return read_gradient(backbone), loss

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the mean loss over ``rows``."""
        orders = torch.from_numpy(self.orders(tensors, rows))
        values, _ = CHOICE(ChoiceBatch(orders, torch.from_numpy(self._model.signs(rows))))
        return float(values.mean())

    def orders(self, tensors: Tensors, rows: Rows) -> npt.NDArray[np.float32]:
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
        signs = torch.from_numpy(self._model.signs(batch)).to(backbone.device)
        values, metrics = CHOICE(ChoiceBatch(self._orders(batch), signs))
        loss = values.mean()
        backward(backbone, loss)
        return {name: float(value.detach()) for name, value in {"loss": loss, **metrics}.items()}
