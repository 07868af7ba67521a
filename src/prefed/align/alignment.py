"""The inputs of an alignment's stages: settings, selectors, prompts, tastes and tokenised pairs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefed.align.policy import PLAIN, TASTING, AlignError, load_policy
from prefed.config.align import AlignConfig
from prefed.core import Callback, Key, Tensors
from prefed.data import (
    DataConfig,
    PolicyEncoder,
    Prompt,
    Record,
    ResponseEncoder,
    SelectorConfig,
    Template,
    TokenSet,
    write_choices,
)
from prefed.data.tokens import write_records
from prefed.models import Backbone, ModelConfig
from prefed.train import PairTrainer
from prefed.train.forward_passes import longest_input

Scores = npt.NDArray[np.float32]


class Scorer(Protocol):
    """Labels pairs: selectors or a judge."""

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.floating]]:
        """Score pairs; see :meth:`Selectors.scores`."""


@dataclass(frozen=True)
class Selectors:
    """Selectors over one base model.

    Attributes:
        models: name → tensors of a selector (full layout).
        config: the template of questions.
        max_length: most tokens of a question; also limited by the model's context.
        max_tokens: tokens per forward pass.
        fast: use packed batches if the model supports them.
        responses: encoder of responses, for selectors with a latent taste.
    """

    backbone: Backbone
    models: Mapping[str, Tensors]
    config: SelectorConfig
    max_length: int
    max_tokens: int = 4096
    fast: bool = True
    responses: ResponseEncoder | None = None

    def chosen_by(self, labels: str | int) -> Selectors:
        """Return the selectors that label: all of them, or the one with a number.

        Raises:
            AlignError: there is no such selector.
        """
        if isinstance(labels, str):
            return self
        if labels >= len(self.models):
            raise AlignError(
                f"[align] labels = {labels}: the run has {len(self.models)} selectors, numbered from 0; "
                "choose another, or use --set align.labels=majority"
            )
        name = list(self.models)[labels]
        return replace(self, models={name: self.models[name]})

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], Scores]:
        """Score pairs in both orders.

        Args:
            tastes: ``[len(pairs), d_z]``, the latent taste for each pair; ``None`` for that of the selectors,
                or for selectors without tastes.

        Returns:
            Indices of the scored pairs, ``[n]``, without those that are too long; and their symmetrised
            scores by each selector, ``[U, n]``: the mean log-odds over both orders that the chosen response
            is better.

        Raises:
            AlignError: a score of a selector is not finite.
            ValueError: ``tastes`` is given, but the selectors have no tastes.
        """
        with tempfile.TemporaryDirectory(prefix="prefed-questions-") as folder:
            return self._scores(pairs, tastes, Path(folder))

    def _scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None, folder: Path
    ) -> tuple[npt.NDArray[np.int64], Scores]:
        # Completions may be longer than all pairs of clients.
        longest = longest_input(self.backbone, self.max_length)
        tokens = write_choices(folder, self.backbone.tokenizer, self.config, pairs, longest)
        asked = tokens.rows.astype(np.int64) - 1
        if not len(tokens):
            return asked, np.zeros((len(self.models), 0), np.float32)
        trainer = PairTrainer(
            self.backbone, tokens, max_tokens=self.max_tokens, fast=self.fast, responses=self.responses
        )
        rows, z = np.arange(len(tokens)), None if tastes is None else tastes[asked]
        sign = trainer.model.signs(rows)
        scores = np.stack([sign * trainer.choice_scores(model, rows, z) for model in self.models.values()])
        for name, own in zip(self.models, scores, strict=True):
            if not np.isfinite(own).all():
                raise AlignError(f"scores of {name} are not finite: it has diverged; train it again")
        return asked, scores


class Clients(Protocol):
    """The clients of a run, who judge completions where their data are, and train on what they judged."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What they judge with, as JSON values."""

    @property
    def votes(self) -> Scorer:
        """Their votes, ``[U, n]``: 1, 0 or −1 of each client that trains, in order; 0 without a verdict."""

    def noised(self, pairs: Sequence[Record], request: str, number: int) -> npt.NDArray[np.int64] | None:
        """Return the sum of their votes with the run's noise, ``[n]``; ``None``: ask with another number.

        Args:
            request: the name of these votes.
            number: used for these pairs only.
        """

    def noise(self, pairs: int) -> float:
        """Return the standard deviation of the noise on the sum for each of so many pairs."""

    @property
    def names(self) -> Sequence[str]:
        """The clients that train."""

    @property
    def scorers(self) -> Mapping[str, Scorer]:
        """Client → what it judges with, unless there is :attr:`judge`."""

    @property
    def judge(self) -> Callable[[Sequence[int], Mapping[str, Sequence[Record]]], int] | None:
        """Lets clients judge pairs and keep their verdicts; ``None`` if these are for the server.

        It takes the generations of earlier refreshes and of this one, and client → what it is asked about,
        and returns the number of pairs without ties in all these refreshes.
        """

    def train(self, pairs: Path, before: Sequence[Path], folder: Path) -> str:
        """Take further rounds on judged pairs, or finish them; return a digest of the result.

        Args:
            pairs: a file with columns of :data:`prefed.align.refresh.PAIRS`; missing with :attr:`judge`.
            before: the folders of earlier such trainings, of which the last one is continued, or the run.
            folder: where to write.
        """

    def selectors(self, folder: Path) -> Selectors:
        """Return the selectors that :meth:`train` wrote."""


