"""Optimisers that go on where they stood at a client's last visit, whatever the method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from prefed.core import Download, Exchange, Moments, Phase, State, Tensors, Trained, Upload, Visit

__all__ = ["remembering"]


class _Desk:
    """A visit whose phases start with what their optimisers left, and leave what they then hold.

    Phases ``inner/0``, ``inner/1`` share one optimiser. Where what trains is not what trained before, as
    under RoLoRA, there is nothing to go on from.
    """

    def __init__(self, visit: Visit, private: State) -> None:
        self._visit, self._private = visit, private

    def __getattr__(self, name: str) -> Any:
        return getattr(self._visit, name)

    def train(self, tensors: Tensors, phase: Phase) -> Trained:
        name = f"optimizer.{phase.name.partition('/')[0]}"
        held = self._held(name, phase)
        trained = self._visit.train(tensors, replace(phase, moments=held))
        if trained.moments is not None:
            groups = {f"{name}.{slot}": value for slot, value in trained.moments.slots.items()}
            self._private = self._private.update(groups, {name: trained.moments.steps})
        return trained

    def _held(self, name: str, phase: Phase) -> Moments:
        steps, slots = self._private.values.get(name), {}
        for group, value in self._private.tensors.items():
            owner, _, slot = group.rpartition(".")
            if owner == name:
                if set(value) != set(phase.train):
                    return Moments()
                slots[slot] = value
        return Moments(slots, steps) if isinstance(steps, int) else Moments()

    def keep(self, state: State) -> State:
        """``state`` with what the optimisers hold, which the client alone sees."""
        mine = "optimizer."
        return state.update(
            {name: group for name, group in self._private.tensors.items() if name.startswith(mine)},
            {name: value for name, value in self._private.values.items() if name.startswith(mine)},
        )


def remembering(exchange: Exchange) -> Exchange:
    """``exchange`` with local optimisers that are kept from visit to visit in the client's private state."""

    def work(visit: Visit, private: State, download: Download) -> tuple[Upload, State]:
        desk = _Desk(visit, private)
        upload, state = exchange.work(cast("Visit", desk), private, download)
        return upload, desk.keep(state)

    return replace(exchange, work=work)
