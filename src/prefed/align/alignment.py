"""What the stages of an alignment work with: settings, selectors that label completions, pairs as tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

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
from prefed.train.pair_model import longest_input

Scores = npt.NDArray[np.float32]


class Scorer(Protocol):
    """What labels pairs: selectors, or a judge instead of them."""

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], Scores]:
        """Numbers of the pairs that were judged, and their scores; see :meth:`Selectors.scores`."""


@dataclass(frozen=True)
class Selectors:
    """Selectors over one base model.

    Attributes:
        models: name → a selector's tensors (full layout).
        config: the template of their questions.
        max_length: tokens of a question; fewer where the model's context ends.
        max_tokens: tokens of one forward pass.
        fast: use packed batches where the model's family allows them.
        responses: how selectors with a latent taste read responses; ``None`` for other selectors.
    """

    backbone: Backbone
    models: Mapping[str, Tensors]
    config: SelectorConfig
    max_length: int
    max_tokens: int = 4096
    fast: bool = True
    responses: ResponseEncoder | None = None

    def chosen_by(self, labels: str | int) -> Selectors:
        """The selectors that label: all of them, or the one with a number.

        Raises:
            AlignError: there is no such selector.
        """
        if isinstance(labels, str):
            return self
        if labels >= len(self.models):
            raise AlignError(
                f"[align] labels = {labels}: the run has {len(self.models)} selectors, numbered from 0; "
                "take another: --set align.labels=majority, or a number"
            )
        name = list(self.models)[labels]
        return replace(self, models={name: self.models[name]})

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], Scores]:
        """Judge pairs in both orders.

        Args:
            pairs: which response is the chosen one makes no difference to the model.
            tastes: ``[len(pairs), d_z]`` the latent taste with which each pair is judged; ``None`` for that
                of the selectors, or where they have none.

        Returns:
            Numbers of the pairs that were judged, ``[n]``; a pair that is too long is left out. And for each
            selector their symmetrised scores ``[U, n]``, the mean log-odds over both orders that the chosen
            response is better.

        Raises:
            AlignError: a selector gives a score that is not finite.
            ValueError: there are tastes, and the selectors have none.
        """
        with tempfile.TemporaryDirectory(prefix="prefed-questions-") as folder:
            return self._scores(pairs, tastes, Path(folder))

    def _scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None, folder: Path
    ) -> tuple[npt.NDArray[np.int64], Scores]:
        # Completions may be longer than all of the clients' pairs.
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
                raise AlignError(f"{name} gives scores that are not finite: it diverged; train it again")
        return asked, scores


@dataclass(frozen=True)
class ClientPrompts:
    """What the clients' prompts are, as far as the server's own prompts depend on them.

    Attributes:
        hashes: ``uint64``, of every prompt that a client holds; see :attr:`prefed.data.TokenSet.prompts`.
        example: one of them, for its form; ``None`` if there is none.
    """

    hashes: npt.NDArray[np.uint64]
    example: Prompt | None


@dataclass(frozen=True)
class KnownTastes:
    """What the clients sent to the server of their latent tastes, of d_z numbers each.

    Attributes:
        population: ``[d_z]`` the mean of the clients' μ̄.
        posteriors: client → μ̄ and log σ̄² of the posterior that it sent last.
        prototypes: ``[M, d_z]``.
        labels: client → the number of its prototype.
    """

    population: torch.Tensor
    posteriors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    prototypes: torch.Tensor
    labels: Mapping[str, int]


@dataclass(frozen=True)
class Alignment:
    """The folder of an alignment, its settings, and where it gets the rest when a stage needs it.

    Attributes:
        folder: made by the first stage.
        config: the ``[align]`` table.
        seed: names the randomness.
        model: which model is aligned, and its LoRA.
        data: the ``[data]`` table: template, longest sequence and encoding.
        max_tokens: tokens of one forward pass.
        client_prompts: reads the clients' prompts.
        selectors: loads the selectors.
        sources: digests of what comes from outside: ``"clients"`` and ``"selectors"``, which is the
            judge's where one labels.
        judge: labels instead of the selectors, where ``config.judge`` names one.
        tastes: reads what clients sent of tastes, where ``config.tastes`` asks for a policy that takes
            them.
        callback: gets the progress of the stages.
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
    callback: Callback = field(default_factory=Callback)

    @property
    def key(self) -> Key:
        """The randomness of the alignment."""
        return Key(self.seed).at("align")

    @cached_property
    def policy(self) -> Backbone:
        """The policy at the start, once its stage is done: completions and π_ref come from it."""
        return load_policy(self.model, self.seed, self.folder, self.needs)

    @property
    def needs(self) -> frozenset[str]:
        """The parts of the policy."""
        return PLAIN if self.config.tastes is None else TASTING

    @cached_property
    def template(self) -> Template:
        """Renders prompts for the policy."""
        return Template(self.policy.tokenizer, self.data.template)


def cache(alignment: Alignment) -> Path:
    """The folder of what can be made again."""
    return alignment.folder / "cache"


def write_pairs(alignment: Alignment, backbone: Backbone, records: Iterable[Record], name: str) -> TokenSet:
    """Tokenise ``records`` into the folder ``name`` of the cache.

    :attr:`TokenSet.rows` are the records' numbers, from 1. A pair whose response leaves no room for its
    prompt within ``data.max_length``, or within the model's context, is left out.

    Raises:
        DataError: the chat template refuses a record.
    """
    data, tokenizer = alignment.data, backbone.tokenizer
    encoder = PolicyEncoder(
        tokenizer,
        Template(tokenizer, data.template),
        max_length=longest_input(backbone, data.max_length),
        too_long="drop",
    )
    return write_records(cache(alignment) / name, encoder, records, name)
