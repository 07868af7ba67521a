"""A phase of a visit, as data: what a client trains, on which loss, for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from prefed.core.ownership import Owner, Ownership
from prefed.core.tensors import Tensors


@dataclass(frozen=True)
class Objective:
    """A loss by name with its settings, e.g. ``Objective("dpo", {"beta": 0.1})``.

    The names are those of :data:`prefed.train.losses.OBJECTIVES`, ``"ppo"``, and for selectors
    ``"choice"`` and ``"latent"``.
    """

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))


@dataclass(frozen=True)
class Optimizer:
    """A local optimiser. ``clip`` bounds the gradient's Euclidean norm before the step (0: no bound)."""

    name: Literal["adamw", "adam", "sgd", "rmsprop"] = "adamw"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0


@dataclass(frozen=True)
class Proximal:
    """Adds ``strength / 2 · ‖φ − to‖²`` over the tensors of ``to`` to the loss."""

    strength: float
    to: Tensors


@dataclass(frozen=True)
class Penalty:
    """Adds ``strength · Σ|t|`` (``"l1"``), ``strength · ‖t‖²`` (``"l2"``) or, for ``"gate"``,
    ``strength · Σ sigmoid(t)`` over the named tensors to the loss.
    """

    kind: Literal["l1", "l2", "gate"]
    strength: float
    names: tuple[str, ...]


@dataclass(frozen=True)
class Moments:
    """What an optimiser remembers of the steps it took.

    Attributes:
        slots: e.g. ``"exp_avg"`` → one number for each element that trains; empty before the first step.
        steps: how many steps it took.
    """

    slots: Mapping[str, Tensors] = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True)
class Phase:
    """One stretch of local training: which tensors, on what loss, for how long, with which optimiser.

    Exactly one of ``steps`` and ``epochs`` is given. A step draws ``batch_size · accumulate`` pairs.

    Attributes:
        name: names the phase's randomness; unique within a visit.
        train: names of the tensors that train; all others keep their values.
        rates: learning rates that differ from the optimiser's, by tensor name.
        proximal: a pull towards given tensors (FedProx, Ditto, pFedMe, FedAMP).
        correction: added to the gradient of the tensors it names (SCAFFOLD's c − c_i).
        penalties: norms added to the loss.
        memory: values that the objective carries from step to step (the PDPO loss's ``scale``).
        moments: what the optimiser remembers at the start. With ``None`` it is new, and the result has no
            ``moments``.
        constants: groups of tensors that the objective reads, such as what a server tells of other clients.
        beside: tensors that train with the model and are no part of it, since their size is not the model's.
            Their optimiser is new in each phase. ``rates`` may name them.

    Raises:
        ValueError: nothing is trained, or not exactly one of steps and epochs is given.
    """

    name: str
    train: tuple[str, ...]
    objective: Objective
    optimizer: Optimizer
    batch_size: int
    steps: int | None = None
    epochs: int | None = None
    accumulate: int = 1
    rates: Mapping[str, float] = field(default_factory=dict)
    proximal: Proximal | None = None
    correction: Tensors | None = None
    penalties: tuple[Penalty, ...] = ()
    memory: Mapping[str, float] = field(default_factory=dict)
    moments: Moments | None = None
    constants: Mapping[str, Tensors] = field(default_factory=dict)
    beside: Tensors | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"phase {self.name!r}: give exactly one of steps and epochs")
        if not self.train:
            raise ValueError(f"phase {self.name!r} trains nothing")

    def check(self, ownership: Ownership) -> None:
        """Check that every tensor that this phase trains may be trained.

        Raises:
            ValueError: it would train a frozen tensor, or one that the model does not have.
        """
        trainable = set(ownership.names(Owner.SHARED, Owner.PERSONAL))
        frozen = [name for name in self.train if name not in trainable]
        if frozen:
            raise ValueError(f"phase {self.name!r} would train what is frozen: {', '.join(frozen)}")

    def at_rates(self, change: Callable[[float], float]) -> Phase:
        """This phase with ``change(rate)`` in place of each learning rate."""
        return replace(
            self,
            optimizer=replace(self.optimizer, lr=change(self.optimizer.lr)),
            rates={name: change(rate) for name, rate in self.rates.items()},
        )


@dataclass(frozen=True)
class PhaseResult:
    """The result of a phase.

    Attributes:
        tensors: all tensors of the model, those of ``Phase.train`` with their new values.
        loss: mean over the steps of the batch loss (without proximal terms and penalties).
        steps: optimiser steps taken.
        pairs: preference pairs seen, repeats counted.
        figures: means over the steps of the objective's own figures, e.g. ``margin``.
        memory: the objective's values after the last step, as :attr:`Phase.memory` takes them.
        moments: what the optimiser remembers after the last step; ``None`` where ``Phase.moments`` is.
        beside: ``Phase.beside`` after the last step.
    """

    tensors: Tensors
    loss: float
    steps: int
    pairs: int
    figures: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    moments: Moments | None = None
    beside: Tensors | None = None
