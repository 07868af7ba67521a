"""Train and score client tensors on pairs and thumbs: for any rows, for one visit, and for a whole run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import POOLED, Key, Objective, Ownership, Phase, PhaseResult, Round, Tensors, Upload
from prefed.core.tensors import Layered
from prefed.data import ClientData, ClientSizes, FederatedDataset, Record, Template, TokenSet
from prefed.data.tokens import thumbs
from prefed.models import Backbone
from prefed.models.adapters import save_adapter
from prefed.models.backbone import model_digest
from prefed.models.mixed_rewards import LOGITS
from prefed.models.tastes import Z
from prefed.models.trainable_parts import EXAMPLE_COUNT
from prefed.train.loss_trainer import SHARED_TRAINING, ChoiceTrainer, LossTrainer, PhaseStart, ThumbTrainer
from prefed.train.losses import LATENT, MIXED, PPO, reads_thumbs
from prefed.train.metrics import ChoiceScores, PairScores, ThumbScores
from prefed.train.optimizer_steps import Visit, first_loss_scale
from prefed.train.pair_cache import Rows, mismatched
from prefed.train.pair_model import PairModel, ReferenceLogprobs, check_lengths
from prefed.train.ppo import PPOTrainer
from prefed.train.rewards import Rewards

if TYPE_CHECKING:
    from prefed.data.examples import ExampleEncoder
    from prefed.data.responses import ResponseEncoder
    from prefed.train.mixed_rewards import MixedRewardTrainer
    from prefed.train.tastes import LatentTrainer


class ObjectiveTrainer(Protocol):
    """Trainer for some of the objectives."""

    def train(self, visit: Visit, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run ``phase`` from ``tensors`` (full layout) on the pairs of the visit, at least one."""

    def gradient(
        self, visit: Visit, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> tuple[Tensors, float]:
        """Return gradient and value of the mean loss over ``batch``, a subset of the visit's pairs."""

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the mean loss over ``rows``, without dropout."""


class PairTrainer:
    """Train and score the tensors of any client on a frozen backbone.

    If the pairs are choices between two letters (``tokens.letters``), the tensors belong to a selector. Its
    objective is :data:`prefed.train.losses.CHOICE`, :data:`prefed.train.losses.LATENT` if it has a latent
    taste, or :data:`prefed.train.losses.MIXED` if clients mix rewards. All methods except :meth:`posteriors`
    raise ``ValueError`` for empty rows.

    Args:
        backbone: the model; nothing else may use it.
        tokens: all pairs; a client is a set of rows.
        cache: folder for outputs of the reference model; ``None`` keeps them in memory.
        name: identifies model and data in ``cache``.
        max_tokens: maximum number of tokens per forward pass; larger batches are split, with equal results.
        fast: use packed batches if the model's family supports them.
        rewards: scores of a reward model, for offline PPO.
        responses: tokenises responses for a selector with a latent taste; by default with the model's
            tokenizer and context.
        tastes: ``[len(tokens), d_z]``, the taste of each pair for a policy with a taste map. They are
            constants and do not change the reference.
        examples: puts examples before prompts, for a method that judges with them.

    Attributes:
        trainers: objective → its trainer, except for the losses in :data:`prefed.train.losses.OBJECTIVES`.
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
        examples: ExampleEncoder | None = None,
    ) -> None:
        self.backbone = backbone
        backbone.loss_scale = first_loss_scale(backbone)
        longest = examples.max_length if examples else 0
        self.model = PairModel(
            backbone, tokens, max_tokens=max_tokens, fast=fast, tastes=tastes, longest=longest
        )
        self.examples = examples
        self.references = ReferenceLogprobs(self.model, cache, name)
        self.trainers: Mapping[str, ObjectiveTrainer] = {}
        self._loss_trainer: LossTrainer
        if tokens.letters is None:
            self.trainers = {PPO.name: PPOTrainer(self.model, rewards, cache, f"{name}-tokens")}
            self._loss_trainer = LossTrainer(self.model, self.references)
        else:
            self._loss_trainer = ChoiceTrainer(self.model, self.references)
        self._thumb_trainer = ThumbTrainer(self.model, self.references)
        self._latent: LatentTrainer | None = None
        self._mixed: MixedRewardTrainer | None = None
        reads_hidden = Z in backbone.layout or LOGITS in backbone.layout
        if reads_hidden and tokens.letters is not None:
            from prefed.data.responses import ResponseEncoder
            from prefed.train.tastes import LatentTrainer, ResponseFeatures

            tokenizer, context = backbone.tokenizer, backbone.window or sys.maxsize
            encoder = responses or ResponseEncoder(tokenizer, Template(tokenizer), context)
            features = ResponseFeatures(self.model, encoder, cache, f"{name}-responses")
            if Z in backbone.layout:
                self._latent = LatentTrainer(self.model, self.references, features)
                self.trainers = {LATENT.name: self._latent}
            else:
                from prefed.train.mixed_rewards import MixedRewardTrainer

                self._mixed = MixedRewardTrainer(self.model, features)
                self.trainers = {MIXED.name: self._mixed}

    def trainer(self, objective: Objective) -> ObjectiveTrainer:
        """Return the trainer of an objective."""
        other = self._thumb_trainer if reads_thumbs(objective.name) else self._loss_trainer
        return self.trainers.get(objective.name, other)

    def visit(self, rows: Rows, key: Key, ownership: Ownership) -> PairVisit:
        """Return a visit to the pairs ``rows``."""
        return PairVisit(rows, key, ownership, self)

    def score(
        self, tensors: Tensors, rows: Rows, examples: Sequence[Record] = ()
    ) -> PairScores | ChoiceScores | ThumbScores:
        """Score ``rows`` under ``tensors`` and under the base model, without dropout.

        Scores are log-probabilities, or log-odds if the pairs are choices.

        Args:
            examples: pairs that come before the prompts under ``tensors``, not under the base model.

        Raises:
            ValueError: some of ``rows`` are pairs and some thumbs.
        """
        labels = thumbs(self.model.tokens.lengths[rows])
        if labels.any():
            if not labels.all():
                raise ValueError("some of the rows are pairs and some are thumbs; score them separately")
            both = mismatched(rows)
            reference = self.references.scoring_mismatched(both)
            self.backbone.load(tensors)
            return ThumbScores(self.model.outputs(both), reference, labels > 0)
        self.references.fill_scoring(_not_empty(rows))
        if self.model.tokens.letters is not None:
            signs, orders = self.model.signs(rows)[:, None], self._orders(tensors, rows)
            return ChoiceScores(orders=signs * orders, baseline=signs * self.references.scoring.get(rows))
        self.backbone.load(tensors)
        has_rewards = self.backbone.reward is not None
        outputs = self._after(examples, rows) if examples else self.model.outputs(rows, rewards=has_rewards)
        return PairScores(
            policy=outputs[:, :2],
            reference=self.references.scoring.get(rows),
            lengths=self.model.tokens.lengths[rows, 1:],
            rewards=outputs[:, 2:] if has_rewards else None,
        )

    def _after(self, examples: Sequence[Record], rows: Rows) -> npt.NDArray[np.float32]:
        """Return ``[n, 2]`` log-probabilities of the responses of ``rows`` after ``examples``."""
        assert self.examples is not None
        outputs = []
        with torch.inference_mode():
            # Examples fill a pass, so each pair is a pass by itself.
            for row in rows:
                pair = self.examples.encode(self.model.tokens.record(int(row)), examples)
                outputs.append(self.model.forward([pair], rejected=True, rewards=False, tastes=None).cpu())
        return torch.cat(outputs).numpy()

    def choice_scores(
        self, tensors: Tensors, rows: Rows, z: torch.Tensor | None = None
    ) -> npt.NDArray[np.float32]:
        """Return ``[n]`` log-odds that the first response is better, averaged over both presentation orders.

        "First" is the alphabetical order, whichever response is the chosen one.

        Args:
            z: latent taste for all rows ``[d_z]`` or for each row ``[n, d_z]``; ``None`` uses the taste in
                ``tensors``.

        Raises:
            ValueError: the pairs are not choices, or z does not fit the model.
        """
        if self.model.tokens.letters is None:
            raise ValueError("choice_scores requires pairs of choices, as for selectors")
        scores: npt.NDArray[np.float32] = self._orders(tensors, _not_empty(rows), z).mean(1)
        return scores

    def _orders(self, tensors: Tensors, rows: Rows, z: torch.Tensor | None = None) -> npt.NDArray[np.float32]:
        """Return ``[n, 2]`` log-odds that the first response is better, by presentation order."""
        if self._latent is not None:
            return self._latent.orders(tensors, rows, z)
        if z is not None:
            raise ValueError("z is given, but this model has no latent taste")
        if self._mixed is not None:
            return self._mixed.orders(tensors, rows)
        self.backbone.load(tensors)
        return self.model.outputs(rows)

    def posteriors(
        self, tensors: Tensors, objective: Objective, rows: Rows, key: Key, pairs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Infer the taste of a client from ``rows``, all its training pairs.

        See :meth:`prefed.train.tastes.LatentTrainer.posteriors` for arguments and result.

        Raises:
            ValueError: the model has no latent taste.
        """
        if self._latent is None and Z in self.backbone.layout and not len(rows):
            # Clients on other machines have no pairs here, not even choices.
            none = torch.zeros(0, self.backbone.layout[Z].size)
            return none, none.clone()
        if self._latent is None:
            raise ValueError("posteriors requires a model with a latent taste")
        return self._latent.posteriors(tensors, objective, rows, key, pairs)

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the mean loss over ``rows`` as one batch, without dropout."""
        return self.trainer(objective).loss(tensors, objective, _not_empty(rows))


@dataclass(frozen=True, eq=False)
class PairVisit(Visit):
    """A visit to some pairs of a :class:`PairTrainer`. All training goes through this class."""

    pair_trainer: PairTrainer

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run a phase from ``tensors`` (full layout), with batches drawn at ``key.at("phase", phase.name)``.

        Raises:
            ValueError: the phase trains a frozen tensor, or there are no pairs.
        """
        phase.check(self.ownership)
        _not_empty(self.rows)
        shared = SHARED_TRAINING.get()
        if shared is not None:
            return shared(PhaseStart(self, tensors, phase))
        return self.pair_trainer.trainer(phase.objective).train(self, tensors, phase)

    def gradient(
        self, tensors: Tensors, objective: Objective, *, batch_size: int = 0, name: str | None = None
    ) -> tuple[Tensors, float]:
        """Return gradient (full layout, zero where frozen) and value of the mean loss over one batch.

        ``batch_size`` 0 takes all pairs. Otherwise that many are drawn without replacement at
        ``key.at(name)``, or at ``key`` if ``name`` is ``None``.
        """
        batch, key = _not_empty(self.rows), self.key if name is None else self.key.at(name)
        if 0 < batch_size < len(batch):
            batch = key.at("batches").numpy().choice(batch, batch_size, replace=False)
        return self.pair_trainer.trainer(objective).gradient(self, tensors, objective, batch, key)


@dataclass(frozen=True, eq=False)
class ClientPairTrainer(PairVisit):
    """The :class:`~prefed.core.ClientTrainer` of a language model: a visit to the pairs of one client."""

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
        """Return the mean loss over a split; clients without validation pairs use their training pairs."""
        validate = split == "validation" and len(self.validation_rows)
        return self.pair_trainer.loss(tensors, objective, self.validation_rows if validate else self.rows)

    def posteriors(
        self, tensors: Tensors, objective: Objective, *, pairs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return μ and log σ² after contexts of training pairs, the same contexts in every round."""
        key = Key(self.round.key.seed).at("contexts").at("client", self.client)
        return self.pair_trainer.posteriors(tensors, objective, self.rows, key, pairs)

    def assemble(self, *groups: Tensors) -> Tensors:
        """Return ``initial`` with the given tensors replaced; later groups override earlier ones."""
        if isinstance(self.initial, Layered):
            # A large model. The result is only copied into the backbone.
            return Layered(self.initial.layout, self.initial, *groups)
        return self.initial.replace(*groups)

    def upload(self, tensors: Mapping[str, Tensors], scalars: Mapping[str, float] | None = None) -> Upload:
        """Return an upload from this client in this round, weighted by its number of training pairs."""
        return Upload(self.client, float(self.size), tensors, scalars or {}, self.round.number)


class PairTrainerFactory:
    """Create client trainers for a language model and preference pairs.

    This is the :class:`prefed.engines.TrainerFactory` of all real runs.

    Args:
        backbone: the frozen model; nothing else may use it.
        cache: folder for outputs of the reference model; ``None`` keeps them in memory.
        unseen: clients whose pairs are never trained on, even by pooled methods.
        reward_model: folder or hub name of the model that scores responses, for offline PPO.
        responses: see :class:`~prefed.train.PairTrainer`.
        examples: see :class:`~prefed.train.PairTrainer`.

    Raises:
        ModelError: the longest pair of a client exceeds the model's context.
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
        examples: ExampleEncoder | None = None,
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
            examples=examples,
        )

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from (full layout)."""
        return self.backbone.initial

    @property
    def clients(self) -> Mapping[str, ClientSizes]:
        """Number of training, validation and test pairs of each client."""
        return self.dataset.sizes

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of the data, and of the model with its initial adapter."""
        return {"data": self.dataset.fingerprint, "model": self._model}

    def _data(self, client: str) -> ClientData:
        if client == POOLED and client not in self.dataset.clients:
            members = [data for name, data in self.dataset.clients.items() if name not in self._unseen]
            splits = ("train", "validation", "test")
            pooled = (np.sort(np.concatenate([getattr(data, split) for data in members])) for split in splits)
            return ClientData(POOLED, *pooled)
        return self.dataset.clients[client]

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientPairTrainer:
        """Return the trainer of a client in one exchange of a round; ``"pooled"`` is all clients as one."""
        data = self._data(client)
        return ClientPairTrainer(data.train, key, ownership, self.pair_trainer, client, data.validation, now)

    def score(
        self, client: str, tensors: Tensors, split: Literal["train", "validation", "test"]
    ) -> PairScores | ChoiceScores | ThumbScores:
        """Return the scores of a split of a client's pairs under ``tensors`` (full layout)."""
        rows = getattr(self._data(client), split)
        return self.pair_trainer.score(tensors, rows, self.examples(client, tensors))

    def examples(self, client: str, tensors: Tensors) -> list[Record]:
        """Return the training pairs of a client that come before the prompts of its model ``tensors``."""
        encoder = self.pair_trainer.examples
        if encoder is None:
            return []
        rows = encoder.draw(client, self._data(client).train, int(tensors[EXAMPLE_COUNT]))
        return [self.dataset.tokens.record(int(row)) for row in rows]

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        """Write ``tensors`` as a PEFT adapter folder."""
        save_adapter(self.backbone, tensors, folder)


def _not_empty(rows: Rows) -> Rows:
    if len(rows) == 0:
        raise ValueError("there are no preference pairs: rows is empty")
    return rows
