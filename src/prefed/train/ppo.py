"""A visit's offline PPO on preference pairs (see :mod:`prefed.losses.ppo`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from prefed.core import Key, Objective, Phase, PhaseResult, Tensors
from prefed.losses import OBJECTIVES, PPO
from prefed.losses.ppo import KL_TOLERANCE, Rollout, pair_rewards, ppo, rollout, standardize
from prefed.models import ModelError
from prefed.train.batches import batches
from prefed.train.optim import FlatOptimizer
from prefed.train.pair_cache import Rows
from prefed.train.rewards import Rewards
from prefed.train.token_cache import TokenCache
from prefed.train.tokenwise import TokenView, view

if TYPE_CHECKING:
    from prefed.train.pair_trainer import PairTrainer

__all__ = ["PPOTrainer", "RolloutCache"]

Features = dict[int, torch.Tensor]


@dataclass(frozen=True)
class _Start:
    """What a visit's start leaves for its steps.

    Attributes:
        tokens: all completion tokens of the rows.
        where: row → its tokens.
    """

    tokens: Rollout
    where: Mapping[int, torch.Tensor]

    def of(self, rows: Rows) -> Rollout:
        """The tokens of ``rows``, in their order."""
        return self.tokens.take(torch.cat([self.where[int(row)] for row in rows]))


@dataclass
class RolloutCache:
    """What a visit's phases have in common: π_old and all that follows from it, once it is there."""

    start: _Start | None = None


