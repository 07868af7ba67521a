"""The bench: one frozen backbone, clients swapped in and out, phases run fast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import Key, Objective, Owner, Ownership, Phase, PhaseResult, Tensors
from prefed.losses import PPO, PairBatch, PairLoss, objective
from prefed.models import Backbone
from prefed.train.batches import batches
from prefed.train.forward import Packed, choose_forward
from prefed.train.optim import FlatOptimizer
from prefed.train.packing import PairTokens
from prefed.train.pair_cache import PairCache, Rows
from prefed.train.ppo import PPOTrainer, RolloutCache
from prefed.train.rewards import Rewards

__all__ = ["PairStore", "PairTrainer", "Scores"]

Floats = npt.NDArray[np.float32]

FEATURES = 1 << 28
"""Most elements of trunk output to hold for a phase that trains nothing in the trunk (1 GiB in fp32)."""


class PairStore(Protocol):
    """Tokenised preference pairs by row; :class:`prefed.data.TokenSet` is one."""

    def __len__(self) -> int: ...

    def pair(self, row: int) -> PairTokens:
        """Token ids of one pair."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """``[n, 3]`` tokens of prompt, chosen and rejected."""

    @property
    def margins(self) -> Floats:
        """``[n]`` the data's margin column, NaN where a record has none."""


@dataclass(frozen=True)
class Scores:
    """Summed completion log-probabilities of n pairs, in nats, chosen in column 0, rejected in 1.

    Attributes:
        policy: ``[n, 2]`` under the tensors that were scored.
        reference: ``[n, 2]`` under the untouched model.
        lengths: ``[n, 2]`` completion tokens.
        rewards: ``[n, 2]`` scores of the reward head, ``None`` where the model has none.
    """

    policy: Floats
    reference: Floats
    lengths: npt.NDArray[np.int32]
    rewards: Floats | None = None


def _cut(rows: Rows, size: int) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _some(rows: Rows) -> Rows:
    if len(rows) == 0:
        raise ValueError("there are no preference pairs to work on")
    return rows