@dataclass(frozen=True)
class ClientPrompts:
    """The prompts of clients, which the prompts of the server are compared with.

    Attributes:
        hashes: ``uint64``, one per prompt; see :attr:`prefed.data.TokenSet.prompts`.
        example: one of the prompts, for its format, if there is any.
    """

    hashes: npt.NDArray[np.uint64]
    example: Prompt | None


@dataclass(frozen=True)
class KnownTastes:
    """The latent tastes that the server knows from clients.

    Attributes:
        population: ``[d_z]``, the mean of the clients' μ̄.
        posteriors: client → μ̄ and log σ̄² of the posterior that it sent last.
        prototypes: ``[M, d_z]``.
        labels: client → number of its prototype.
    """

    population: torch.Tensor
    posteriors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    prototypes: torch.Tensor
    labels: Mapping[str, int]


@dataclass(frozen=True)
class Alignment:
    """The folder, the settings and the inputs of an alignment. Inputs are loaded when a stage needs them.

    Attributes:
        folder: created by the first stage.
        seed: of all random draws.
        model: the model to align, and its LoRA.
        max_tokens: tokens per forward pass.
        client_prompts: reads the prompts of clients.
        selectors: loads the selectors.
        sources: digests of the inputs: ``"clients"``, and ``"selectors"`` for the selectors or the judge.
        judge: labels instead of the selectors.
        tastes: reads the tastes of clients, for a policy that takes tastes.
        unseen_pairs: reads pairs of clients with prompts that selectors were not trained on.
        clients: those that judge completions, for refreshed selectors.
        privacy: returns what the run and clients' votes have spent, if every request for votes is a release.
        callback: receives the progress of the stages.
    """

    folder: Path
    config: AlignConfig
    seed: int
    model: ModelConfig
    data: DataConfig
    max_tokens: int
    client_prompts: Callable[[], ClientPrompts]
    selectors: Callable[[], Selectors]
    sources: Mapping[str, str]
    judge: Scorer | None = None
    tastes: Callable[[], KnownTastes] | None = None
    unseen_pairs: Callable[[], Sequence[Record]] = tuple
    clients: Clients | None = None
    privacy: Callable[[], Mapping[str, Any]] | None = None
    callback: Callback = field(default_factory=Callback)

    @property
    def key(self) -> Key:
        """The key of all random draws."""
        return Key(self.seed).at("align")

    @cached_property
    def policy(self) -> Backbone:
        """The initial policy, which generates completions and is π_ref; available after its stage."""
        return load_policy(self.model, self.seed, self.folder, self.needs)

    @property
    def start(self) -> Tensors:
        """The tensors of the initial policy (full layout); one that takes tastes has its map among them."""
        return self.policy.reference if self.config.tastes is None else self.policy.initial

    def scorer(self, folder: Path | None = None) -> Scorer:
        """Return the labeller: the judge, or the selectors that label.

        Args:
            folder: that of a refresh, whose selectors label.
        """
        if folder not in self._scorers:
            self._scorers.clear()
            self._scorers[folder] = self.judge or self._selectors(folder).chosen_by(self.config.labels)
        return self._scorers[folder]

    def _selectors(self, folder: Path | None) -> Selectors:
        if folder is None:
            return self.selectors()
        assert self.clients is not None
        return self.clients.selectors(folder)

    @cached_property
    def _scorers(self) -> dict[Path | None, Scorer]:
        return {}

    @property
    def needs(self) -> frozenset[str]:
        """The trainable parts of the policy."""
        return PLAIN if self.config.tastes is None else TASTING

    @cached_property
    def template(self) -> Template:
        """The template for prompts to the policy."""
        return Template.of(self.policy.tokenizer, self.data)


def cache(alignment: Alignment) -> Path:
    """Return the folder of files that can be made again."""
    return alignment.folder / "cache"


def write_pairs(alignment: Alignment, backbone: Backbone, records: Iterable[Record], name: str) -> TokenSet:
    """Tokenise ``records`` into the folder ``name`` of the cache.

    :attr:`TokenSet.rows` are the numbers of the records, from 1. Pairs that exceed ``data.max_length`` or the
    model's context are left out.

    Raises:
        DataError: the chat template rejects a record.
    """
    data, tokenizer = alignment.data, backbone.tokenizer
    encoder = PolicyEncoder(
        tokenizer,
        Template.of(tokenizer, data),
        max_length=longest_input(backbone, data.max_length),
        too_long="drop",
    )
    return write_records(cache(alignment) / name, encoder, records, name)
