"""Training on losses over a forward pass: log-probabilities of pairs or thumbs, or log-odds of choices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from prefed.core import Key, Objective, PhaseResult, Tensors
from prefed.models import Backbone
from prefed.train.forward_passes import Features
from prefed.train.losses import LossOutput, PairLoss, find_objective
from prefed.train.optimizer_steps import PhaseSteps, backward, dropout, grouped_outputs
from prefed.train.packed import PackedForward
from prefed.train.pair_cache import Rows, split_rows
from prefed.train.trainers import ObjectiveTrainer, PhaseStart

if TYPE_CHECKING:
    from prefed.models.stacked_lora import Stack


@dataclass
class _Member:
    """A client's phase among those that share passes."""

    start: PhaseStart
    backbone: Backbone
    steps: PhaseSteps
    memory: dict[str, float]


class LossTrainer(ObjectiveTrainer):
    """Trains on the losses in :data:`prefed.train.losses.OBJECTIVES`, and on choices."""

    def train(self, start: PhaseStart) -> PhaseResult:
        """Run a phase."""
        phase, rows, key = start.phase, start.visit.rows, start.key
        loss = _loss(phase.objective)
        plan = [self._parts(batch, loss, phase.batch_size) for batch in start.plan]
        self._fill(loss, [part for parts in plan for part in parts], rows)
        backbone = self._model.backbone
        backbone.load(start.tensors)
        steps = PhaseSteps(backbone, phase)
        memory = {**loss.memory, **phase.memory}
        trunk = backbone.trains_trunk(phase.train)
        features = None
        if not trunk and loss.feedback.pairing is None:
            used = rows[np.isin(rows, np.concatenate([part for parts in plan for part in parts]))]
            features = self._model.features(used, rejected=loss.needs_rejected, rewards=loss.needs_reward)
        with dropout(backbone, trunk=trunk):
            for parts in plan:
                backbone.grad.zero_()
                metrics: defaultdict[str, float] = defaultdict(float)
                batch = np.concatenate(parts)
                for number, part in enumerate(parts):
                    step = key.at("step", steps.count)
                    part_key, share = step.at("batch", number) if parts[1:] else step, len(part) / len(batch)
                    settings = {**phase.objective.settings, **memory}
                    part_metrics = self._backward(part, loss, settings, part_key, features, share)
                    memory = {name: part_metrics.pop(name) for name in memory}
                    for name, value in part_metrics.items():
                        metrics[name] += share * value
                steps.take(batch, metrics)
        return steps.result(memory)

    def shared_tokens(self, start: PhaseStart) -> int | None:
        """Return the tokens of a phase's longest step; ``None`` if it cannot share passes with others.

        It can if each of its steps is a single pass that needs log-probabilities of pairs only. Recomputed
        blocks would draw other dropout masks than the first time.
        """
        phase, model = start.phase, self._model
        loss, config = _loss(phase.objective), model.backbone.config
        other = loss.feedback.pairing is not None or loss.needs_reward or phase.auxiliary is not None
        if other or (config.checkpointing and config.lora.dropout):
            return None
        longest = 0
        for batch in start.plan:
            groups = model.groups(batch, rejected=loss.needs_rejected)
            if groups[1:] or self._parts(batch, loss, phase.batch_size)[1:]:
                return None
            longest = max(longest, int(model.tokens.lengths[batch].sum()))
        return longest

    def train_together(self, starts: Sequence[PhaseStart]) -> list[PhaseResult]:
        """Run phases of several clients, a step of each in one pass, with the results of :meth:`train`.

        They train the same tensors on the same objective, and :meth:`shared_tokens` has a value for each.
        """
        from prefed.models.stacked_lora import Stack

        shared, first = self._model.backbone, starts[0].phase
        loss, stack = _loss(first.objective), Stack(shared, len(starts))
        members: dict[int, _Member] = {}
        # The clients that still train are always the first members.
        for number, start in sorted(enumerate(starts), key=lambda item: -len(item[1].plan)):
            self._fill(loss, start.plan, start.visit.rows)
            backbone = stack.members[len(members)]
            backbone.load(start.tensors)
            steps = PhaseSteps(backbone, start.phase)
            members[number] = _Member(start, backbone, steps, {**loss.memory, **start.phase.memory})
        with dropout(shared, trunk=True), stack.applied():
            for step in range(max(len(start.plan) for start in starts)):
                live = [member for member in members.values() if step < len(member.start.plan)]
                keys = (member.start.key.at("step", step).at("dropout", 0) for member in live)
                seeds = [key.number() for key in keys if shared.config.lora.dropout]
                stack.train_first(len(live), first.train, seeds)
                self._step_together(loss, stack, live, step)
        return [members[number].steps.result(members[number].memory) for number in range(len(starts))]

    def _step_together(self, loss: PairLoss, stack: Stack, members: Sequence[_Member], step: int) -> None:
        """Take a step of each of the stack's first members."""
        model, parts = self._model, [member.start.plan[step] for member in members]
        assert isinstance(model.forward, PackedForward)
        counts, rejected = [len(part) for part in parts], loss.needs_rejected
        outputs = model.forward.stacked(model.pairs(np.concatenate(parts)), counts, stack, rejected=rejected)
        means, found = list[torch.Tensor](), list[dict[str, torch.Tensor]]()
        for member, part, output in zip(members, parts, torch.split(outputs, counts), strict=True):
            settings = {**member.start.phase.objective.settings, **member.memory}
            values, metrics = self._losses(loss, output, part, settings)
            means.append(values.mean())
            found.append(metrics)
        scaled = [member.backbone.loss_scale * mean for member, mean in zip(members, means, strict=True)]
        torch.autograd.backward(scaled)
        for member, part, mean, metrics in zip(members, parts, means, found, strict=True):
            numbers = {name: float(value) for name, value in {"loss": mean.detach(), **metrics}.items()}
            member.memory = {name: numbers.pop(name) for name in member.memory}
            member.steps.take(part, numbers)

    def _first_step(
        self, rows: Rows, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> Callable[[], dict[str, float]]:
        loss, backbone = _loss(objective), self._model.backbone
        (part,) = self._parts(batch, loss, len(batch))
        self._fill(loss, [part], rows)
        backbone.load(tensors)

        def step() -> dict[str, float]:
            with dropout(backbone, trunk=True):
                return self._backward(part, loss, {**loss.memory, **objective.settings}, key)

        return step

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the mean loss over ``rows`` as one batch, without dropout."""
        loss = _loss(objective)
        (part,) = self._parts(rows, loss, len(rows))
        reference = self._references.for_scoring(part) if loss.needs_reference else None
        self._model.backbone.load(tensors)
        outputs = torch.from_numpy(self._model.outputs(part, rewards=loss.needs_reward))
        batch = loss.feedback.batch(self._model, part, outputs, reference, loss)
        values, _ = loss(batch, {**loss.memory, **objective.settings})
        return float(values.mean())

    def _parts(self, batch: Rows, loss: PairLoss, size: int) -> list[Rows]:
        """Split the rows of a step into batches that have their own statistics."""
        parts = split_rows(batch, size) if loss.by_batch else [batch]
        return [loss.feedback.together(part) for part in parts]

    def _fill(self, loss: PairLoss, parts: list[Rows], rows: Rows) -> None:
        """Compute the reference log-probabilities of ``parts`` of a visit to ``rows``."""
        if loss.needs_reference:
            self._references.fill(parts, rows)

    def _losses(
        self, loss: PairLoss, outputs: torch.Tensor, rows: Rows, settings: Mapping[str, float]
    ) -> LossOutput:
        """Return the losses of ``rows`` in a step, for which :meth:`_fill` was called."""
        reference = self._references.get(rows) if loss.needs_reference else None
        return loss(loss.feedback.batch(self._model, rows, outputs, reference, loss), settings)

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
            key.at("dropout", number).seed_device(model.backbone.device.type)
            if features is None:
                return model.run(groups[number], rejected=loss.needs_rejected, rewards=loss.needs_reward)
            assert isinstance(model.forward, PackedForward)
            pairs = model.pairs(groups[number])
            trunk = [features[int(row)] for row in groups[number]]
            return model.forward.top(pairs, trunk, rejected=loss.needs_rejected, rewards=loss.needs_reward)

        if len(groups) == 1:
            values, metrics = self._losses(loss, forward(0), rows, settings)
            backward(model.backbone, share * values.mean())
        elif not loss.batch_statistics:
            # The loss of a pair depends only on that pair, so each group runs forward and backward once.
            outputs = []
            for number, group in enumerate(groups):
                part = forward(number)
                values, _ = self._losses(loss, part, group, settings)
                backward(model.backbone, share * values.sum() / len(rows))
                outputs.append(part.detach())
            values, metrics = self._losses(loss, torch.cat(outputs), rows, settings)
        else:
            # The loss of a pair depends on the whole batch.
            whole, finish = grouped_outputs(forward, groups)
            values, metrics = self._losses(loss, whole, rows, settings)
            backward(model.backbone, share * values.mean())
            finish()
        mean = float(values.detach().mean())
        return {"loss": mean, **{name: float(value) for name, value in metrics.items()}}


def _loss(objective: Objective) -> PairLoss:
    loss = find_objective(objective.name)
    assert isinstance(loss, PairLoss)
    return loss
