"""Training on losses over log-probabilities or log-odds of pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch

from prefed.core import Key, Objective, Owner, Phase, PhaseResult, Tensors
from prefed.train.losses import CHOICE, ChoiceBatch, PairBatch, PairLoss
from prefed.train.losses import objective as find_loss
from prefed.train.optimizer_steps import (
    PhaseSteps,
    Visit,
    backward,
    batches,
    dropout,
    grouped_outputs,
    read_gradient,
)
from prefed.train.packed import PackedForward
from prefed.train.pair_cache import PairScoreCache, Rows, split_rows
from prefed.train.pair_model import Features, PairModel, ReferenceLogprobs


class LossTrainer:
    """Trains on the objectives in :data:`prefed.train.losses.OBJECTIVES`."""

    def __init__(self, model: PairModel, references: ReferenceLogprobs) -> None:
        self._model, self._references = model, references

    def train(self, visit: Visit, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run ``phase`` from ``tensors``."""
        loss, rows = self._find(phase.objective), visit.rows
        key = visit.key.at("phase", phase.name)
        plan = list(batches(rows, phase, key))
        used = rows[np.isin(rows, np.concatenate(plan))]
        if loss.needs_reference:
            self._references.fill_training(used, rows)
        backbone = self._model.backbone
        backbone.load(tensors)
        steps = PhaseSteps(backbone, phase)
        memory = {**loss.memory, **phase.memory}
        trunk = backbone.trains_trunk(phase.train)
        features = None
        if not trunk:
            features = self._model.features(used, rejected=loss.needs_rejected, rewards=loss.needs_reward)
        with dropout(backbone, trunk=trunk):
            for batch in plan:
                backbone.grad.zero_()
                metrics: defaultdict[str, float] = defaultdict(float)
                whole = len(batch) <= phase.batch_size or not loss.by_batch
                for number, part in enumerate([batch] if whole else split_rows(batch, phase.batch_size)):
                    step = key.at("step", steps.count)
                    part_key, share = step if whole else step.at("batch", number), len(part) / len(batch)
                    settings = {**phase.objective.settings, **memory}
                    part_metrics = self._backward(part, loss, settings, part_key, features, share)
                    memory = {name: part_metrics.pop(name) for name in memory}
                    for name, value in part_metrics.items():
                        metrics[name] += share * value
                steps.take(batch, metrics)
        return steps.result(memory)

    def gradient(
        self, visit: Visit, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> tuple[Tensors, float]:
        """Return gradient and value of the mean loss over ``batch``, a subset of the visit's pairs."""
        loss, backbone = self._find(objective), self._model.backbone
        if loss.needs_reference:
            self._references.fill_training(batch, visit.rows)
        backbone.load(tensors)
        backbone.train_only(visit.ownership.names(Owner.SHARED, Owner.PERSONAL))
        with dropout(backbone, trunk=True):
            backbone.grad.zero_()
            metrics = self._backward(batch, loss, {**loss.memory, **objective.settings}, key)
        return read_gradient(backbone), metrics["loss"]

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the mean loss over ``rows`` as one batch, without dropout."""
        loss = self._find(objective)
        if loss.needs_reference:
            self._references.fill_scoring(rows)
        self._model.backbone.load(tensors)
        outputs = torch.from_numpy(self._model.outputs(rows, rewards=loss.needs_reward))
        batch = self._batch(outputs, rows, loss, self._references.scoring)
        values, _ = loss(batch, {**loss.memory, **objective.settings})
        return float(values.mean())

    def _find(self, objective: Objective) -> PairLoss:
        return find_loss(objective.name)

    def _batch(
        self, outputs: torch.Tensor, rows: Rows, loss: PairLoss, references: PairScoreCache
    ) -> PairBatch | ChoiceBatch:
        """Build the input of ``loss`` from model ``outputs`` for ``rows``."""
        tokens, device = self._model.tokens, outputs.device
        lengths = torch.from_numpy(tokens.lengths[rows, 1:].astype(np.int64)).to(device)
        reference = torch.from_numpy(references.get(rows)).to(device) if loss.needs_reference else None
        return PairBatch(
            policy_chosen=outputs[:, 0],
            chosen_length=lengths[:, 0],
            policy_rejected=outputs[:, 1] if loss.needs_rejected else None,
            rejected_length=lengths[:, 1] if loss.needs_rejected else None,
            reference_chosen=None if reference is None else reference[:, 0],
            reference_rejected=None if reference is None else reference[:, 1],
            margin=torch.from_numpy(tokens.margins[rows]).to(device) if loss.needs_margin else None,
            reward_chosen=outputs[:, 2] if loss.needs_reward else None,
            reward_rejected=outputs[:, 3] if loss.needs_reward else None,
        )

    def _backward(
        self,
        rows: Rows,
        loss: PairLoss,
        settings: Mapping[str, float],
        key: Key,
        features: Features | None = None,
        share: float = 1.0,
    ) -> dict[str, float]:
        """Add ``share`` of the gradient of the mean loss over ``rows`` to the gradient buffer."""
        model = self._model
        groups = model.groups(rows, rejected=loss.needs_rejected)

        def forward(number: int) -> torch.Tensor:
            torch.manual_seed(key.at("dropout", number).number())
            if features is None:
                return model.run(groups[number], rejected=loss.needs_rejected, rewards=loss.needs_reward)
            assert isinstance(model.forward, PackedForward)
            pairs = model.pairs(groups[number])
            trunk = [features[int(row)] for row in groups[number]]
            return model.forward.top(pairs, trunk, rejected=loss.needs_rejected, rewards=loss.needs_reward)

        def losses(outputs: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return loss(self._batch(outputs, rows, loss, self._references.training), settings)

        if len(groups) == 1:
            values, metrics = losses(forward(0), rows)
            backward(model.backbone, share * values.mean())
        elif not loss.batch_statistics:
            # The loss of a pair depends only on that pair, so each group runs forward and backward once.
            outputs = []
            for number, group in enumerate(groups):
                part = forward(number)
                values, _ = losses(part, group)
                backward(model.backbone, share * values.sum() / len(rows))
                outputs.append(part.detach())
            values, metrics = losses(torch.cat(outputs), rows)
        else:
            # The loss of a pair depends on the whole batch.
            whole, finish = grouped_outputs(forward, groups)
            values, metrics = losses(whole, rows)
            backward(model.backbone, share * values.mean())
            finish()
        mean = float(values.detach().mean())
        return {"loss": mean, **{name: float(value) for name, value in metrics.items()}}


class ChoiceTrainer(LossTrainer):
    """Trains on :data:`prefed.train.losses.CHOICE`. Other objectives raise ``ValueError``."""

    def _find(self, objective: Objective) -> PairLoss:
        if objective.name != CHOICE.name:
            raise ValueError(
                f"objective {objective.name!r} cannot train a selector; use objective {CHOICE.name!r}"
            )
        return CHOICE

    def _batch(
        self, outputs: torch.Tensor, rows: Rows, loss: PairLoss, references: PairScoreCache
    ) -> ChoiceBatch:
        return ChoiceBatch(outputs, torch.from_numpy(self._model.signs(rows)).to(outputs.device))
