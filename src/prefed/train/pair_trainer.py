"""Trains and scores clients' tensors on preference pairs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import Key, Objective, Owner, Ownership, Phase, PhaseResult, Tensors
from prefed.data import ResponseEncoder, Template, TokenSet
from prefed.models import Backbone
from prefed.train.choice_trainer import ChoiceTrainer
from prefed.train.latent_trainer import LatentTrainer, Z
from prefed.train.loss_trainer import LossTrainer
from prefed.train.losses import LATENT, PPO
from prefed.train.metrics import ChoiceScores, PairScores
from prefed.train.pair_cache import Rows
from prefed.train.pair_model import PairModel
from prefed.train.ppo import PPOTrainer, RolloutCache
from prefed.train.references import ReferenceLogprobs
from prefed.train.response_features import ResponseFeatures
from prefed.train.rewards import Rewards
from prefed.train.steps import first_loss_scale


class ObjectiveTrainer(Protocol):
    """Trains on some of the objectives."""

    def train(
        self, tensors: Tensors, phase: Phase, rows: Rows, key: Key, rollout_cache: RolloutCache
    ) -> PhaseResult:
        """Run ``phase`` from ``tensors`` (full layout) on the pairs ``rows``, at least one."""

    def gradient(
        self, tensors: Tensors, objective: Objective, rows: Rows, batch: Rows, names: Iterable[str], key: Key
    ) -> tuple[Tensors, float]:
        """Gradient in the tensors ``names``, and value, of the mean loss over ``batch``, some of ``rows``."""

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Mean loss over ``rows``, without dropout."""


