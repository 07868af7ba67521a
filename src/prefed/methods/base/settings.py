"""Common settings of methods: training on pairs, by offline PPO, and of selectors.

``objective = "ppo"`` is available for the baselines FedDPO, Per-FedAvg, FedAMP, FedPer and FedRep (FedPDPO,
arXiv:2603.19741, D.3.1). A frozen reward model scores the responses of the pairs. PPO also trains a critic,
the part ``"value"``, which is always personal.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from prefed.core import Objective, Optimizer, Phase
from prefed.core.strict_settings import StrictModel
from prefed.merge import lora
from prefed.train.feedback import Feedback
from prefed.train.losses import CHOICE, OBJECTIVES, PPO, find_objective, objective

Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]

PAIRWISE = tuple(name for name, loss in OBJECTIVES.builtin.items() if not loss.needs_reward)
"""Objectives that need no reward head."""


class TrainingSettings(StrictModel):
    """Settings of local training, for any loss.

    Attributes:
        reads: type of the models; see :class:`~prefed.core.Method`. It determines how pairs are tokenised.
    """

    reads: ClassVar[Literal["policy", "choice"]] = "policy"

    lr: float = Field(1e-4, gt=0, description="learning rate of the local optimiser")
    batch_size: int = Field(8, ge=1, description="preference pairs per batch")
    accumulate: int = Field(1, ge=1, description="batches per optimiser step")
    local_steps: int | None = Field(
        None, ge=1, description="optimiser steps per visit; set this or local_epochs"
    )
    local_epochs: int | None = Field(
        1, ge=1, description="passes over the client's pairs per visit; set this or local_steps"
    )
    optimizer: Literal["adamw", "adam", "sgd", "rmsprop"] = Field("adamw", description="local optimiser")
    optimizer_state: Literal["new", "kept"] = Field(
        "new",
        description="state of the optimiser at the start of a visit: new, or kept on the client's disk since "
        "its last visit",
    )
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.999), description="decay rates of the moment estimates of adamw and adam"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd and rmsprop")
    weight_decay: float = Field(0.01, ge=0, description="weight decay of the local optimiser")
    clip: float = Field(1.0, ge=0, description="bound on the Euclidean norm of the gradient; 0 for none")
    schedule: Literal["constant", "cosine", "plateau"] = Field(
        "constant",
        description="learning rate over the rounds: constant; cosine, from lr towards lr_min; plateau, x 0.8 "
        "after each round in which the mean training loss increased",
    )
    lr_min: float = Field(1e-6, ge=0, description="final learning rate of the cosine schedule")

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        # If only one length is given, it replaces the default of the other.
        for given, other in (("local_steps", "local_epochs"), ("local_epochs", "local_steps")):
            has_default = cls.model_fields[other].default is not None
            if has_default and isinstance(values, dict) and values.get(given) is not None:
                return {other: None, **values}
        return values

    @model_validator(mode="after")
    def _coherent(self) -> TrainingSettings:
        if (self.local_steps is None) == (self.local_epochs is None):
            raise ValueError("set exactly one of local_steps and local_epochs")
        if self.schedule == "cosine" and self.lr_min > self.lr:
            raise ValueError(
                f"schedule 'cosine': lr_min {self.lr_min:g} is above lr {self.lr:g}; lower lr_min"
            )
        return self

    @abstractmethod
    def goal(self) -> Objective:
        """The loss that clients minimise."""

    @property
    def feedback(self) -> Feedback:
        """The kind of feedback that clients train on."""
        return find_objective(self.goal().name).feedback

    def batches(self) -> tuple[int, int]:
        """Pairs in a batch, and batches that make an optimiser step."""
        return self.batch_size, self.accumulate

    def step_pairs(self) -> int:
        """Pairs that make an optimiser step."""
        return math.prod(self.batches())

    def for_rounds(self, rounds: int) -> Self:
        """Fill in the settings that depend on the number of rounds."""
        return self

    def passes(self, epochs: int) -> int:
        """Passes over the client's pairs in a phase of ``epochs``."""
        return epochs

    def phase(
        self,
        name: str,
        train: Sequence[str],
        *,
        lr: float | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        **changes: Any,
    ) -> Phase:
        """Return the phase according to these settings.

        Args:
            name: name of the phase and of its randomness.
            train: names of the tensors to train.
            lr: learning rate, by default that of the settings.
            steps: optimiser steps; without ``steps`` and ``epochs``, the length is that of the settings.
            epochs: passes over the client's pairs.
            changes: other fields of :class:`~prefed.core.Phase`, e.g. ``objective``, ``rates``, ``proximal``.
        """
        if steps is None and epochs is None:
            steps, epochs = self.local_steps, self.local_epochs
        batch_size, accumulate = self.batches()
        phase = Phase(
            name=name,
            train=tuple(train),
            objective=self.goal(),
            optimizer=Optimizer(
                self.optimizer, lr or self.lr, self.betas, self.momentum, self.weight_decay, self.clip
            ),
            batch_size=batch_size,
            steps=steps,
            epochs=None if epochs is None else self.passes(epochs),
            accumulate=accumulate,
        )
        return replace(phase, **changes)


