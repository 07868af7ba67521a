"""Who owns which tensor of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from prefed.core.tensors import Entry, Layout, Tensors


class Owner(Enum):
    """What may happen to a tensor."""

    FROZEN = "frozen"
    """It never trains and is never sent."""
    SHARED = "shared"
    """It trains, and it travels. No other kind of tensor leaves a client."""
    PERSONAL = "personal"
    """It trains, and it stays with its client."""


@dataclass(frozen=True)
class Ownership:
    """The owner of every movable tensor of a model.

    >>> layout = Layout((Entry("lora/0/A", (2,), "lora", 0, "A"), Entry("head", (3,), "head")))
    >>> ownership = Ownership.of(layout, lambda e: Owner.SHARED if e.part == "lora" else Owner.PERSONAL)
    >>> ownership.names(Owner.SHARED), ownership.names(Owner.FROZEN)
    (('lora/0/A',), ())
    >>> ownership.check(Layout(layout.entries[:1]))
    Traceback (most recent call last):
    ...
    ValueError: the method's ownership does not cover the model; in the ownership alone: head
    """

    owners: Mapping[str, Owner]

    def __post_init__(self) -> None:
        object.__setattr__(self, "owners", MappingProxyType(dict(self.owners)))

    @staticmethod
    def of(layout: Layout, owner: Callable[[Entry], Owner]) -> Ownership:
        """The ownership of ``layout`` in which each entry's owner is ``owner(entry)``."""
        return Ownership({entry.name: owner(entry) for entry in layout.entries})

    def names(self, *owners: Owner) -> tuple[str, ...]:
        """The tensors that belong to any of ``owners``, in declaration order."""
        return tuple(name for name, owner in self.owners.items() if owner in owners)

    def select(self, tensors: Tensors, *owners: Owner) -> Tensors:
        """The tensors that belong to any of ``owners``."""
        return tensors.select(name for name in tensors if self.owners[name] in owners)

    def check(self, layout: Layout) -> None:
        """Confirm that this ownership names exactly the tensors of ``layout``.

        Raises:
            ValueError: it does not; the message holds the names that one side has and the other lacks.
        """
        ours, theirs = set(self.owners), set(layout.names)
        if ours == theirs:
            return
        difference = []
        if theirs - ours:
            difference.append(f"in the model alone: {', '.join(sorted(theirs - ours))}")
        if ours - theirs:
            difference.append(f"in the ownership alone: {', '.join(sorted(ours - theirs))}")
        raise ValueError(f"the method's ownership does not cover the model; {'; '.join(difference)}")
