"""Named tensors in one flat buffer, and the owner of each tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType

from prefed.core.lazy import torch


@dataclass(frozen=True)
class Entry:
    """Name, shape and position of one tensor of a model's trainable state.

    Attributes:
        name: unique, e.g. ``"lora/3/attn.c_attn/A"``.
        part: part of the model: ``"lora"``, ``"head"``, ``"bottleneck"``, …
        block: index of the transformer block; ``None`` outside the blocks.
        factor: ``"A"`` (rank × in) or ``"B"`` (out × rank) for a LoRA factor, else ``None``.
    """

    name: str
    shape: tuple[int, ...]
    part: str
    block: int | None = None
    factor: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors in a flat buffer, in order.

    Raises:
        ValueError: two entries have the same name.

    >>> layout = Layout((Entry("a", (2,), "lora"), Entry("b", (1, 3), "head")))
    >>> layout.size, layout.span("b")
    (5, (2, 5))
    """

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if len({entry.name for entry in self.entries}) != len(self.entries):
            names = [entry.name for entry in self.entries]
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"tensor names must be unique; repeated: {', '.join(repeated)}")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in buffer order."""
        return tuple(entry.name for entry in self.entries)

    @cached_property
    def size(self) -> int:
        """Number of elements in the buffer."""
        return sum(entry.size for entry in self.entries)

    @cached_property
    def _index(self) -> dict[str, tuple[Entry, int]]:
        index, offset = {}, 0
        for entry in self.entries:
            index[entry.name] = (entry, offset)
            offset += entry.size
        return index

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> Entry:
        return self._index[name][0]

    def span(self, name: str) -> tuple[int, int]:
        """Return the start and end index of tensor ``name`` in the buffer."""
        entry, offset = self._index[name]
        return offset, offset + entry.size

    def ranges(self, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
        """Return the fewest contiguous ranges of the buffer that contain exactly ``names``.

        >>> layout = Layout(tuple(Entry(n, (2,), "p") for n in "abc"))
        >>> layout.ranges(["b", "a"]), layout.ranges(["a", "c"])
        (((0, 4),), ((0, 2), (4, 6)))
        """
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self.span(name) for name in set(names)):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return tuple(merged)

    def select(self, names: Iterable[str]) -> Layout:
        """Return the layout of ``names`` only, in the order of this layout.

        Raises:
            KeyError: a name is not in the layout.
        """
        chosen = set(names)
        unknown = chosen - set(self.names)
        if unknown:
            raise KeyError(f"no such tensor: {', '.join(sorted(unknown))}")
        if len(chosen) == len(self.entries):
            return self
        return Layout(tuple(entry for entry in self.entries if entry.name in chosen))


class Tensors(Mapping[str, "torch.Tensor"]):
    """Immutable mapping from names to tensors that are views of one flat buffer.

    To copy, average or measure all tensors takes one operation on :attr:`flat`.

    Args:
        flat: 1-D, ``layout.size`` elements.

    Raises:
        ValueError: ``flat`` has another shape.

    >>> layout = Layout((Entry("a", (2,), "lora"), Entry("b", (1, 2), "head")))
    >>> t = Tensors(layout, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> t["b"], (t + t).norm() == 2 * t.norm()
    (tensor([[3., 4.]]), True)
    >>> t.select(["b"]).join(t.select(["a"])).layout.names
    ('b', 'a')
    """

    __slots__ = ("flat", "layout")

    def __init__(self, layout: Layout, flat: torch.Tensor) -> None:
        if flat.dim() != 1 or flat.numel() != layout.size:
            raise ValueError(f"flat has shape {tuple(flat.shape)}; expected ({layout.size},)")
        self.layout = layout
        self.flat = flat.detach()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all elements."""
        return self.flat.dtype

    @staticmethod
    def zeros(layout: Layout, dtype: torch.dtype | None = None) -> Tensors:
        """Return zeros in ``layout``, float32 unless ``dtype`` is given."""
        return Tensors(layout, torch.zeros(layout.size, dtype=dtype or torch.float32))

    @staticmethod
    def gather(layout: Layout, values: Mapping[str, torch.Tensor]) -> Tensors:
        """Copy ``values`` into one buffer; they must contain all names of ``layout``."""
        if not layout.entries:
            return Tensors.zeros(layout)
        return Tensors(layout, torch.cat([values[name].detach().reshape(-1) for name in layout.names]))

    @staticmethod
    def empty() -> Tensors:
        """Return a mapping without tensors."""
        return Tensors.zeros(Layout(()))

    def __getitem__(self, name: str) -> torch.Tensor:
        start, stop = self.layout.span(name)
        return self.flat[start:stop].view(self.layout[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.entries)

    def __repr__(self) -> str:
        return f"Tensors({len(self)} tensors, {self.layout.size} elements, {self.flat.dtype})"

    def select(self, names: Iterable[str]) -> Tensors:
        """Return the named tensors in the order of this layout: a view if contiguous, else a copy."""
        layout = self.layout.select(names)
        if layout is self.layout:
            return self
        ranges = self.layout.ranges(layout.names)
        if len(ranges) == 1:
            return Tensors(layout, self.flat[slice(*ranges[0])])
        return Tensors.gather(layout, self)

    def replace(self, *others: Mapping[str, torch.Tensor]) -> Tensors:
        """Return a copy with the tensors of ``others`` replaced; later mappings override earlier ones.

        Raises:
            KeyError: a name is not in the layout.
        """
        result = self.clone()
        for other in others:
            if isinstance(other, Tensors) and other.layout.entries:
                ranges = self.layout.ranges(other.layout.names)
                if len(ranges) == 1 and self.layout.select(other.layout.names).names == other.layout.names:
                    other.copy_to(result.flat[slice(*ranges[0])])
                    continue
            for name, value in other.items():
                result[name].copy_(value)
        return result

    def join(self, other: Tensors) -> Tensors:
        """Return these tensors followed by those of ``other``. The names must be disjoint."""
        if not other.layout.entries:
            return self
        if not self.layout.entries:
            return other
        return Tensors(Layout(self.layout.entries + other.layout.entries), torch.cat([self.flat, other.flat]))

    def copy_to(self, flat: torch.Tensor) -> None:
        """Copy all elements to a vector of this layout, on any device."""
        flat.copy_(self.flat)

    def clone(self) -> Tensors:
        """Return a copy that shares no memory with this one."""
        return Tensors(self.layout, self.flat.clone())

    def to(self, dtype: torch.dtype) -> Tensors:
        """Return the same values in another dtype."""
        return Tensors(self.layout, self.flat.to(dtype))

    def _operand(self, other: Tensors | float) -> torch.Tensor | float:
        if isinstance(other, Tensors):
            if other.layout.names != self.layout.names:
                raise ValueError("arithmetic requires Tensors with equal layouts")
            return other.flat
        return other

    def __add__(self, other: Tensors | float) -> Tensors:
        return Tensors(self.layout, self.flat + self._operand(other))

    def __sub__(self, other: Tensors | float) -> Tensors:
        return Tensors(self.layout, self.flat - self._operand(other))

    def __mul__(self, other: Tensors | float) -> Tensors:
        return Tensors(self.layout, self.flat * self._operand(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Tensors | float) -> Tensors:
        return Tensors(self.layout, self.flat / self._operand(other))

    def __neg__(self) -> Tensors:
        return Tensors(self.layout, -self.flat)

    def norm(self) -> float:
        """Return the Euclidean norm over all elements, accumulated in float64."""
        return float(torch.linalg.vector_norm(self.flat.double()))

    def isfinite(self) -> bool:
        """Return whether no element is NaN or infinite."""
        # NaN and infinity survive a sum, at a tenth of the cost. A sum of finite elements may overflow.
        return bool(torch.isfinite(self.flat.sum())) or bool(torch.isfinite(self.flat).all())

    def equal(self, other: Tensors) -> bool:
        """Return whether names, shapes, dtype and bits are equal."""
        return (
            self.layout.names == other.layout.names
            and self.flat.dtype == other.flat.dtype
            and torch.equal(self.flat, other.flat)
        )


class Layered(Tensors):
    """Tensors from several mappings without a copy; later mappings override earlier ones.

    The mappings must not change. :attr:`flat` is a new vector each time; :meth:`copy_to` avoids that.

    Args:
        layers: mappings that together contain every tensor of ``layout``, in any dtype.
        dtype: dtype of the returned tensors.

    Raises:
        ValueError: a tensor of ``layout`` is missing.

    >>> layout = Layout((Entry("a", (2,), "lora"), Entry("b", (1,), "head")))
    >>> base = Tensors(layout, torch.tensor([1.0, 2.0, 3.0]))
    >>> Layered(layout, base, {"b": torch.tensor([4.0])}).flat
    tensor([1., 2., 4.])
    """

    __slots__ = ("_dtype", "_layers")

    def __init__(
        self, layout: Layout, *layers: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
    ) -> None:
        self.layout, self._dtype = layout, dtype or torch.float32
        self._layers = {name: layer for layer in layers for name in layer}
        missing = [name for name in layout.names if name not in self._layers]
        if missing:
            raise ValueError(f"no layer has the tensors {', '.join(missing)}")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all elements."""
        return self._dtype

    @property
    def flat(self) -> torch.Tensor:  # type: ignore[override]
        """A new vector of all elements."""
        flat = torch.empty(self.layout.size, dtype=self._dtype)
        self.copy_to(flat)
        return flat

    def __getitem__(self, name: str) -> torch.Tensor:
        self.layout[name]
        return self._layers[name][name].detach().to(self._dtype)

    def copy_to(self, flat: torch.Tensor) -> None:
        """Copy all elements to a vector of this layout, on any device."""
        for name in self.layout.names:
            flat[slice(*self.layout.span(name))].copy_(self._layers[name][name].detach().reshape(-1))

    def select(self, names: Iterable[str]) -> Tensors:
        """Return the named tensors in the order of this layout, without a copy."""
        layout = self.layout.select(names)
        layers = {id(layer): layer for layer in map(self._layers.__getitem__, layout.names)}
        if len(layers) == 1:
            (layer,) = layers.values()
            if isinstance(layer, Tensors) and layer.dtype == self._dtype:
                return layer.select(layout.names)
        return self if layout is self.layout else Layered(layout, self, dtype=self._dtype)

    def clone(self) -> Tensors:
        """Return a copy that shares no memory with the mappings."""
        return Tensors(self.layout, self.flat)


class Owner(Enum):
    """Whether a tensor trains, and whether it leaves the client."""

    FROZEN = "frozen"
    """Never trained and never sent."""
    SHARED = "shared"
    """Trained and sent. No other tensors leave a client."""
    PERSONAL = "personal"
    """Trained and kept on the client."""


@dataclass(frozen=True)
class Ownership:
    """Owner of every tensor of a model's trainable state.

    >>> layout = Layout((Entry("lora/0/A", (2,), "lora", 0, "A"), Entry("head", (3,), "head")))
    >>> ownership = Ownership.of(layout, lambda e: Owner.SHARED if e.part == "lora" else Owner.PERSONAL)
    >>> ownership.names(Owner.SHARED), ownership.names(Owner.FROZEN)
    (('lora/0/A',), ())
    >>> ownership.check(Layout(layout.entries[:1]))
    Traceback (most recent call last):
    ...
    ValueError: the method's ownership does not match the model; only in the ownership: head
    """

    owners: Mapping[str, Owner]

    def __post_init__(self) -> None:
        object.__setattr__(self, "owners", MappingProxyType(dict(self.owners)))

    @staticmethod
    def of(layout: Layout, owner: Callable[[Entry], Owner]) -> Ownership:
        """Return the ownership of ``layout`` in which each entry belongs to ``owner(entry)``."""
        return Ownership({entry.name: owner(entry) for entry in layout.entries})

    def names(self, *owners: Owner) -> tuple[str, ...]:
        """Return the names of the tensors that belong to any of ``owners``, in declaration order."""
        return tuple(name for name, owner in self.owners.items() if owner in owners)

    def select(self, tensors: Tensors, *owners: Owner) -> Tensors:
        """Return the tensors that belong to any of ``owners``."""
        return tensors.select(name for name in tensors if self.owners[name] in owners)

    def check(self, layout: Layout) -> None:
        """Check that this ownership covers exactly the tensors of ``layout``.

        Raises:
            ValueError: it does not; the message lists the names found on one side only.
        """
        ours, theirs = set(self.owners), set(layout.names)
        if ours == theirs:
            return
        difference = []
        if theirs - ours:
            difference.append(f"only in the model: {', '.join(sorted(theirs - ours))}")
        if ours - theirs:
            difference.append(f"only in the ownership: {', '.join(sorted(ours - theirs))}")
        raise ValueError(f"the method's ownership does not match the model; {'; '.join(difference)}")
