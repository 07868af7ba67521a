"""The state of a server or a client between rounds, and the messages between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

from prefed.core.tensors import Tensors

OPTIMIZER = "optimizer."
"""The prefix of groups of a private state that are an optimiser's memory. They are stored in full."""

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""Values that JSON stores without loss."""


@dataclass(frozen=True)
class State:
    """The whole state of a server or a client: named groups of tensors and plain values.

    It is written as safetensors and JSON and read again without loss. So a method whose state is all in here
    can be stopped and resumed to the bit.

    >>> state = State({"model": Tensors.empty()}, {"visits": 1})
    >>> state.update(values={"visits": 2}).values["visits"]
    2
    >>> state.number("visits", 0), state.number("scale", 1.0)
    (1.0, 1.0)
    """

    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    values: Mapping[str, Plain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    def number(self, name: str, default: float) -> float:
        """The number that is stored as ``name``, or ``default`` if nothing is.

        Raises:
            TypeError: the stored value is no number.
        """
        value = self.values.get(name, default)
        if not isinstance(value, int | float):
            raise TypeError(f"{name!r} of a state is {value!r}, not a number")
        return float(value)

    def update(
        self, tensors: Mapping[str, Tensors] | None = None, values: Mapping[str, Plain] | None = None
    ) -> State:
        """A copy with these groups and values added or replaced."""
        return replace(
            self, tensors={**self.tensors, **(tensors or {})}, values={**self.values, **(values or {})}
        )


@dataclass(frozen=True)
class Download:
    """A server's message to one client: groups of tensors and numbers."""

    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """A client's message to the server: all that the server sees of a visit.

    Attributes:
        weight: the client's number of training pairs n_i.
        tensors: groups of shared tensors, e.g. ``{"model": …}``.
        scalars: numbers that the exchange declares, e.g. the mean training loss.
        sent_at: the round in which the client got what it started from: the state that the round before
            left.
    """

    client: str
    weight: float
    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    sent_at: int = 0
