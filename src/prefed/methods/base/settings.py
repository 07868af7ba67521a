"""Settings that methods have in common: how a client trains on pairs, by offline PPO, or a selector.

Offline PPO is the objective of a baseline (FedPDPO, arXiv:2603.19741, D.3.1): FedDPO, Per-FedAvg, FedAMP,
FedPer and FedRep can each train on it: ``objective = "ppo"``. A frozen reward model scores the responses of
the fixed pairs. PPO also trains a critic, the part ``"value"``. The critic stays with its client in every
method.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from prefed.core import Objective, Optimizer, Phase
from prefed.core.strict_settings import StrictModel
from prefed.merge import lora
from prefed.train.losses import CHOICE, OBJECTIVES, PPO, objective

PAIRWISE = tuple(name for name, loss in OBJECTIVES.items() if not loss.needs_reward)
"""The objectives that any model can be trained on."""


class TrainingSettings(StrictModel):
    """How a client trains during a visit, whatever the loss.

    Attributes:
        reads: what the method's models give a pair; see :class:`~prefed.core.Method`. Pairs are tokenised
            for it.
    """

    reads: ClassVar[Literal["policy", "choice"]] = "policy"

    lr: float = Field(1e-4, gt=0, description="learning rate of the local optimiser")
    batch_size: int = Field(8, ge=1, description="preference pairs in a batch")
    accumulate: int = Field(1, ge=1, description="batches whose gradients make one optimiser step")
    local_steps: int | None = Field(
        None, ge=1, description="optimiser steps of a visit; give this or local_epochs"
    )
    local_epochs: int | None = Field(
        1, ge=1, description="passes of a visit over the client's pairs; give this or local_steps"
    )
    optimizer: Literal["adamw", "adam", "sgd", "rmsprop"] = Field("adamw", description="local optimiser")
    optimizer_state: Literal["new", "kept"] = Field(
        "new",
        description="what the optimiser finds at a visit: new, nothing; kept, what it left at the client's "
        "last visit, which stays on the client's disk",
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="decay rates of adamw's and adam's moment estimates"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd and rmsprop")
    weight_decay: float = Field(0.01, ge=0, description="weight decay of the local optimiser")
    clip: float = Field(1.0, ge=0, description="bound on the gradient's Euclidean norm; 0 for none")
    schedule: Literal["constant", "cosine", "plateau"] = Field(
        "constant",
        description="learning rate over the rounds: constant; cosine from lr towards lr_min; "
        "plateau: x 0.8 after each round whose mean training loss is above the round's before it",
    )
    lr_min: float = Field(1e-6, ge=0, description="where the cosine schedule ends")

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        # A length that is given alone replaces the default of the other.
        for given, other in (("local_steps", "local_epochs"), ("local_epochs", "local_steps")):
            has_default = cls.model_fields[other].default is not None
            if has_default and isinstance(values, dict) and values.get(given) is not None:
                return {other: None, **values}
        return values

    @model_validator(mode="after")
    def _coherent(self) -> TrainingSettings:
        if (self.local_steps is None) == (self.local_epochs is None):
            raise ValueError("give exactly one of local_steps and local_epochs")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {self.betas}")
        if self.schedule == "cosine" and self.lr_min > self.lr:
            raise ValueError(f"the cosine schedule falls: lr_min {self.lr_min:g} is above lr {self.lr:g}")
        return self

    @abstractmethod
    def goal(self) -> Objective:
        """The loss that clients minimise."""

    def batches(self) -> tuple[int, int]:
        """Pairs in a batch, and batches that make an optimiser step."""
        return self.batch_size, self.accumulate

    def step_pairs(self) -> int:
        """Pairs that make an optimiser step."""
        return math.prod(self.batches())

    def for_rounds(self, rounds: int) -> Self:
        """These settings in a run of ``rounds`` rounds: those that follow this number are filled in."""
        return self

    def passes(self, epochs: int) -> int:
        """How often a phase of ``epochs`` goes over the client's pairs."""
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
        """The phase that these settings describe.

        Args:
            name: names the phase's randomness.
            lr: a learning rate in place of the settings'.
            steps: optimiser steps; with ``epochs`` left out too, the settings' length.
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


class PersonalSettings(TrainingSettings):
    """How a client trains under a personalised method: FedPDPO (arXiv:2603.19741), section 5 and D.3."""

    accumulate: int = Field(2, ge=1, description=TrainingSettings.model_fields["accumulate"].description)
    schedule: Literal["constant", "cosine", "plateau"] = Field(
        "cosine", description=TrainingSettings.model_fields["schedule"].description
    )


class TwoPhaseSettings(PersonalSettings):
    """How a client trains in a visit with a phase for personal tensors and one for shared tensors.

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
        description="optimiser steps of the personal phase; left out with personal_epochs: local_steps, "
        "or one pass where the visit's length is given in passes",
    )
    personal_epochs: int | None = Field(
        None,
        ge=1,
        description="passes of the personal phase over the client's pairs, instead of personal_steps",
    )

    @model_validator(mode="after")
    def _one_personal_length(self) -> TwoPhaseSettings:
        if self.personal_steps is not None and self.personal_epochs is not None:
            raise ValueError("give personal_steps or personal_epochs, not both")
        return self

    def personal_phase(self) -> dict[str, Any]:
        """Rate and length of the personal phase, as :meth:`phase` takes them."""
        steps, epochs = self.personal_steps, self.personal_epochs
        if steps is None and epochs is None:
            steps, epochs = (self.local_steps, None) if self.local_steps is not None else (None, 1)
        return {"lr": self.personal_lr, "steps": steps, "epochs": epochs}


