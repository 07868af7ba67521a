"""The trainer of any client's tensors, visits to some pairs, and trainers of single objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import Key, Objective, Owner, Ownership, Phase, PhaseResult, Tensors
from prefed.data import Record, TokenSet
from prefed.models import Backbone
from prefed.train.feedback import CHOICES, PAIRS
from prefed.train.feedback.kind import Feedback, Scores
from prefed.train.forward_passes import PairModel, ReferenceLogprobs
from prefed.train.losses import CHOICE, LATENT, check_feedback, feedback_of, find_objective
from prefed.train.losses.registry import FIXED
from prefed.train.optimizer_steps import batches, first_loss_scale, read_gradient
from prefed.train.pair_cache import Rows

if TYPE_CHECKING:
    from prefed.data.examples import ExampleEncoder
    from prefed.data.response_encoder import ResponseEncoder
    from prefed.train.reward_model import Rewards


@dataclass(frozen=True, eq=False)
class Visit:
    """A visit to some pairs of a :class:`~prefed.train.PairTrainer`, with one or more phases.

    Attributes:
        rows: the training pairs.
    """

    rows: Rows
    key: Key
    ownership: Ownership
    pair_trainer: PairTrainer

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run a phase from ``tensors`` (full layout), with batches drawn at ``key.at("phase", phase.name)``.

        Raises:
            ValueError: the phase trains a frozen tensor, or there are no pairs.
        """
        phase.check(self.ownership)
        trainer = self.pair_trainer.trainer(phase.objective, self.rows)
        return (SHARED_TRAINING.get() or trainer.train)(PhaseStart(self, tensors, phase))

    def gradient(
        self, tensors: Tensors, objective: Objective, *, batch_size: int = 0, name: str | None = None
    ) -> tuple[Tensors, float]:
        """Return gradient (full layout, zero where frozen) and value of the mean loss over one batch.

        ``batch_size`` 0 takes all pairs. Otherwise that many are drawn without replacement at
        ``key.at(name)``, or at ``key`` if ``name`` is ``None``.
        """
        trainer, batch = self.pair_trainer.trainer(objective, self.rows), self.rows
        key = self.key if name is None else self.key.at(name)
        if 0 < batch_size < len(batch):
            batch = key.at("batches").numpy().choice(batch, batch_size, replace=False)
        return trainer.gradient(self, tensors, objective, batch, key)


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