def _description(name: str) -> str | None:
    return TrainingSettings.model_fields[name].description


class PersonalSettings(TrainingSettings):
    """Settings of personalised methods: FedPDPO (arXiv:2603.19741), section 5 and D.3."""

    accumulate: int = Field(2, ge=1, description=_description("accumulate"))
    schedule: Literal["constant", "cosine", "plateau"] = Field("cosine", description=_description("schedule"))


class TwoPhaseSettings(PersonalSettings):
    """Settings of a visit with one phase for personal tensors and one for shared tensors.

    >>> from prefed.methods.ditto import Settings
    >>> Settings(local_steps=3).personal_phase()
    {'lr': 0.0001, 'steps': 3, 'epochs': None}
    >>> Settings(local_epochs=3).personal_phase()
    {'lr': 0.0001, 'steps': None, 'epochs': 1}
    """

    personal_lr: float = Field(1e-4, gt=0, description="learning rate of the personal phase")
    personal_steps: int | None = Field(
        None,
        ge=1,
        description="optimiser steps of the personal phase; default without personal_epochs: local_steps, or "
        "one pass if local_epochs is set",
    )
    personal_epochs: int | None = Field(
        None,
        ge=1,
        description="passes of the personal phase over the client's pairs, instead of personal_steps",
    )

    @model_validator(mode="after")
    def _one_personal_length(self) -> TwoPhaseSettings:
        if self.personal_steps is not None and self.personal_epochs is not None:
            raise ValueError("set personal_steps or personal_epochs, not both")
        return self

    def personal_phase(self) -> dict[str, Any]:
        """Return the learning rate and length of the personal phase, as arguments of :meth:`phase`."""
        steps, epochs = self.personal_steps, self.personal_epochs
        if steps is None and epochs is None:
            steps, epochs = (self.local_steps, None) if self.local_steps is not None else (None, 1)
        return {"lr": self.personal_lr, "steps": steps, "epochs": epochs}


def _extras() -> str:
    """List the settings of all objectives except ``beta``, with the objectives that have them."""
    names: dict[str, list[str]] = {}
    for objective_name in PAIRWISE:
        for name in OBJECTIVES[objective_name].defaults:
            if name != "beta":
                names.setdefault(name, []).append(objective_name)
    return ", ".join(f"{name} ({', '.join(users)})" for name, users in names.items())


class LocalSettings(TrainingSettings):
    """Settings of local training on preference pairs.

    >>> LocalSettings(local_steps=3).local_epochs is None
    True
    >>> LocalSettings(objective="simpo").goal().settings["beta"]
    2.0
    """

    objective: str = Field("dpo", description=f"loss on preference pairs: {', '.join(PAIRWISE)}")
    beta: float = Field(
        0.1,
        gt=0,
        description="strength of the pull towards the reference; default: that of the objective",
    )
    objective_settings: dict[str, float] = Field(
        default_factory=dict, description=f"other settings of the objective: {_extras()}"
    )

    @model_validator(mode="before")
    @classmethod
    def _own_beta(cls, values: Any) -> Any:
        loss = OBJECTIVES.get(str(values.get("objective"))) if isinstance(values, dict) else None
        if loss is not None and "beta" in loss.defaults:
            return {"beta": loss.defaults["beta"], **values}
        return values

    @model_validator(mode="after")
    def _known_objective(self) -> LocalSettings:
        if "beta" in self.objective_settings:
            raise ValueError("set beta as a setting of the method, not in objective_settings")
        if self.feedback.pairing and self.batch_size < 2:
            raise ValueError(
                f"objective {self.objective!r} estimates a KL divergence from the other {self.feedback.name} "
                "of a batch; set batch_size to 2 or more"
            )
        return self

    def goal(self) -> Objective:
        """The loss that clients minimise, with complete settings.

        Raises:
            ValueError: the objective or one of its settings is unknown, or the method does not support it.
        """
        if self.objective == PPO.name:
            raise ValueError(
                "objective 'ppo' requires method feddpo, perfedavg, fedamp, fedper or fedrep; objectives of "
                f"this method: {', '.join(PAIRWISE)}"
            )
        loss = objective(self.objective)
        if loss.needs_reward:
            raise ValueError(
                f"objective {loss.name!r} requires the reward head of method 'fedpdpo'; objectives of this "
                f"method: {', '.join(PAIRWISE)}"
            )
        beta = {"beta": self.beta} if "beta" in loss.defaults else {}
        return Objective(self.objective, loss.resolve({**beta, **self.objective_settings}))