def _extras() -> str:
    """The settings of all objectives but ``beta``, each with the objectives that have it."""
    names: dict[str, list[str]] = {}
    for objective_name in PAIRWISE:
        for name in OBJECTIVES[objective_name].defaults:
            if name != "beta":
                names.setdefault(name, []).append(objective_name)
    return ", ".join(f"{name} ({', '.join(users)})" for name, users in names.items())


class LocalSettings(TrainingSettings):
    """How a client trains on its preferences: the base of most methods' settings.

    >>> LocalSettings(local_steps=3).local_epochs is None
    True
    >>> LocalSettings(objective="simpo").goal().settings["beta"]
    2.0
    """

    objective: str = Field("dpo", description=f"loss on preference pairs: {', '.join(PAIRWISE)}")
    beta: float = Field(
        0.1,
        gt=0,
        description="strength of the pull towards the reference; left out, the objective's own default",
    )
    objective_settings: dict[str, float] = Field(
        default_factory=dict, description=f"the objective's further settings: {_extras()}"
    )

    @model_validator(mode="before")
    @classmethod
    def _own_beta(cls, values: Any) -> Any:
        loss = OBJECTIVES.get(values.get("objective", "")) if isinstance(values, dict) else None
        if loss is not None and "beta" in loss.defaults:
            return {"beta": loss.defaults["beta"], **values}
        return values

    @model_validator(mode="after")
    def _known_objective(self) -> LocalSettings:
        if "beta" in self.objective_settings:
            raise ValueError("beta is a setting of the method itself, not one of objective_settings")
        self.goal()
        return self

    def goal(self) -> Objective:
        """The loss that clients minimise, its settings checked and complete.

        Raises:
            ValueError: there is no such objective, this method cannot train on it, or it has no such setting.
        """
        if self.objective == PPO.name:
            raise ValueError(
                "objective 'ppo' (offline PPO against a reward model) is one of feddpo, perfedavg, fedamp, "
                f"fedper and fedrep; this method trains on pairs: {', '.join(PAIRWISE)}"
            )
        loss = objective(self.objective)
        if loss.needs_reward:
            raise ValueError(
                f"objective {loss.name!r} reads a reward head, which method 'fedpdpo' alone has; "
                f"this method trains on: {', '.join(PAIRWISE)}"
            )
        beta = {"beta": self.beta} if "beta" in loss.defaults else {}
        return Objective(loss.name, loss.resolve({**beta, **self.objective_settings}))


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


SELECTOR_GOAL = Objective(CHOICE.name)
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
        return SELECTOR_GOAL

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
