"""Training on losses over log-probabilities or log-odds of pairs, or over log-probabilities of thumbs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import Key, Objective, Owner, Phase, PhaseResult, Tensors
from prefed.data.tokens import thumbs
from prefed.models import Backbone
from prefed.train.losses import CHOICE, ChoiceBatch, PairBatch, PairLoss, ThumbBatch, reads_thumbs
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
from prefed.train.pair_cache import Rows, mismatched, split_rows
from prefed.train.pair_model import Features, PairModel, ReferenceLogprobs

if TYPE_CHECKING:
    from prefed.models.stacked_lora import Stack


@dataclass(frozen=True)
class PhaseStart:
    """A phase of a visit and the tensors (full layout) that it starts from."""

    visit: Visit
    tensors: Tensors
    phase: Phase

    @property
    def key(self) -> Key:
        """Random key of the phase."""
        return self.visit.key.at("phase", self.phase.name)

    @cached_property
    def plan(self) -> list[Rows]:
        """Rows of each step."""
        return list(batches(self.visit.rows, self.phase, self.key))


SHARED_TRAINING: ContextVar[Callable[[PhaseStart], PhaseResult] | None] = ContextVar(
    "shared_training", default=None
)
"""Trains a phase of this thread's visit in lockstep with other clients'; ``None``: phases train alone."""


@dataclass
class _Member:
    """A client's phase among those that share passes."""

    start: PhaseStart
    backbone: Backbone
    steps: PhaseSteps
    memory: dict[str, float]