VALUE = "value"
"""The part of a model with the critic of PPO."""


class BaselineSettings(LocalSettings):
    """Settings of local training by a loss on pairs or by offline PPO.

    With PPO, an optimiser step takes one minibatch, and each of ``local_epochs`` has ``ppo_epochs`` passes
    over the pairs.

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
        description="for ppo: sequence classification model that scores responses, a folder or hub name",
    )
    ppo_epochs: int = Field(4, ge=1, description="for ppo: passes over the client's pairs per local epoch")
    ppo_minibatch: int = Field(
        4,
        ge=2,
        multiple_of=2,
        description="for ppo: sequences per optimiser step, two per pair, instead of batch_size",
    )

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
    """Return the required parts of the model: the LoRA, ``parts``, true ``optional`` parts, PPO's critic.

    >>> sorted(lora_parts(BaselineSettings(objective="ppo"), "head", gate=False))
    ['head', 'lora', 'value']
    """
    optional = {**optional, VALUE: isinstance(settings, BaselineSettings) and settings.ppo}
    return frozenset({lora.LORA, *parts, *(part for part, needed in optional.items() if needed)})


SELECTOR_GOAL = Objective(CHOICE.name)
"""The loss that clients minimise, also used for grouping them."""


class SelectorSettings(TrainingSettings):
    """Settings of selectors: FedBiscuit, tables 3 and 4.

    >>> SelectorSettings().batches(), SelectorSettings().local_steps
    ((16, 1), 30)
    >>> SelectorSettings(local_epochs=2).local_steps is None
    True
    """

    reads: ClassVar[Literal["policy", "choice"]] = "choice"

    lr: float = Field(1e-5, gt=0, description="learning rate of the local optimiser")
    batch_size: int = Field(
        32,
        ge=2,
        multiple_of=2,
        description="questions per batch, two per pair: 32 is 16 pairs in both orders",
    )
    local_steps: int | None = Field(30, ge=1, description=_description("local_steps"))
    local_epochs: int | None = Field(None, ge=1, description=_description("local_epochs"))
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description=_description("betas"))

    def goal(self) -> Objective:
        """The loss that clients minimise."""
        return SELECTOR_GOAL

    def batches(self) -> tuple[int, int]:
        """Pairs in a batch, and batches that make an optimiser step."""
        return self.batch_size // 2, self.accumulate


class ClusterSettings(SelectorSettings):
    """Settings of several selectors for clusters of clients: FedBiscuit, tables 3 and 4.

    >>> [ClusterSettings(selectors=count).intervals(500) for count in (3, 5)]
    [(50, 50), (50, 50)]
    >>> ClusterSettings().intervals(10), ClusterSettings(regroup_every=4).intervals(20)
    ((1, 1), (3, 4))
    """

    selectors: int = Field(
        3, ge=1, description="number of selectors and of clusters of clients; the paper: 3 and 5"
    )
    warmup_rounds: int | None = Field(
        None,
        ge=0,
        description="warm-up rounds of each selector before clients are grouped; default: 50, but at most "
        "half of all rounds for all selectors together",
    )
    regroup_every: int | None = Field(
        None,
        ge=1,
        description="rounds between groupings of the clients (the paper: 50 or 100); default: that of "
        "warmup_rounds",
    )

    def intervals(self, rounds: int) -> tuple[int, int]:
        """Return the warm-up rounds of each selector, and the rounds between groupings."""
        # In the paper, 5 selectors with 50 warm-up rounds each take half of 500 rounds.
        usual = max(1, min(50, rounds // (2 * self.selectors)))
        warmup = usual if self.warmup_rounds is None else self.warmup_rounds
        return warmup, self.regroup_every or usual

    def for_rounds(self, rounds: int) -> Self:
        """Fill in ``warmup_rounds`` and ``regroup_every``."""
        warmup, every = self.intervals(rounds)
        return self.model_copy(update={"warmup_rounds": warmup, "regroup_every": every})