class PPOTrainer:
    """Runs the phases whose objective is ``ppo``.

    A phase's epochs and batches are those of its PPO: with ``batch_size`` 2, minibatches of four sequences.
    Dropout is off throughout, for the ratio π/π_old would otherwise measure its masks.

    Args:
        bench: whose model and pairs they are.
        rewards: scores of a reward model.
        cache: folder for the reference's log-probabilities; ``None`` keeps them in memory.
        name: of what is kept there.
    """

    def __init__(
        self, pair_trainer: PairTrainer, rewards: Rewards | None, cache: Path | None, name: str
    ) -> None:
        self._bench, self._rewards = pair_trainer, rewards
        self._cache, self._name = cache, name

    @cached_property
    def _reference(self) -> TokenCache:
        tokens = self._bench.tokens.lengths[:, 1:].sum(1, dtype=np.int64)
        return TokenCache(tokens, self._cache, self._name)

    def train(self, tensors: Tensors, phase: Phase, rows: Rows, key: Key, held: RolloutCache) -> PhaseResult:
        """Run ``phase`` from ``tensors`` on ``rows``; see :meth:`prefed.train.PairTrainer.train`.

        The policy that the visit's first phase starts from is π_old, in later ones too. A phase ends early
        before a step on a batch over which the mean of ρ − 1 − log ρ is above 1.5 times ``target_kl``.

        Returns:
            Its figures are means over the steps, save ``stopped``: 1 if it ended early.

        Raises:
            ModelError: there is no reward model, or the model has no critic.
            ValueError: there are no rows.
        """
        settings = PPO.resolve(phase.objective.settings)
        backbone, key = self._bench.backbone, key.at("phase", phase.name)
        scores = self._scores(rows)
        plan = list(batches(rows, phase, key))
        self._load(tensors, rows, rows, settings)
        # The visit's start goes through all rows, a later phase through those that it takes.
        wanted = rows if held.start is None else rows[np.isin(rows, np.concatenate(plan))]
        inside = backbone.trains_trunk(phase.train)
        features = None if inside else self._bench.features(wanted, OBJECTIVES["dpo"])
        held.start = start = held.start or self._begin(rows, scores, settings, features)
        backbone.train_only(phase.train)
        optimizer = FlatOptimizer(backbone, phase)
        sums: defaultdict[str, float] = defaultdict(float)
        steps = pairs = 0
        stopped = False
        for batch in plan:
            backbone.grad.zero_()
            figures = self._backward(batch, start, settings, features)
            bound = KL_TOLERANCE * settings["target_kl"]
            # Written so that a mean that is no number stops it too.
            if bound and not figures["kl"] <= bound:
                stopped = True
                if not steps:
                    sums.update(figures)
                break
            optimizer.add()
            figures["grad_norm"] = optimizer.step()
            for name, value in figures.items():
                sums[name] += value
            steps, pairs = steps + 1, pairs + len(batch)
        means = {name: value / max(steps, 1) for name, value in sums.items()} | {"stopped": float(stopped)}
        moments = None if phase.moments is None else optimizer.moments(steps)
        return PhaseResult(backbone.extract(), means.pop("loss", 0.0), steps, pairs, means, moments=moments)

    def gradient(
        self, tensors: Tensors, what: Objective, rows: Rows, batch: Rows, train: Iterable[str]
    ) -> tuple[Tensors, float]:
        """Gradient and value of the loss of a first step on ``batch``, of a client with the pairs ``rows``.

        Args:
            tensors: full layout; the policy that they make is π_old.
            what: objective ``ppo`` with its settings.
            rows: the client's pairs, over which its rewards are standardised.
            batch: those of them to take.
            train: names of the tensors to take the gradient in.
        """
        settings = PPO.resolve(what.settings)
        self._load(tensors, batch, rows, settings)
        taken = np.isin(rows, batch)
        scores = self._scores(rows)[torch.from_numpy(taken)]
        start = self._begin(rows[taken], scores, settings, None)
        backbone = self._bench.backbone
        backbone.train_only(train)
        backbone.grad.zero_()
        figures = self._backward(batch, start, settings, None)
        return Tensors(backbone.layout, backbone.grad.to("cpu", copy=True)), figures["loss"]

    def loss(self, tensors: Tensors, what: Objective, rows: Rows) -> float:
        """The loss of a first step on all ``rows``."""
        return self.gradient(tensors, what, rows, rows, ())[1]

    def _scores(self, rows: Rows) -> torch.Tensor:
        """``[n, 2]`` rewards R of the responses."""
        if len(rows) == 0:
            raise ValueError("there are no preference pairs to work on")
        if self._rewards is None:
            raise ModelError("objective 'ppo' needs a reward model: give its folder as [method] reward_model")
        if "value/weight" not in self._bench.backbone.layout:
            raise ModelError("objective 'ppo' needs a critic: the model was loaded without the part 'value'")
        return pair_rewards(standardize(torch.from_numpy(self._rewards.get(rows))))

    def _load(self, tensors: Tensors, rows: Rows, held: Rows, settings: Mapping[str, float]) -> None:
        """Have log π_ref of ``rows``, and ``tensors`` in the model, nothing of them training yet."""
        if settings["kl"]:
            self.refer(rows, held)
        self._bench.backbone.load(tensors)
        self._bench.backbone.train_only(())

    def _begin(
        self, rows: Rows, rewards: torch.Tensor, settings: Mapping[str, float], features: Features | None
    ) -> _Start:
        """What the model that is loaded, as π_old, says of ``rows`` with rewards ``[n, 2]``."""
        now = self._views(rows, features)
        reference = now.logprobs
        if settings["kl"]:
            reference = torch.from_numpy(self._reference.get(rows))
        lengths = torch.from_numpy(self._bench.tokens.lengths[rows, 1:].reshape(-1).astype(np.int64))
        shape = {name: settings[name] for name in ("kl", "discount", "trace", "scaled")}
        tokens = rollout(
            now.logprobs,
            now.values,
            reference,
            rewards.reshape(-1),
            lengths,
            **shape,
        )
        stretches = torch.split(torch.arange(len(now.logprobs)), lengths.view(-1, 2).sum(1).tolist())
        return _Start(tokens, dict(zip(rows.tolist(), stretches, strict=True)))

    def refer(self, rows: Rows, held: Rows) -> None:
        """Have log π_ref of every token of ``rows``, of no more pairs than need be.

        A pair goes through the model in a group that the client's pairs alone determine. A visit's start
        takes them in the same groups, so that there two equal policies give equal bits. What a group gave is
        kept before the next begins.

        Args:
            rows: the pairs whose tokens are going to be read.
            held: all pairs of the client, ``rows`` among them.
        """
        if not self._reference.missing(rows):
            return
        backbone = self._bench.backbone
        backbone.load(backbone.reference)
        backbone.train_only(())
        for group in self._bench.groups(held, True):
            if np.isin(group, rows).any() and self._reference.missing(group):
                with torch.no_grad():
                    self._reference.put(group, self._view(group, None).logprobs.cpu().numpy())

    def _views(self, rows: Rows, features: Features | None) -> TokenView:
        """All completion tokens of ``rows`` as the model sees them now, without gradient, on the CPU."""
        with torch.no_grad():
            parts = [self._view(group, features) for group in self._bench.groups(rows, True)]
        columns = (
            [getattr(part, name).cpu() for part in parts] for name in ("logprobs", "values", "entropies")
        )
        return TokenView(*(torch.cat(column) for column in columns))

    def _view(self, rows: Rows, features: Features | None) -> TokenView:
        pair_trainer = self._bench
        held = None if features is None else [features[int(row)] for row in rows]
        return view(pair_trainer.backbone, pair_trainer.forward, pair_trainer.pairs(rows), held)

    def _backward(
        self, rows: Rows, start: _Start, settings: Mapping[str, float], features: Features | None
    ) -> dict[str, float]:
        """Add the gradient of the loss over ``rows`` to the gradient buffer."""
        pair_trainer = self._bench
        shape = {name: settings[name] for name in ("clip", "value", "entropy")}
        total = int(pair_trainer.tokens.lengths[rows, 1:].sum())
        sums: defaultdict[str, float] = defaultdict(float)
        for group in pair_trainer.groups(rows, True):
            now = self._view(group, features)
            then = start.of(group).to(now.logprobs.device)
            losses, figures = ppo(then, now.logprobs, now.values, now.entropies, **shape)
            loss = losses.sum() / (len(rows) if settings["sums"] else total)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            sums["loss"] += float(loss.detach())
            for name, value in figures.items():
                sums[name] += float(value) * len(losses) / total
        return dict(sums)
