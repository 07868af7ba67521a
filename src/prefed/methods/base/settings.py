"""Settings that methods have in common: how a client trains."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from prefed.core import Objective, Optimizer, Phase
from prefed.core.strict import StrictModel
from prefed.train.losses import OBJECTIVES, PPO, objective

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
