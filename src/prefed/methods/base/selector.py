"""How a client trains a selector, and what it does with several of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from prefed.core import ClientTrainer, Download, Objective, Owner, State, Tensors
from prefed.methods.base.fedavg import FedAvgBase
from prefed.methods.base.settings import TrainingSettings
from prefed.train.losses import CHOICE

GOAL = Objective(CHOICE.name)
"""The loss that clients minimise, and by which they are grouped."""


class SelectorSettings(TrainingSettings):
    """How a client trains a selector: FedBiscuit, tables 3 and 4.

    >>> SelectorSettings().batches(), SelectorSettings().local_steps
    ((16, 1), 30)
    >>> SelectorSettings(local_epochs=2).local_steps is None
    True
    """

    reads: ClassVar[Literal["policy", "choice"]] = "choice"

    lr: float = Field(1e-5, gt=0, description="learning rate of the local optimiser")
    batch_size: int = Field(
        32, ge=2, description="pairs in a batch, each order of a pair counted: 32 is 16 pairs in both orders"
    )
    local_steps: int | None = Field(
        30, ge=1, description="optimiser steps of a visit; give this or local_epochs"
    )
    local_epochs: int | None = Field(
        None, ge=1, description="passes of a visit over the client's pairs; give this or local_steps"
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="decay rates of adamw's and adam's moment estimates"
    )

    @model_validator(mode="after")
    def _both_orders(self) -> SelectorSettings:
        if self.batch_size % 2:
            raise ValueError(f"batch_size counts both orders of a pair: make {self.batch_size} even")
        return self

    def goal(self) -> Objective:
        """The loss that clients minimise."""
        return GOAL

    def batches(self) -> tuple[int, int]:
        """Pairs in a batch, and batches that make an optimiser step."""
        return self.batch_size // 2, self.accumulate


class ClusterSettings(SelectorSettings):
    """Several selectors and their clusters of clients: FedBiscuit, tables 3 and 4.

    >>> [ClusterSettings(selectors=count).intervals(500) for count in (3, 5)]
    [(50, 50), (50, 50)]
    >>> ClusterSettings().intervals(10), ClusterSettings(regroup_every=4).intervals(20)
    ((1, 1), (3, 4))
    """

    selectors: int = Field(
        3, ge=1, description="selectors, and clusters of clients; the paper takes odd numbers, 3 and 5"
    )
    warmup_rounds: int | None = Field(
        None,
        ge=0,
        description="rounds of each selector, one after the other, before clients are grouped; left out: 50, "
        "or fewer, so that all of them take at most half of the rounds",
    )
    regroup_every: int | None = Field(
        None,
        ge=1,
        description="rounds from one grouping of the clients to the next (the paper: 50 or 100); left out: "
        "as many as a selector's warm-up has where that is left out",
    )

    def intervals(self, rounds: int) -> tuple[int, int]:
        """Rounds of each selector's warm-up, and rounds from grouping to grouping, in a run of ``rounds``."""
        # The paper's 50 of 500 are half of the rounds for 5 selectors.
        usual = max(1, min(50, rounds // (2 * self.selectors)))
        warmup = usual if self.warmup_rounds is None else self.warmup_rounds
        return warmup, self.regroup_every or usual

    def for_rounds(self, rounds: int) -> Self:
        """These settings with their schedule in a run of ``rounds`` rounds."""
        warmup, every = self.intervals(rounds)
        return self.model_copy(update={"warmup_rounds": warmup, "regroup_every": every})


@dataclass(frozen=True)
class Selectors:
    """Several selectors on one base model, each a group of tensors in the server's state.

    A client has one of them at a time. A download that holds all of them has the number of the client's own
    as ``"cluster"``.

    Attributes:
        fedavg: the moves of a round with one of them.
        count: how many, U.
    """

    fedavg: FedAvgBase
    count: int

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of their groups: ``"selector-0"`` and so on."""
        return tuple(f"selector-{u}" for u in range(self.count))

    @cached_property
    def losses(self) -> tuple[str, ...]:
        """The names of the numbers with which a client reports its loss under each."""
        return tuple(f"loss_{u}" for u in range(self.count))

    def init(self, initial: Tensors) -> dict[str, Tensors]:
        """The server's groups. All selectors start alike; the server optimiser remembers each apart."""
        shared, aggregator = self.fedavg.ownership.select(initial, Owner.SHARED), self.fedavg.aggregator
        groups = (aggregator.init(shared, name).tensors for name in self.names)
        return {name: tensors for group in groups for name, tensors in group.items()}

    def all(self, server: State) -> dict[str, Tensors]:
        """The groups of all selectors."""
        return {name: server.tensors[name] for name in self.names}

    def one(self, download: Download, u: int) -> Download:
        """``download`` as :class:`FedAvgBase` takes it, with selector ``u`` alone."""
        return Download({self.fedavg.group: download.tensors[self.names[u]]}, download.scalars)

    def measure(
        self,
        trainer: ClientTrainer,
        private: State,
        download: Download,
        split: Literal["train", "validation"],
    ) -> list[float]:
        """The client's mean loss under each selector; infinite where it is NaN."""
        start = self.fedavg.start
        models = (start(trainer, private, self.one(download, u)) for u in range(self.count))
        losses = [trainer.loss(model, GOAL, split) for model in models]
        return [math.inf if math.isnan(loss) else loss for loss in losses]

    def predict(self, trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        """A client predicts with its own selector."""
        own = int(published.scalars["cluster"])
        return self.fedavg.start(trainer, private, self.one(published, own))

    def _nearest(self, trainer: ClientTrainer, published: Download) -> Download:
        """The selector of a newcomer: that of its least loss on its training pairs, if it has any."""
        if not trainer.size:
            return self.one(published, int(published.scalars["cluster"]))
        losses = self.measure(trainer, State(), published, "train")
        return self.one(published, losses.index(min(losses)))

    def newcomer(self, trainer: ClientTrainer, published: Download) -> Tensors:
        """A newcomer predicts with the selector that suits its training pairs best."""
        return self.fedavg.start(trainer, State(), self._nearest(trainer, published))

    def adapt(self, trainer: ClientTrainer, published: Download, steps: int) -> Tensors:
        """That selector after ``steps`` steps on the newcomer's pairs."""
        return self.fedavg.adapt(trainer, self._nearest(trainer, published), steps)

    def models(self, untouched: Tensors, published: Download) -> dict[str, Tensors]:
        """The models (full layout) that vote."""
        return {name: untouched.replace(published.tensors[name]) for name in self.names}
