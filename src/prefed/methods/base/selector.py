"""Several selectors on one base model."""

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
    """Several selectors on one base model, each a group of tensors in the server state.

    A download with all selectors has the index of the client's own selector as scalar ``"cluster"``.

    Attributes:
        fedavg: the steps of a round with one selector.
        count: number of selectors U.
    """

    fedavg: FedAvgBase
    count: int

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the groups: ``"selector-0"``, ``"selector-1"``, …"""
        return tuple(f"selector-{u}" for u in range(self.count))

    @cached_property
    def losses(self) -> tuple[str, ...]:
        """The names of the scalars with the loss of a client under each selector."""
        return tuple(f"loss_{u}" for u in range(self.count))

    def init(self, initial: Tensors) -> dict[str, Tensors]:
        """Return the initial groups of the server: equal selectors, each with its server optimiser."""
        shared, aggregator = self.fedavg.ownership.select(initial, Owner.SHARED), self.fedavg.aggregator
        groups = (aggregator.init(shared, name).tensors for name in self.names)
        return {name: tensors for group in groups for name, tensors in group.items()}

    def all(self, server: State) -> dict[str, Tensors]:
        """Return the groups of all selectors."""
        return {name: server.tensors[name] for name in self.names}

    def one(self, download: Download, u: int) -> Download:
        """Return ``download`` with only selector ``u``, as expected by :class:`FedAvgBase`."""
        return Download({self.fedavg.group: download.tensors[self.names[u]]}, download.scalars)

    def measure(
        self,
        trainer: ClientTrainer,
        private: State,
        download: Download,
        split: Literal["train", "validation"],
    ) -> list[float]:
        """Return the mean loss of the client under each selector, with NaN replaced by infinity."""
        start = self.fedavg.start
        models = (start(trainer, private, self.one(download, u)) for u in range(self.count))
        losses = [trainer.loss(model, SELECTOR_GOAL, split) for model in models]
        return [math.inf if math.isnan(loss) else loss for loss in losses]

    def predict(self, trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        """Return the client's own selector."""
        own = int(published.scalars["cluster"])
        return self.fedavg.start(trainer, private, self.one(published, own))

    def _nearest(self, trainer: ClientTrainer, published: Download) -> Download:
        """Select the selector with the lowest loss on the newcomer's training pairs, if there are any."""
        if not trainer.size:
            return self.one(published, int(published.scalars["cluster"]))
        losses = self.measure(trainer, State(), published, "train")
        return self.one(published, losses.index(min(losses)))

    def newcomer(self, trainer: ClientTrainer, published: Download) -> Tensors:
        """Return the selector with the lowest loss on the newcomer's training pairs."""
        return self.fedavg.start(trainer, State(), self._nearest(trainer, published))

    def adapt(self, trainer: ClientTrainer, published: Download, steps: int) -> Tensors:
        """Return the selector of :meth:`newcomer` after ``steps`` steps on the newcomer's pairs."""
        return self.fedavg.adapt(trainer, self._nearest(trainer, published), steps)

    def models(self, untouched: Tensors, published: Download) -> dict[str, Tensors]:
        """Return the voting models, in full layout."""
        return {name: untouched.replace(published.tensors[name]) for name in self.names}