class ObjectiveTrainer:
    """Trains on some of the objectives, see :class:`prefed.train.losses.ObjectiveSpec`."""

    def __init__(self, pair_trainer: PairTrainer) -> None:
        self._model, self._references = pair_trainer.model, pair_trainer.references

    def train(self, start: PhaseStart) -> PhaseResult:
        """Run a phase on the pairs of its visit, at least one."""
        raise NotImplementedError

    def gradient(
        self, visit: Visit, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> tuple[Tensors, float]:
        """Return gradient and value of the mean loss over ``batch``, a subset of the visit's pairs.

        PPO's loss is that of a first step, with ``tensors`` as π_old. A latent taste has the prior N(0, I),
        and no context if the batch contains all pairs.
        """
        backbone, step = self._model.backbone, self._first_step(visit.rows, tensors, objective, batch, key)
        backbone.train_only(visit.ownership.names(Owner.SHARED, Owner.PERSONAL))
        backbone.grad.zero_()
        loss = step()["loss"]
        return read_gradient(backbone), loss

    def _first_step(
        self, rows: Rows, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> Callable[[], Mapping[str, float]]:
        """Load ``tensors``, and prepare a step on ``batch`` of a visit to ``rows``.

        Returns:
            A function that adds the gradient to the gradient buffer and returns metrics.
        """
        raise NotImplementedError

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the mean loss over ``rows``, without dropout."""
        raise NotImplementedError

    def outputs(self, tensors: Tensors, rows: Rows, z: torch.Tensor | None = None) -> npt.NDArray[np.float32]:
        """Return what is scored of ``rows``: the outputs of a forward pass, without dropout.

        Args:
            z: of a model with a latent taste, see :meth:`PairTrainer.choice_scores`.
        """
        self._model.backbone.load(tensors)
        return self._model.outputs(rows, rewards=self._model.backbone.reward is not None)

    def shared_tokens(self, start: PhaseStart) -> int | None:
        """Return the tokens of a phase's longest step; ``None`` if it cannot share passes with others."""
        return None

    def posteriors(
        self, tensors: Tensors, objective: Objective, rows: Rows, key: Key, pairs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Infer the taste of a client, see :meth:`prefed.train.tastes.LatentTrainer.posteriors`.

        Raises:
            ValueError: the model has no latent taste.
        """
        raise ValueError("posteriors requires a model with a latent taste")


class PairTrainer:
    """Train and score the tensors of any client on a frozen backbone.

    Methods raise ``ValueError`` for empty rows.

    Args:
        backbone: the model; nothing else may use it.
        tokens: all pairs; a client is a set of rows.
        cache: folder for outputs of the reference model; ``None`` keeps them in memory.
        name: identifies model and data in ``cache``.
        features: folder for hidden states of the frozen model; ``None`` keeps them in memory.
        max_tokens: maximum number of tokens per forward pass; larger batches are split, with equal results.
        fast: use packed batches if the model's family supports them.
        rewards: scores of a reward model, for offline PPO.
        responses: tokenises responses for a selector with a latent taste; by default with the model's
            tokenizer and context.
        tastes: ``[len(tokens), d_z]``, the taste of each pair for a policy with a taste map. They are
            constants and do not change the reference.
        examples: puts examples before prompts, for a method that judges with them.
        feedback: the kind that a row is of if it fits several kinds.

    Attributes:
        trainers: objective → its trainer, if one has been used; see :meth:`trainer_of`.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokens: TokenSet,
        *,
        cache: Path | None = None,
        name: str = "reference",
        features: Path | None = None,
        max_tokens: int = 4096,
        fast: bool = True,
        rewards: Rewards | None = None,
        responses: ResponseEncoder | None = None,
        tastes: torch.Tensor | None = None,
        examples: ExampleEncoder | None = None,
        feedback: Feedback = PAIRS,
    ) -> None:
        self.backbone, self.cache, self.name, self.features = backbone, cache, name, features
        self.rewards, self.responses, self.examples, self._feedback = rewards, responses, examples, feedback
        backbone.loss_scale = first_loss_scale(backbone)
        longest = examples.max_length if examples else 0
        self.model = PairModel(
            backbone, tokens, max_tokens=max_tokens, fast=fast, tastes=tastes, longest=longest
        )
        self.references = ReferenceLogprobs(self.model, cache, name)
        self.trainers: dict[str, ObjectiveTrainer] = {}

    def trainer(self, objective: Objective, rows: Rows) -> ObjectiveTrainer:
        """Return the trainer of an objective.

        Raises:
            ValueError: it cannot train on ``rows``, or there are none.
        """
        spec = find_objective(objective.name)
        check_feedback(f"objective {spec.name!r}", spec.feedback, self.model.tokens, _not_empty(rows))
        return self.trainer_of(objective.name)

    def trainer_of(self, name: str) -> ObjectiveTrainer:
        """Return the trainer of the objective ``name``. Its module is imported on first use."""
        if name not in self.trainers:
            module, _, own = find_objective(name).trainer.partition(":")
            self.trainers[name] = getattr(import_module(f"prefed.train.{module}"), own)(self)
        return self.trainers[name]

    def visit(self, rows: Rows, key: Key, ownership: Ownership) -> Visit:
        """Return a visit to the pairs ``rows``."""
        return Visit(rows, key, ownership, self)

    def score(self, tensors: Tensors, rows: Rows, examples: Sequence[Record] = ()) -> Scores:
        """Score ``rows`` under ``tensors`` and under the base model, without dropout.

        Scores are log-probabilities, or log-odds if the pairs are choices.

        Args:
            examples: pairs that come before the prompts under ``tensors``, not under the base model.

        Raises:
            ValueError: some of ``rows`` are pairs and some thumbs.
        """
        kind = feedback_of(self.model.tokens, _not_empty(rows), self._feedback)
        together = kind.together(rows)
        reference = self.references.for_scoring(together)
        outputs = self._after(tensors, examples, rows) if examples else self.scorer.outputs(tensors, together)
        return kind.scores(self.model, rows, outputs, reference)

    @property
    def scorer(self) -> ObjectiveTrainer:
        """The trainer that scores: that of the objective of the model's own tensors, if it has such."""
        own = (spec.name for spec in FIXED.values() if spec.tensor in self.backbone.layout)
        return self.trainer_of(next(own, CHOICE.name))

    def _after(self, tensors: Tensors, examples: Sequence[Record], rows: Rows) -> npt.NDArray[np.float32]:
        """Return ``[n, 2]`` log-probabilities of the responses of ``rows`` after ``examples``."""
        assert self.examples is not None
        self.backbone.load(tensors)
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
        if feedback_of(self.model.tokens, _not_empty(rows)) is not CHOICES:
            raise ValueError("choice_scores requires pairs of choices, as for selectors")
        if z is not None and LATENT.tensor not in self.backbone.layout:
            raise ValueError("z is given, but this model has no latent taste")
        scores: npt.NDArray[np.float32] = self.scorer.outputs(tensors, rows, z).mean(1)
        return scores

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the mean loss over ``rows`` as one batch, without dropout."""
        return self.trainer(objective, rows).loss(tensors, objective, rows)


def _not_empty(rows: Rows) -> Rows:
    if len(rows) == 0:
        raise ValueError("there are no preference pairs: rows is empty")
    return rows
