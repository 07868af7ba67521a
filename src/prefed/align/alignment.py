"""What the stages of an alignment work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from prefed.align.policy import PLAIN, TASTING, load_policy
from prefed.align.selectors import Scorer, Selectors
from prefed.config.align import AlignConfig
from prefed.core import Callback, Key
from prefed.data import DataConfig, Prompt, Template
from prefed.models import Backbone, ModelConfig


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
    """What the server was told of its clients' latent tastes, of d_z numbers each.

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
        sources: digests of what comes from outside: ``"clients"`` and ``"selectors"``, which stands for the
            judge where one labels.
        judge: labels in the selectors' place, where ``config.judge`` names one.
        tastes: reads what the server was told of tastes, where ``config.tastes`` asks for a policy that takes
            them.
        callback: is told how the stages go on.
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
