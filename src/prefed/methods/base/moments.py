"""Optimisers that go on where they stood at a client's last visit, whatever the method."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

from prefed.core import (
    OPTIMIZER,
    ClientTrainer,
    Download,
    Exchange,
    Moments,
    Phase,
    PhaseResult,
    State,
    Tensors,
    Upload,
)

__all__ = ["remembering"]


class _Desk:
    """A visit whose phases start with what their optimisers left, and leave what they then hold.

    Phases ``inner/0``, ``inner/1`` share one optimiser. Where a phase trains now these tensors and now those,
    as under RoLoRA, it has one for each set.
    """

    def __init__(self, trainer: ClientTrainer, private: State) -> None:
        self._visit, self._private = trainer, private

    def __getattr__(self, name: str) -> Any:
        return getattr(self._visit, name)

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        name, held = self._held(phase)
        trained = self._visit.train(tensors, replace(phase, moments=held))
        if trained.moments is not None:
            groups = {f"{name}.{slot}": value for slot, value in trained.moments.slots.items()}
            self._private = self._private.update(groups, {name: trained.moments.steps})
        return trained

    def _held(self, phase: Phase) -> tuple[str, Moments]:
        """What the optimiser of ``phase`` is called, and what it remembers."""
        first = OPTIMIZER + phase.name.partition("/")[0]
        for number in itertools.count(1):
            name = first if number == 1 else f"{first}+{number}"
            steps = self._private.values.get(name)
            if not isinstance(steps, int):
                break
            groups = self._private.tensors.items()
            slots = {g.rpartition(".")[2]: value for g, value in groups if g.rpartition(".")[0] == name}
            if all(set(value) == set(phase.train) for value in slots.values()):
                return name, Moments(slots, steps)
        return name, Moments()

    def keep(self, state: State) -> State:
        """``state`` with what the optimisers hold, which the client alone sees."""
        return state.update(
            {name: group for name, group in self._private.tensors.items() if name.startswith(OPTIMIZER)},
            {name: value for name, value in self._private.values.items() if name.startswith(OPTIMIZER)},
        )


def remembering(exchange: Exchange) -> Exchange:
    """``exchange`` with local optimisers that are kept from visit to visit in the client's private state."""

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        desk = _Desk(trainer, private)
        upload, state = exchange.work(cast("ClientTrainer", desk), private, download)
        return upload, desk.keep(state)

    return replace(exchange, work=work)
