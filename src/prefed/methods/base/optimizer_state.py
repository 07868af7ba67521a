"""Local optimisers that keep their state between visits of a client, for any method."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

from prefed.core import ClientTrainer, Download, Exchange, State, Tensors, Upload
from prefed.core.method import OPTIMIZER, Moments, Phase, PhaseResult


class _KeepingTrainer:
    """A client trainer that restores the optimiser state of earlier phases of the same name.

    Phases ``inner/0``, ``inner/1`` share one optimiser. If a phase alternates between sets of tensors, as
    under RoLoRA, each set has its own optimiser.
    """

    def __init__(self, trainer: ClientTrainer, private: State) -> None:
        self._trainer, self._private = trainer, private

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        name, moments = self._moments(phase)
        result = self._trainer.train(tensors, replace(phase, moments=moments))
        if result.moments is not None:
            groups = {f"{name}.{slot}": value for slot, value in result.moments.slots.items()}
            self._private = self._private.update(groups, {name: result.moments.steps})
        return result

    def _moments(self, phase: Phase) -> tuple[str, Moments]:
        """Return the name and the state of the optimiser of ``phase``."""
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
        """Add the optimiser state, which never leaves the client, to ``state``."""
        return state.update(
            {name: group for name, group in self._private.tensors.items() if name.startswith(OPTIMIZER)},
            {name: value for name, value in self._private.values.items() if name.startswith(OPTIMIZER)},
        )


def keep_optimizer_state(exchange: Exchange) -> Exchange:
    """Keep the state of local optimisers in the private state of the client."""

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        keeping = _KeepingTrainer(trainer, private)
        upload, state = exchange.work(cast("ClientTrainer", keeping), private, download)
        return upload, keeping.keep(state)

    return replace(exchange, work=work)