class LossTrainer:
    """Trains on the objectives on pairs in :data:`prefed.train.losses.OBJECTIVES`."""

    def __init__(self, model: PairModel, references: ReferenceLogprobs) -> None:
        self._model, self._references = model, references

    def train(self, visit: Visit, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run ``phase`` from ``tensors``."""
        rows = visit.rows
        loss = self._find(phase.objective, rows)
        key = visit.key.at("phase", phase.name)
        plan = [self._parts(batch, loss, phase.batch_size) for batch in batches(rows, phase, key)]
        self._fill(loss, [part for parts in plan for part in parts], rows)
        backbone = self._model.backbone
        backbone.load(tensors)
        steps = PhaseSteps(backbone, phase)
        memory = {**loss.memory, **phase.memory}
        trunk = backbone.trains_trunk(phase.train)
        features = None
        if not trunk and not loss.unpaired:
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
        loss, config = self._find(phase.objective, start.visit.rows), model.backbone.config
        other = loss.unpaired or loss.needs_reward or phase.auxiliary is not None
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
        loss, stack = self._find(first.objective, starts[0].visit.rows), Stack(shared, len(starts))
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
            reference = self._reference(part) if loss.needs_reference else None
            settings = {**member.start.phase.objective.settings, **member.memory}
            values, metrics = loss(self._batch(output, part, loss, reference), settings)
            means.append(values.mean())
            found.append(metrics)
        scaled = [member.backbone.loss_scale * mean for member, mean in zip(members, means, strict=True)]
        torch.autograd.backward(scaled)
        for member, part, mean, metrics in zip(members, parts, means, found, strict=True):
            numbers = {name: float(value) for name, value in {"loss": mean.detach(), **metrics}.items()}
            member.memory = {name: numbers.pop(name) for name in member.memory}
            member.steps.take(part, numbers)

    def gradient(
        self, visit: Visit, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> tuple[Tensors, float]:
        """Return gradient and value of the mean loss over ``batch``, a subset of the visit's pairs."""
        loss, backbone = self._find(objective, batch), self._model.backbone
        (part,) = self._parts(batch, loss, len(batch))
        self._fill(loss, [part], visit.rows)
        backbone.load(tensors)
        backbone.train_only(visit.ownership.names(Owner.SHARED, Owner.PERSONAL))
        with dropout(backbone, trunk=True):
            backbone.grad.zero_()
            metrics = self._backward(part, loss, {**loss.memory, **objective.settings}, key)
        return read_gradient(backbone), metrics["loss"]

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the mean loss over ``rows`` as one batch, without dropout."""
        loss = self._find(objective, rows)
        (part,) = self._parts(rows, loss, len(rows))
        reference = self._scoring_reference(part) if loss.needs_reference else None
        self._model.backbone.load(tensors)
        outputs = torch.from_numpy(self._model.outputs(part, rewards=loss.needs_reward))
        values, _ = loss(self._batch(outputs, part, loss, reference), {**loss.memory, **objective.settings})
        return float(values.mean())

    def _find(self, objective: Objective, rows: Rows) -> PairLoss:
        """Return the loss of an objective that can train on ``rows``."""
        check_feedback(
            f"objective {objective.name!r}",
            reads_thumbs(objective.name),
            thumbs(self._model.tokens.lengths[rows]),
        )
        return find_loss(objective.name)

    def _parts(self, batch: Rows, loss: PairLoss, size: int) -> list[Rows]:
        """Split the rows of a step into batches that have their own statistics."""
        return split_rows(batch, size) if loss.by_batch else [batch]

    def _fill(self, loss: PairLoss, parts: list[Rows], rows: Rows) -> None:
        """Compute the reference log-probabilities of ``parts`` of a visit to ``rows``."""
        if loss.needs_reference:
            self._references.fill_training(np.concatenate(parts), rows)

    def _reference(self, part: Rows) -> npt.NDArray[np.float32]:
        """Return ``[n, 2]`` log-probabilities computed by :meth:`_fill`."""
        return self._references.training.get(part)

    def _scoring_reference(self, part: Rows) -> npt.NDArray[np.float32]:
        self._references.fill_scoring(part)
        return self._references.scoring.get(part)

    def _batch(
        self, outputs: torch.Tensor, rows: Rows, loss: PairLoss, reference: npt.NDArray[np.float32] | None
    ) -> PairBatch | ThumbBatch | ChoiceBatch:
        """Build the input of ``loss`` from model ``outputs`` and ``reference`` for ``rows``."""
        tokens, device = self._model.tokens, outputs.device
        lengths = torch.from_numpy(tokens.lengths[rows, 1:].astype(np.int64)).to(device)
        known = None if reference is None else torch.from_numpy(reference).to(device)
        return PairBatch(
            policy_chosen=outputs[:, 0],
            chosen_length=lengths[:, 0],
            policy_rejected=outputs[:, 1] if loss.needs_rejected else None,
            rejected_length=lengths[:, 1] if loss.needs_rejected else None,
            reference_chosen=None if known is None else known[:, 0],
            reference_rejected=None if known is None else known[:, 1],
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
            reference = self._reference(rows) if loss.needs_reference else None
            return loss(self._batch(outputs, rows, loss, reference), settings)

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


class ThumbTrainer(LossTrainer):
    """Trains on objectives that read thumbs.

    Each batch passes through the model as pairs of a response and the next response of the batch, so both
    share a prompt. The reference does too, at the start of a phase: as batches are drawn anew, its outputs
    are not cached.
    """

    def __init__(self, model: PairModel, references: ReferenceLogprobs) -> None:
        super().__init__(model, references)
        self._known: dict[bytes, npt.NDArray[np.float32]] = {}

    def _parts(self, batch: Rows, loss: PairLoss, size: int) -> list[Rows]:
        return [mismatched(part) for part in super()._parts(batch, loss, size)]

    def _fill(self, loss: PairLoss, parts: list[Rows], rows: Rows) -> None:
        self._known = {part.tobytes(): self._references.mismatched(part) for part in parts}

    def _reference(self, part: Rows) -> npt.NDArray[np.float32]:
        return self._known[part.tobytes()]

    def _scoring_reference(self, part: Rows) -> npt.NDArray[np.float32]:
        return self._references.scoring_mismatched(part)

    def _batch(
        self, outputs: torch.Tensor, rows: Rows, loss: PairLoss, reference: npt.NDArray[np.float32] | None
    ) -> ThumbBatch:
        known = torch.from_numpy(reference).to(outputs.device)
        up = torch.from_numpy(thumbs(self._model.tokens.lengths[rows[:, 0]]) > 0).to(outputs.device)
        ratio = outputs[:, 1].detach() - known[:, 1]
        # A batch of one has no mismatched response.
        ratio = ratio if len(rows) > 1 else torch.zeros_like(ratio)
        return ThumbBatch(outputs[:, 0], known[:, 0], ratio, up)


def check_feedback(what: str, unpaired: bool, labels: npt.NDArray[np.int8]) -> None:
    """Check that what trains can train on rows with these thumbs (:func:`prefed.data.tokens.thumbs`).

    Args:
        what: the method or objective, for messages.
        unpaired: whether it trains on thumbs.

    Raises:
        ValueError: it trains on pairs, and these are thumbs, or the reverse.
    """
    if unpaired and not labels.all():
        raise ValueError(
            f"{what} trains on thumbs, but the training data are pairs; use 'kto_pair', or read "
            'every pair as two thumbs with [data] format = "thumbs"'
        )
    if not unpaired and labels.any():
        raise ValueError(
            f"{what} trains on pairs, but the training data are thumbs, with one response per row; use "
            "objective = 'kto' and a method with this setting, such as feddpo"
        )


class ChoiceTrainer(LossTrainer):
    """Trains on :data:`prefed.train.losses.CHOICE`. Other objectives raise ``ValueError``."""

    def _find(self, objective: Objective, rows: Rows) -> PairLoss:
        if objective.name != CHOICE.name:
            raise ValueError(
                f"objective {objective.name!r} cannot train a selector; use objective {CHOICE.name!r}"
            )
        return CHOICE

    def _batch(
        self, outputs: torch.Tensor, rows: Rows, loss: PairLoss, reference: npt.NDArray[np.float32] | None
    ) -> ChoiceBatch:
        return ChoiceBatch(outputs, torch.from_numpy(self._model.signs(rows)).to(outputs.device))
