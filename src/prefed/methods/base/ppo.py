"""Offline PPO as the objective of a baseline (FedPDPO, arXiv:2603.19741, D.3.1).

FedDPO, Per-FedAvg, FedAMP, FedPer and FedRep can each train on it: ``objective = "ppo"``. A frozen reward
model scores the responses of the fixed pairs. PPO also trains a critic, the part ``"value"``. The critic
stays with its client in every method.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from prefed.core import Objective
from prefed.merge import lora
from prefed.methods.base.settings import PAIRWISE, LocalSettings, TrainingSettings
from prefed.train.losses import PPO

VALUE = "value"
"""The part of a model that holds PPO's critic."""


class BaselineSettings(LocalSettings):
    """How a client trains on its preferences: by a loss on pairs, or by offline PPO.

    With PPO an optimiser step takes one minibatch. A pass of ``local_epochs`` then goes over the pairs
    ``ppo_epochs`` times.

    >>> settings = BaselineSettings(objective="ppo", objective_settings={"kl": 0.2})
    >>> settings.goal().settings["kl"], settings.batches(), settings.passes(1)
    (0.2, (2, 1), 4)
    """

    objective: str = Field(
        "dpo", description=f"loss on preference pairs: {', '.join(PAIRWISE)}; or ppo, offline PPO"
    )
    objective_settings: dict[str, float] = Field(
        default_factory=dict,
        description=str(LocalSettings.model_fields["objective_settings"].description)
        + "".join(f", {name} (ppo)" for name in PPO.defaults),
    )
    reward_model: str = Field(
        "OpenAssistant/reward-model-deberta-v3-large-v2",
        description="for ppo: the sequence classification model that scores responses: a folder or hub name",
    )
    ppo_epochs: int = Field(4, ge=1, description="for ppo: times that a pass goes over the client's pairs")
    ppo_minibatch: int = Field(
        4, ge=2, description="for ppo: sequences of one optimiser step, two to a pair, in place of batch_size"
    )

    @model_validator(mode="after")
    def _whole_pairs(self) -> BaselineSettings:
        if self.ppo_minibatch % 2:
            raise ValueError(f"ppo_minibatch counts both responses of a pair: make {self.ppo_minibatch} even")
        return self

    @property
    def ppo(self) -> bool:
        """Whether the objective is offline PPO."""
        return self.objective == PPO.name

    def goal(self) -> Objective:
        """The loss that clients minimise, its settings checked and complete."""
        return Objective(PPO.name, PPO.resolve(self.objective_settings)) if self.ppo else super().goal()

    def batches(self) -> tuple[int, int]:
        """Pairs in a batch, and batches that make an optimiser step."""
        return (self.ppo_minibatch // 2, 1) if self.ppo else super().batches()

    def passes(self, epochs: int) -> int:
        """How often a phase of ``epochs`` goes over the client's pairs."""
        return epochs * self.ppo_epochs if self.ppo else epochs


def lora_parts(settings: TrainingSettings, *parts: str, **optional: bool) -> frozenset[str]:
    """The parts that a method needs of a model: the LoRA, ``parts``, and PPO's critic for objective PPO.

    ``optional`` says of further parts whether they are needed.

    >>> sorted(lora_parts(BaselineSettings(objective="ppo"), "head", gate=False))
    ['head', 'lora', 'value']
    """
    optional = {**optional, VALUE: isinstance(settings, BaselineSettings) and settings.ppo}
    return frozenset({lora.LORA, *parts, *(part for part, needed in optional.items() if needed)})