class PairTrainer:
    """Trains and scores any client's tensors on a frozen backbone.

    Args:
        backbone: the model; this bench becomes its only user.
        tokens: all pairs; a client is a set of rows.
        cache: folder for the reference's log-probabilities; ``None`` keeps them in memory.
        name: tells apart the caches of different models and data in one folder.
        max_tokens: tokens of one forward pass; larger batches are split, with equal results.
        fast: use packed batches where the model's family allows them.
        rewards: a reward model's scores, for offline PPO.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokens: PairStore,
        *,
        cache: Path | None = None,
        name: str = "reference",
        max_tokens: int = 4096,
        fast: bool = True,
        rewards: Rewards | None = None,
    ) -> None:
        self.backbone, self.tokens, self.max_tokens = backbone, tokens, max_tokens
        lengths = tokens.lengths
        longest = int((lengths[:, 0] + lengths[:, 1:].max(1)).max()) if len(tokens) else 0
        self.forward = choose_forward(backbone, fast=fast, longest=longest)
        # Scoring looks at whole splits and training at single batches: each has its own packing.
        self._scored = PairCache(len(tokens), cache, name)
        self._trained = PairCache(len(tokens), cache, f"{name}-training")
        # Small batches cost little on a CPU, and leave other devices idle: see refer().
        self._alone = backbone.device.type == "cpu"
        self._ppo = PPOTrainer(self, rewards, cache, f"{name}-tokens")

    def train(
        self,
        tensors: Tensors,
        phase: Phase,
        rows: Rows,
        key: Key,
        ownership: Ownership,
        held: RolloutCache | None = None,
    ) -> PhaseResult:
        """Run one phase from ``tensors`` (full layout) on the pairs ``rows``.

        Batches are shuffled epoch by epoch at ``key.at("phase", phase.name)``; an epoch's last batch
        may be smaller, and a client with fewer pairs than a batch takes them all in each step. ``held`` is
        handed to all phases of a visit: offline PPO keeps there what it took at the visit's start.

        Raises:
            ValueError: the phase trains a frozen tensor, or there are no rows.
        """
        phase.check(ownership)
        if phase.objective.name == PPO.name:
            return self._ppo.train(tensors, phase, rows, key, held or RolloutCache())
        loss, key = objective(phase.objective.name), key.at("phase", phase.name)
        plan = list(batches(_some(rows), phase, key))
        wanted = rows[np.isin(rows, np.concatenate(plan))]
        if loss.needs_reference:
            self.refer(wanted, rows)
        backbone = self.backbone
        backbone.load(tensors)
        backbone.train_only(phase.train)
        optimizer = FlatOptimizer(backbone, phase)
        memory = {**loss.memory, **phase.memory}
        sums: defaultdict[str, float] = defaultdict(float)
        steps = pairs = 0
        trunk = backbone.trains_trunk(phase.train)
        features = None if trunk else self.features(wanted, loss)
        with self._training(trunk=trunk):
            for batch in plan:
                backbone.grad.zero_()
                figures: defaultdict[str, float] = defaultdict(float)
                at, whole = key.at("step", steps), len(batch) <= phase.batch_size or not loss.by_batch
                for number, part in enumerate([batch] if whole else _cut(batch, phase.batch_size)):
                    what = replace(phase.objective, settings={**phase.objective.settings, **memory})
                    own, share = at if whole else at.at("batch", number), len(part) / len(batch)
                    found = self._backward(part, loss, what, own, features, share)
                    memory = {name: found.pop(name) for name in memory}
                    for name, value in found.items():
                        figures[name] += share * value
                optimizer.add()
                figures["grad_norm"] = optimizer.step()
                for name, value in figures.items():
                    sums[name] += value
                steps, pairs = steps + 1, pairs + len(batch)
        means = {name: value / steps for name, value in sums.items()}
        moments = None if phase.moments is None else optimizer.moments(steps)
        return PhaseResult(backbone.extract(), means.pop("loss"), steps, pairs, means, memory, moments)

    def gradient(
        self,
        tensors: Tensors,
        what: Objective,
        rows: Rows,
        key: Key,
        ownership: Ownership,
        *,
        batch_size: int = 0,
    ) -> tuple[Tensors, float]:
        """Gradient (full layout, zero where frozen) and value of the mean loss over one batch of ``rows``.

        ``batch_size`` 0 takes all rows; otherwise that many are drawn without replacement at ``key``.
        """
        moving = ownership.names(Owner.SHARED, Owner.PERSONAL)
        batch = _some(rows)
        if 0 < batch_size < len(rows):
            batch = key.at("batches").numpy().choice(rows, batch_size, replace=False)
        if what.name == PPO.name:
            return self._ppo.gradient(tensors, what, rows, batch, moving)
        loss = objective(what.name)
        if loss.needs_reference:
            self.refer(batch, rows)
        self.backbone.load(tensors)
        self.backbone.train_only(moving)
        what = replace(what, settings={**loss.memory, **what.settings})
        with self._training(trunk=True):
            self.backbone.grad.zero_()
            figures = self._backward(batch, loss, what, key)
        grad = Tensors(self.backbone.layout, self.backbone.grad.to("cpu", copy=True))
        return grad, figures["loss"]

    def score(self, tensors: Tensors, rows: Rows) -> Scores:
        """Log-probabilities of ``rows`` under ``tensors`` and under the reference, without dropout."""
        self.prepare(rows)
        self.backbone.load(tensors)
        rewarded = self.backbone.reward is not None
        outputs = self._outputs(rows, rewarded)
        reference, lengths = self._scored.get(rows), self.tokens.lengths[rows, 1:]
        return Scores(outputs[:, :2], reference, lengths, outputs[:, 2:] if rewarded else None)

    def loss(self, tensors: Tensors, what: Objective, rows: Rows) -> float:
        """Mean loss over ``rows`` as one batch, without dropout."""
        if what.name == PPO.name:
            return self._ppo.loss(tensors, what, rows)
        loss = objective(what.name)
        self.prepare(rows, loss)
        self.backbone.load(tensors)
        outputs = torch.from_numpy(self._outputs(rows, loss.needs_reward))
        values, _ = loss(self._batch(outputs, rows, loss, self._scored), {**loss.memory, **what.settings})
        return float(values.mean())

    def prepare(self, rows: Rows, loss: PairLoss | None = None) -> None:
        """Have the reference's log-probabilities of ``rows`` for scoring, all computed if one lacks.

        Scoring takes a client's split whole, so its rows always go through in the same groups: no rounding
        depends on who asked first.
        """
        if (loss is None or loss.needs_reference) and self._scored.missing(_some(rows)):
            # In the packing that scoring uses, so that at the start the two are equal to the bit.
            self._scored.put(rows, self._reference([rows]))

    def refer(self, rows: Rows, held: Rows) -> None:
        """Have the reference's log-probabilities of ``rows`` for training, of no more pairs than need be.

        A pair goes through the model in a block that the client's pairs alone determine: by itself on a CPU,
        with its neighbours in ``held`` where small batches leave a device idle. So its numbers are the same
        to the bit whichever step asks first, and after a kill.

        Args:
            rows: the pairs that steps are going to take.
            held: all pairs of the client, ``rows`` among them.
        """
        if not self._trained.missing(rows):
            return
        blocks = _cut(np.unique(rows), 1) if self._alone else self.groups(np.sort(held), True)
        wanted = [block for block in blocks if np.isin(block, rows).any() and self._trained.missing(block)]
        self._trained.put(np.concatenate(wanted), self._reference(wanted))

    def _reference(self, blocks: list[Rows]) -> Floats:
        """``[n, 2]`` log-probabilities under the untouched model, of pairs that go through block by block."""
        self.backbone.load(self.backbone.reference)
        rewards = self.backbone.reward is not None
        return np.concatenate([self._outputs(block, rewards)[:, :2] for block in blocks])

    def _outputs(self, rows: Rows, rewards: bool) -> Floats:
        with torch.inference_mode():
            ownership = [
                self.forward(self.pairs(micro), rewards=rewards).cpu() for micro in self.groups(rows, True)
            ]
        return torch.cat(ownership).numpy()

    def features(self, rows: Rows, loss: PairLoss) -> dict[int, torch.Tensor] | None:
        """The trunk's output for every row, computed once for a phase that trains nothing inside it."""
        size = self.tokens.lengths[rows].sum() * self.backbone.causal.config.hidden_size
        if not isinstance(self.forward, Packed) or size > FEATURES:
            return None
        features: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for micro in self.groups(rows, loss.needs_rejected):
                held = self.forward.features(
                    self.pairs(micro), rejected=loss.needs_rejected, rewards=loss.needs_reward
                )
                features.update(zip(micro.tolist(), (part.clone() for part in held), strict=True))
        return features

    def pairs(self, rows: Rows) -> list[PairTokens]:
        """Token ids of ``rows``."""
        return [self.tokens.pair(int(row)) for row in rows]

    def groups(self, rows: Rows, rejected: bool) -> list[Rows]:
        """Consecutive groups of ``rows`` of at most ``max_tokens`` tokens (one pair at the least)."""
        cost = self.tokens.lengths[rows, : 3 if rejected else 2].sum(1)
        groups, start, total = [], 0, 0
        for end, tokens in enumerate(cost):
            if total + tokens > self.max_tokens and end > start:
                groups.append(rows[start:end])
                start, total = end, 0
            total += int(tokens)
        return [*groups, rows[start:]]

    def _batch(self, outputs: torch.Tensor, rows: Rows, loss: PairLoss, references: PairCache) -> PairBatch:
        device = outputs.device
        lengths = torch.from_numpy(self.tokens.lengths[rows, 1:].astype(np.int64)).to(device)
        reference = None
        if loss.needs_reference:
            reference = torch.from_numpy(references.get(rows)).to(device)
        return PairBatch(
            policy_chosen=outputs[:, 0],
            chosen_length=lengths[:, 0],
            policy_rejected=outputs[:, 1] if loss.needs_rejected else None,
            rejected_length=lengths[:, 1] if loss.needs_rejected else None,
            reference_chosen=None if reference is None else reference[:, 0],
            reference_rejected=None if reference is None else reference[:, 1],
            margin=torch.from_numpy(self.tokens.margins[rows]).to(device) if loss.needs_margin else None,
            reward_chosen=outputs[:, 2] if loss.needs_reward else None,
            reward_rejected=outputs[:, 3] if loss.needs_reward else None,
        )

    def _backward(
        self,
        rows: Rows,
        loss: PairLoss,
        what: Objective,
        key: Key,
        features: dict[int, torch.Tensor] | None = None,
        share: float = 1.0,
    ) -> dict[str, float]:
        """Add ``share`` of the gradient of the mean loss over ``rows`` to the gradient buffer."""
        groups = self.groups(rows, loss.needs_rejected)

        def forward(number: int) -> torch.Tensor:
            torch.manual_seed(key.at("dropout", number).number())
            pairs = self.pairs(groups[number])
            kind = {"rejected": loss.needs_rejected, "rewards": loss.needs_reward}
            if features is None:
                return self.forward(pairs, **kind)
            assert isinstance(self.forward, Packed)
            return self.forward.top(pairs, [features[int(row)] for row in groups[number]], **kind)

        if len(groups) == 1:
            outputs = forward(0)
            values, figures = loss(self._batch(outputs, rows, loss, self._trained), what.settings)
            mean = values.mean()
            (share * mean).backward()  # type: ignore[no-untyped-call]
        elif not loss.batch_statistics:
            # Each pair's loss is its own affair, and so is each group's: forward and back, once.
            seen = []
            for number, micro in enumerate(groups):
                outputs = forward(number)
                values, _ = loss(self._batch(outputs, micro, loss, self._trained), what.settings)
                (share * values.sum() / len(rows)).backward()  # type: ignore[no-untyped-call]
                seen.append(outputs.detach())
            values, figures = loss(self._batch(torch.cat(seen), rows, loss, self._trained), what.settings)
            mean = values.mean()
        else:
            # The loss sees the whole batch: its slope at every output first, then a pass for each group.
            with torch.no_grad():
                whole = torch.cat([forward(number) for number in range(len(groups))])
            whole.requires_grad_()
            values, figures = loss(self._batch(whole, rows, loss, self._trained), what.settings)
            mean = values.mean()
            (slope,) = torch.autograd.grad(share * mean, whole)
            start = 0
            for number, micro in enumerate(groups):
                forward(number).backward(slope[start : start + len(micro)])  # type: ignore[no-untyped-call]
                start += len(micro)
        return {"loss": float(mean.detach()), **{name: float(value) for name, value in figures.items()}}

    @contextmanager
    def _training(self, *, trunk: bool) -> Iterator[None]:
        devices = [self.backbone.device] if self.backbone.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            self.backbone.dropout(trunk=trunk, top=True)
            try:
                yield
            finally:
                self.backbone.dropout()
