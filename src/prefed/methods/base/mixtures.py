"""The steps of a round with shared rewards, which each client weights in its own way (LoRe, PAL)."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import Field

from prefed.core import ClientTrainer, Download, Method, Objective, Owner, State, Tensors
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


def mixing_method(
    name: str, source: str, settings: MixingSettings, aggregator: Aggregator, rounds: int
) -> Method:
    """Return the method in which clients train shared rewards and their own weights together.

    A newcomer fits only its weights to its pairs.
    """
    fedavg = FedAvgBase.of(settings, aggregator, rounds, lambda entry: entry.part == MIXTURE)
    weights = fedavg.ownership.names(Owner.PERSONAL)

    def adapt(trainer: ClientTrainer, published: Download, steps: int, **changes: Any) -> Tensors:
        phase = settings.phase("newcomer", weights, lr=settings.weights_lr, steps=steps, **changes)
        return trainer.train(fedavg.start(trainer, State(), published), phase).tensors

    def infer(trainer: ClientTrainer, published: Download, pairs: int) -> Tensors:
        if not trainer.size:
            return fedavg.start(trainer, State(), published)
        few = Objective(MIXED.name, MIXED.resolve({"pairs": pairs}))
        return adapt(trainer, published, settings.newcomer_steps, objective=few)

    train = fedavg.exchange(work=partial(fedavg.work, rates=fedavg.rates(mixture=settings.weights_lr)))
    return fedavg.method(name, source, train, adapt=adapt, infer=infer)