class PairTrainer:
    """Trains and scores any client's tensors on a frozen backbone.

    Where the pairs are choices between two letters (``tokens.letters``), the tensors are a selector's, and
    its objective is :data:`prefed.train.losses.CHOICE`, or :data:`prefed.train.losses.LATENT` if it has a
    latent taste. Every method but :meth:`posteriors` raises ``ValueError`` if it is given no rows.

    Args:
        backbone: the model; this trainer becomes its only user.
        tokens: all pairs; a client is a set of rows.
        cache: folder for the numbers of the untouched model; ``None`` keeps them in memory.
        name: tells apart the caches of different models and data in one folder.
        max_tokens: tokens of one forward pass; larger batches are split, with equal results.
        fast: use packed batches where the model's family allows them.
        rewards: a reward model's scores, for offline PPO.
        responses: how a selector with a latent taste reads responses; left out, by the model's tokenizer and
            within its context.
        tastes: ``[len(tokens), d_z]``, at which a policy that takes a taste trains on each pair and scores
            it. They are constants, and change nothing for the reference.

    Attributes:
        trainers: objective → its trainer, where it is no loss of :data:`prefed.train.losses.OBJECTIVES`.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokens: TokenSet,
        *,
        cache: Path | None = None,
        name: str = "reference",
        max_tokens: int = 4096,
        fast: bool = True,
        rewards: Rewards | None = None,
        responses: ResponseEncoder | None = None,
        tastes: torch.Tensor | None = None,
    ) -> None:
        self.backbone = backbone
        backbone.loss_scale = first_loss_scale(backbone)
        self.model = PairModel(backbone, tokens, max_tokens=max_tokens, fast=fast, tastes=tastes)
        self.references = ReferenceLogprobs(self.model, cache, name)
        self.trainers: Mapping[str, ObjectiveTrainer] = {}
        self._loss_trainer: LossTrainer
        if tokens.letters is None:
            self.trainers = {PPO.name: PPOTrainer(self.model, rewards, cache, f"{name}-tokens")}
            self._loss_trainer = LossTrainer(self.model, self.references)
        else:
            self._loss_trainer = ChoiceTrainer(self.model, self.references)
        self._latent: LatentTrainer | None = None
        if Z in backbone.layout and tokens.letters is not None:
            features = ResponseFeatures(
                self.model, responses or _encoder(backbone), cache, f"{name}-responses"
            )
            self._latent = LatentTrainer(self.model, self.references, features)
            self.trainers = {LATENT.name: self._latent}

    def _trainer(self, objective: Objective) -> ObjectiveTrainer:
        return self.trainers.get(objective.name, self._loss_trainer)

    def train(
        self,
        tensors: Tensors,
        phase: Phase,
        rows: Rows,
        key: Key,
        ownership: Ownership,
        rollout_cache: RolloutCache | None = None,
    ) -> PhaseResult:
        """Run one phase from ``tensors`` (full layout) on the pairs ``rows``.

        The key of :func:`prefed.train.steps.batches` is ``key.at("phase", phase.name)``.

        Args:
            rollout_cache: shared by all phases of a visit; ``None`` if this is the visit's only phase.

        Raises:
            ValueError: the phase trains a frozen tensor.
        """
        phase.check(ownership)
        trainer = self._trainer(phase.objective)
        return trainer.train(tensors, phase, _not_empty(rows), key, rollout_cache or RolloutCache())

    def gradient(
        self,
        tensors: Tensors,
        objective: Objective,
        rows: Rows,
        key: Key,
        ownership: Ownership,
        *,
        batch_size: int = 0,
    ) -> tuple[Tensors, float]:
        """Gradient (full layout, zero where frozen) and value of the mean loss over one batch of ``rows``.

        ``batch_size`` 0 takes all rows; otherwise that many are drawn without replacement at ``key``.
        """
        names = ownership.names(Owner.SHARED, Owner.PERSONAL)
        batch = _not_empty(rows)
        if 0 < batch_size < len(rows):
            batch = key.at("batches").numpy().choice(rows, batch_size, replace=False)
        return self._trainer(objective).gradient(tensors, objective, rows, batch, names, key)

    def score(self, tensors: Tensors, rows: Rows) -> PairScores | ChoiceScores:
        """What ``tensors`` and the untouched model give to ``rows``, without dropout.

        They are log-probabilities, or log-odds where the pairs are choices.
        """
        self.references.fill_scoring(_not_empty(rows))
        if self.model.tokens.letters is not None:
            signs, orders = self.model.signs(rows)[:, None], self._orders(tensors, rows)
            return ChoiceScores(orders=signs * orders, baseline=signs * self.references.scoring.get(rows))
        self.backbone.load(tensors)
        has_rewards = self.backbone.reward is not None
        outputs = self.model.outputs(rows, rewards=has_rewards)
        return PairScores(
            policy=outputs[:, :2],
            reference=self.references.scoring.get(rows),
            lengths=self.model.tokens.lengths[rows, 1:],
            rewards=outputs[:, 2:] if has_rewards else None,
        )

    def choice_scores(
        self, tensors: Tensors, rows: Rows, z: torch.Tensor | None = None
    ) -> npt.NDArray[np.float32]:
        """``[n]`` log-odds, the mean of both presentation orders, that a pair's first response is better.

        The first is the one that comes first in alphabetical order, whichever of the two is the chosen one.

        Args:
            z: the latent taste of all rows ``[d_z]``, or of each ``[n, d_z]``; ``None`` for that in
                ``tensors``.

        Raises:
            ValueError: the pairs are no choices, or the model has no latent taste of that shape.
        """
        if self.model.tokens.letters is None:
            raise ValueError(
                "these pairs are a policy's: only a selector's pairs end with a letter to choose"
            )
        scores: npt.NDArray[np.float32] = self._orders(tensors, _not_empty(rows), z).mean(1)
        return scores

    def _orders(self, tensors: Tensors, rows: Rows, z: torch.Tensor | None = None) -> npt.NDArray[np.float32]:
        """``[n, 2]`` log-odds that the first response is better, in both presentation orders."""
        if self._latent is not None:
            return self._latent.orders(tensors, rows, z)
        if z is not None:
            raise ValueError("this model has no latent taste: it cannot judge at one")
        self.backbone.load(tensors)
        return self.model.outputs(rows)

    def posteriors(
        self, tensors: Tensors, objective: Objective, rows: Rows, key: Key, pairs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``tensors`` infer of a client's taste from ``rows``, all its training pairs.

        Arguments and result are those of :meth:`prefed.train.latent_trainer.LatentTrainer.posteriors`.

        Raises:
            ValueError: the model has no latent taste.
        """
        if self._latent is None and Z in self.backbone.layout and not len(rows):
            # Pairs that are not on this machine are no choices either.
            none = torch.zeros(0, self.backbone.layout[Z].size)
            return none, none.clone()
        if self._latent is None:
            raise ValueError("this model has no latent taste: no posterior can be inferred")
        return self._latent.posteriors(tensors, objective, rows, key, pairs)

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Mean loss over ``rows`` as one batch, without dropout."""
        return self._trainer(objective).loss(tensors, objective, _not_empty(rows))


def _encoder(backbone: Backbone) -> ResponseEncoder:
    return ResponseEncoder(backbone.tokenizer, Template(backbone.tokenizer), backbone.window or sys.maxsize)


def _not_empty(rows: Rows) -> Rows:
    if len(rows) == 0:
        raise ValueError("there are no preference pairs to work on")
    return rows
