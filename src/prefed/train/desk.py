"""A client's place at the bench: core's ``Visit`` over real data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prefed.core import Key, Objective, Parts, Phase, Round, Tensors, Trained, Upload
from prefed.train.bench import Bench
from prefed.train.ppo import Held
from prefed.train.references import Rows

__all__ = ["Desk"]


@dataclass(frozen=True)
class Desk:
    """One client's visit in one exchange of one round.

    Attributes:
        bench: where phases run.
        client: the client's id.
        rows: its training pairs.
        validation: its validation pairs.
        round: where the run stands.
        key: this client's randomness in this exchange.
        parts: who owns which tensor.
        held: what the visit's phases have in common.
    """

    bench: Bench
    client: str
    rows: Rows
    validation: Rows
    round: Round
    key: Key
    parts: Parts
    held: Held = field(default_factory=Held, compare=False)

    @property
    def size(self) -> int:
        """Number of training pairs."""
        return len(self.rows)

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from."""
        return self.bench.backbone.initial

    def train(self, tensors: Tensors, phase: Phase) -> Trained:
        """Run ``phase`` from ``tensors``."""
        return self.bench.train(tensors, phase, self.rows, self.key, self.parts, self.held)

    def gradient(
        self, tensors: Tensors, objective: Objective, *, batch_size: int, name: str
    ) -> tuple[Tensors, float]:
        """Gradient and value of the mean loss over one batch drawn at ``key.at(name)``."""
        key = self.key.at(name)
        return self.bench.gradient(tensors, objective, self.rows, key, self.parts, batch_size=batch_size)

    def loss(self, tensors: Tensors, objective: Objective, split: Literal["train", "validation"]) -> float:
        """Mean loss over a split; a client without validation pairs uses its training pairs."""
        rows = self.validation if split == "validation" and len(self.validation) else self.rows
        return self.bench.loss(tensors, objective, rows)

    def assemble(self, *groups: Tensors) -> Tensors:
        """``initial`` with the given tensors put in, later groups over earlier ones."""
        return self.initial.replace(*groups)

    def upload(self, tensors: Mapping[str, Tensors], scalars: Mapping[str, float] | None = None) -> Upload:
        """An upload from this client in this round, weighted by its training pairs."""
        return Upload(self.client, float(self.size), tensors, scalars or {}, self.round.number)
