"""Trains and scores clients' tensors on preference pairs: of any client, of one visit, of a whole run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import POOLED, Key, Objective, Ownership, Phase, PhaseResult, Round, Tensors, Upload
from prefed.core.tensors import Layered
from prefed.data import ClientData, ClientSizes, FederatedDataset, ResponseEncoder, Template, TokenSet
from prefed.models import Backbone
from prefed.models.adapters import save_adapter
from prefed.models.backbone import model_digest
from prefed.train.loss_trainer import ChoiceTrainer, LossTrainer
from prefed.train.losses import LATENT, PPO
from prefed.train.metrics import ChoiceScores, PairScores
from prefed.train.optimizer_steps import Visit, first_loss_scale
from prefed.train.pair_cache import Rows
from prefed.train.pair_model import PairModel, ReferenceLogprobs, check_lengths
from prefed.train.ppo import PPOTrainer
from prefed.train.rewards import Rewards
from prefed.train.tastes import LatentTrainer, ResponseFeatures, Z


class ObjectiveTrainer(Protocol):
    """Trains on some of the objectives."""

    def train(self, visit: Visit, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run ``phase`` from ``tensors`` (full layout) on the visit's pairs, at least one."""

    def gradient(
        self, visit: Visit, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> tuple[Tensors, float]:
        """Gradient and value of the mean loss over ``batch``, some of the visit's pairs."""

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
        name: distinguishes the caches of different models and data in one folder.
        max_tokens: tokens of one forward pass; larger batches are split, with equal results.
        fast: use packed batches where the model's family allows them.
        rewards: a reward model's scores, for offline PPO.
        responses: how a selector with a latent taste reads responses; by default with the model's tokenizer
            and within its context.
        tastes: ``[len(tokens), d_z]``, the taste at which a policy that takes one trains on each pair and
            scores it. They are constants, and do not change the reference.

    Attributes:
        trainers: objective → its trainer, unless it is a loss of :data:`prefed.train.losses.OBJECTIVES`.
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

    def trainer(self, objective: Objective) -> ObjectiveTrainer:
        """The trainer of that objective."""
        return self.trainers.get(objective.name, self._loss_trainer)

    def visit(self, rows: Rows, key: Key, ownership: Ownership) -> PairVisit:
        """A visit to the pairs ``rows``."""
        return PairVisit(rows, key, ownership, self)

    def score(self, tensors: Tensors, rows: Rows) -> PairScores | ChoiceScores:
        """Scores of ``rows`` under ``tensors`` and under the untouched model, without dropout.

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

        Arguments and result are those of :meth:`prefed.train.tastes.LatentTrainer.posteriors`.

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
        return self.trainer(objective).loss(tensors, objective, _not_empty(rows))


@dataclass(frozen=True, eq=False)
class PairVisit(Visit):
    """A visit to some pairs of a :class:`PairTrainer`: everything that trains goes through here."""

    pair_trainer: PairTrainer

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run one phase from ``tensors`` (full layout).

        The key of :func:`prefed.train.optimizer_steps.batches` is ``key.at("phase", phase.name)``.

        Raises:
            ValueError: the phase trains a frozen tensor, or there are no pairs.
        """
        phase.check(self.ownership)
        _not_empty(self.rows)
        return self.pair_trainer.trainer(phase.objective).train(self, tensors, phase)

    def gradient(
        self, tensors: Tensors, objective: Objective, *, batch_size: int = 0, name: str | None = None
    ) -> tuple[Tensors, float]:
        """Gradient (full layout, zero where frozen) and value of the mean loss over one batch.

        ``batch_size`` 0 takes all pairs; otherwise that many are drawn without replacement at
        ``key.at(name)``, or at ``key`` if there is no name.
        """
        batch, key = _not_empty(self.rows), self.key if name is None else self.key.at(name)
        if 0 < batch_size < len(batch):
            batch = key.at("batches").numpy().choice(batch, batch_size, replace=False)
        return self.pair_trainer.trainer(objective).gradient(self, tensors, objective, batch, key)


@dataclass(frozen=True, eq=False)
class ClientPairTrainer(PairVisit):
    """A client's visit, as methods see it: core's ``ClientTrainer`` over real data."""

    client: str
    validation_rows: Rows
    round: Round

    @property
    def size(self) -> int:
        """Number of training pairs."""
        return len(self.rows)

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from."""
        return self.pair_trainer.backbone.initial

    def loss(self, tensors: Tensors, objective: Objective, split: Literal["train", "validation"]) -> float:
        """Mean loss over a split; a client without validation pairs uses its training pairs."""
        validate = split == "validation" and len(self.validation_rows)
        return self.pair_trainer.loss(tensors, objective, self.validation_rows if validate else self.rows)

    def posteriors(
        self, tensors: Tensors, objective: Objective, *, pairs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """μ and log σ² after contexts of training pairs, which are the same ones in every round."""
        key = Key(self.round.key.seed).at("contexts").at("client", self.client)
        return self.pair_trainer.posteriors(tensors, objective, self.rows, key, pairs)

    def assemble(self, *groups: Tensors) -> Tensors:
        """``initial`` with the given tensors replaced; later groups override earlier ones."""
        if isinstance(self.initial, Layered):
            # A large model: what is put together is only ever copied into the backbone.
            return Layered(self.initial.layout, self.initial, *groups)
        return self.initial.replace(*groups)

    def upload(self, tensors: Mapping[str, Tensors], scalars: Mapping[str, float] | None = None) -> Upload:
        """An upload from this client in this round, weighted by its training pairs."""
        return Upload(self.client, float(self.size), tensors, scalars or {}, self.round.number)


class PairTrainerFactory:
    """Makes trainers of clients over a language model and preference pairs.

    It is the :class:`prefed.engines.TrainerFactory` of every real run.

    Args:
        backbone: the frozen model. Nothing else may use it.
        cache: folder for the log-probabilities of the reference model; ``None`` keeps them in memory.
        unseen: clients whose pairs no method trains on, pooled methods included.
        reward_model: folder or hub name of the model that scores responses, for offline PPO.
        responses: as :class:`~prefed.train.PairTrainer` takes it.

    Raises:
        ModelError: the model has fewer positions than the longest pair of a client has tokens.
    """

    def __init__(
        self,
        backbone: Backbone,
        dataset: FederatedDataset,
        *,
        cache: Path | None = None,
        max_tokens: int = 4096,
        fast: bool = True,
        unseen: Sequence[str] = (),
        reward_model: str | None = None,
        responses: ResponseEncoder | None = None,
    ) -> None:
        self.backbone, self.dataset, self._unseen = backbone, dataset, frozenset(unseen)
        rows = [
            split for data in dataset.clients.values() for split in (data.train, data.validation, data.test)
        ]
        check_lengths(backbone, dataset.tokens, np.concatenate(rows))
        rewards = None
        if reward_model is not None:
            rewards = Rewards(reward_model, dataset.tokens, cache, backbone.device)
        self._model = model_digest(backbone)
        kind = "reference" if dataset.tokens.letters is None else "choices"
        name = f"{kind}-{self._model[:12]}-{dataset.tokens.fingerprint[:12]}"
        self.pair_trainer = PairTrainer(
            backbone,
            dataset.tokens,
            cache=cache,
            name=name,
            max_tokens=max_tokens,
            fast=fast,
            rewards=rewards,
            responses=responses,
        )

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from (full layout)."""
        return self.backbone.initial

    @property
    def clients(self) -> Mapping[str, ClientSizes]:
        """Every client's number of training, validation and test pairs."""
        return self.dataset.sizes

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of the data, and of the model together with the start of its adapter."""
        return {"data": self.dataset.fingerprint, "model": self._model}

    def _data(self, client: str) -> ClientData:
        if client == POOLED and client not in self.dataset.clients:
            members = [data for name, data in self.dataset.clients.items() if name not in self._unseen]
            splits = ("train", "validation", "test")
            pooled = (np.sort(np.concatenate([getattr(data, split) for data in members])) for split in splits)
            return ClientData(POOLED, *pooled)
        return self.dataset.clients[client]

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientPairTrainer:
        """The trainer of one client in one exchange of a round; ``"pooled"`` is all clients as one."""
        data = self._data(client)
        return ClientPairTrainer(data.train, key, ownership, self.pair_trainer, client, data.validation, now)

    def score(
        self, client: str, tensors: Tensors, split: Literal["train", "validation", "test"]
    ) -> PairScores | ChoiceScores:
        """The scores of a client's pairs of one split under ``tensors`` (full layout)."""
        return self.pair_trainer.score(tensors, getattr(self._data(client), split))

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        """Write ``tensors`` as an adapter folder that PEFT loads."""
        save_adapter(self.backbone, tensors, folder)


def _encoder(backbone: Backbone) -> ResponseEncoder:
    return ResponseEncoder(backbone.tokenizer, Template(backbone.tokenizer), backbone.window or sys.maxsize)


def _not_empty(rows: Rows) -> Rows:
    if len(rows) == 0:
        raise ValueError("there are no preference pairs to work on")
    return rows
