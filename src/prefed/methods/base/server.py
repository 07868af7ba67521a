"""The server's moves in a round of FedAvg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefed.core import Download, Owner, Ownership, Round, State, Tensors, Upload
from prefed.merge import Aggregator, WeightFunction, lora
from prefed.methods.base import lr_schedule
from prefed.methods.base.settings import TrainingSettings


@dataclass(frozen=True)
class FedAvgServer:
    """Which tensors a method shares, and what the server does with them.

    The server's state holds the shared tensors φ, in one group, and whatever the merge rule keeps.

    Attributes:
        group: the name of φ's group in the server's state and in messages.
        apart: parts of the model that are no part of φ, though they are shared: they neither train nor merge.
    """

    settings: TrainingSettings
    aggregator: Aggregator
    rounds: int
    ownership: Ownership
    group: str = "model"
    apart: frozenset[str] = frozenset()

    # Names of tensors

    @property
    def shared(self) -> tuple[str, ...]:
        """All shared tensors, the LoRA rule's residuals among them.

        A model of a client's own consists of these. LoRA factors are worth nothing without the residual that
        they were trained on.
        """
        return self._together(self.ownership.names(Owner.SHARED))

    def _together(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of ``names`` that are not set apart."""
        return tuple(name for name in names if self.aggregator.layout[name].part not in self.apart)

    @property
    def shared_trainable(self) -> tuple[str, ...]:
        """The shared tensors that clients train in some round: all of them but the LoRA rule's residuals."""
        return tuple(name for name in self.shared if self.aggregator.layout[name].part != lora.RESIDUAL)

    def trainable(self, now: Round, *owners: Owner) -> tuple[str, ...]:
        """The tensors of ``owners`` (default: shared and personal) that train in this round.

        The LoRA rule may let some of the shared ones rest.
        """
        names = self._together(self.aggregator.trainable(self.ownership, now.number))
        return tuple(name for name in names if not owners or self.ownership.owners[name] in owners)

    # The server

    def init_server(self, initial: Tensors) -> State:
        """The shared tensors as they start, φ⁰."""
        state = self.aggregator.init(initial.select(self.shared), self.group)
        return state.update(values=lr_schedule.begin(self.settings))

    def send(self, server: State, client: str, now: Round) -> Download:
        """Broadcast: the shared tensors φ, and the learning-rate schedule's numbers."""
        return Download({self.group: server.tensors[self.group]}, lr_schedule.announce(server))

    def merge(
        self, server: State, uploads: Sequence[Upload], now: Round, weigh: WeightFunction | None = None
    ) -> State:
        """φ ← the merge of the φ_i: their mean by n_i, unless ``[merge]`` or ``weigh`` says otherwise."""
        names = self.trainable(now, Owner.SHARED)
        merged = self.aggregator.merge(server, uploads, now, self.group, weigh, names)
        return self.advance(merged, uploads)

    def advance(self, server: State, uploads: Sequence[Upload]) -> State:
        """The server's state with the learning-rate schedule advanced by one round."""
        return lr_schedule.advance(server, uploads, robust=self.aggregator.config.rule != "mean")

    def publish(self, server: State, client: str) -> Download:
        """What predictions need of the server: φ."""
        return Download({self.group: server.tensors[self.group]})

    def figures(self, server: State) -> dict[str, float]:
        """For the round log: the merge rule's own figures and, on a plateau schedule, the rate's factor."""
        return {**self.aggregator.figures(server, self.group), **lr_schedule.announce(server)}
