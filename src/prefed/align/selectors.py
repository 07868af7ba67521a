"""The selectors as judges of completions: their scores of pairs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefed.align.errors import AlignError
from prefed.core import Tensors
from prefed.data import Record, ResponseEncoder, SelectorConfig, write_choices
from prefed.models import Backbone
from prefed.train import PairTrainer
from prefed.train.trainer_factory import longest_input

Scores = npt.NDArray[np.float32]


class Scorer(Protocol):
    """Who labels pairs: selectors, or another judge in their place."""

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], Scores]:
        """Numbers of the pairs that were judged, and their scores; see :meth:`Selectors.scores`."""


@dataclass(frozen=True)
class Selectors:
    """Selectors over one base model.

    Attributes:
        models: name → a selector's tensors (full layout).
        config: how they are asked.
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
        # Completions may be longer than all pairs of the clients.
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
