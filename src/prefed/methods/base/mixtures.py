"""The steps of a round with shared rewards, which each client weights in its own way (LoRe, PAL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import Field

from prefed.core import ClientTrainer, Download, Objective, Owner, Phase, State, Tensors
from prefed.merge import Aggregator
from prefed.methods.base.fedavg import FedAvgBase
from prefed.methods.base.settings import SelectorSettings
from prefed.train.losses import MIXED

MIXTURE = "mixture"
"""The part of a client's weights, which never leave it."""


class MixingSettings(SelectorSettings):
    """Settings of rewards that clients mix."""

    lr: float = Field(3e-2, gt=0, description="learning rate of the shared rewards")
    weights_lr: float = Field(1.0, gt=0, description="learning rate of a client's weights")
    local_steps: int | None = Field(
        2, ge=1, description=SelectorSettings.model_fields["local_steps"].description
    )
    newcomer_steps: int = Field(
        50,
        ge=1,
        description="steps in which a newcomer fits its weights to few pairs (evaluate.unseen_pairs)",
    )

    def goal(self) -> Objective:
        """The loss that clients minimise, on all of their pairs."""
        return Objective(MIXED.name, MIXED.resolve())


@dataclass(frozen=True)
class Mixtures(FedAvgBase):
    """The steps of a FedAvg round in which the weights are personal and have their own learning rate."""

    @classmethod
    def over(cls, settings: MixingSettings, aggregator: Aggregator, rounds: int) -> Mixtures:
        """Return the steps over the layout of the aggregator."""
        owners = aggregator.ownership(lambda entry: Owner.PERSONAL if entry.part == MIXTURE else Owner.SHARED)
        return cls(settings, aggregator, rounds, owners)

    def phase(
        self,
        trainer: ClientTrainer,
        download: Download,
        name: str = "train",
        *,
        train: Sequence[str] | None = None,
        **changes: Any,
    ) -> Phase:
        """Return the phase in which a client trains shared rewards and its weights together."""
        rates = self.rates(mixture=cast("MixingSettings", self.settings).weights_lr)
        return super().phase(trainer, download, name, train=train, rates=rates, **changes)

    def adapt(
        self, trainer: ClientTrainer, published: Download, steps: int, *, pull: float = 0.0, **changes: Any
    ) -> Tensors:
        """Return the model of a newcomer: the shared rewards, with weights fitted to its pairs."""
        settings = cast("MixingSettings", self.settings)
        weights = self.ownership.names(Owner.PERSONAL)
        phase = settings.phase("newcomer", weights, lr=settings.weights_lr, steps=steps, **changes)
        return trainer.train(self.start(trainer, State(), published), phase).tensors

    def infer(self, trainer: ClientTrainer, published: Download, pairs: int) -> Tensors:
        """Return the model of a newcomer, with weights fitted to ``pairs`` of its pairs."""
        if not trainer.size:
            return self.start(trainer, State(), published)
        few = Objective(MIXED.name, MIXED.resolve({"pairs": pairs}))
        steps = cast("MixingSettings", self.settings).newcomer_steps
        return self.adapt(trainer, published, steps, objective=few)
