"""What a method does with several selectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from prefed.core import ClientTrainer, Download, Owner, State, Tensors
from prefed.methods.base.fedavg import FedAvgBase
from prefed.methods.base.settings import SELECTOR_GOAL


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
        losses = [trainer.loss(model, SELECTOR_GOAL, split) for model in models]
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
