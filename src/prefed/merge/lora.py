"""LoRA rules: who owns which factor, and which factors train in a round.

The update of a LoRA module is s · B A, and the mean of products is not the product of means.

========== ================ ================================================= ====================
rule       A, B are         the server                                        source
========== ================ ================================================= ====================
fedit      shared, shared   averages A and B apart                            arXiv:2305.05644
ffa        frozen, shared   averages B; A stays as drawn                      arXiv:2403.12313
rolora     shared, shared   as fedit; odd rounds train B, even rounds A       arXiv:2502.01755
fedsa      shared, personal averages A                                        arXiv:2410.01463
fedex      shared, shared   as fedit, and adds mean(B A) − B̄ Ā to the base    arXiv:2410.09432
flexlora   shared, shared   splits mean(B A) by its singular values           arXiv:2402.11505
========== ================ ================================================= ====================

With ``ffa``, and within a round of ``rolora``, one factor is the same on all clients. So the mean of the
other gives the exact mean product. With ``fedex`` and ``flexlora`` the reference stays the original base
model; their arithmetic is in :mod:`prefed.merge.lora_products`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prefed.core import Entry, Layout, Owner, Ownership, Tensors
from prefed.merge.config import LoraRule

LORA = "lora"
"""The part of a model that holds its LoRA factors."""
RESIDUAL = "residual"
"""The part that ``fedex`` adds to the base: entries ``residual/<block>/<module>/W``, out × in."""


@dataclass(frozen=True)
class Module:
    """The names of one LoRA module's factors, e.g. ``lora/3/attn.c_attn/A`` and ``…/B``."""

    a: str
    b: str

    @property
    def residual(self) -> str:
        """The name of its dense residual: ``residual/3/attn.c_attn/W``."""
        return "/".join((RESIDUAL, *self.a.split("/")[1:-1], "W"))


def modules(layout: Layout) -> tuple[Module, ...]:
    """The LoRA modules that have both factors in ``layout``.

    >>> a, b = Entry("lora/0/q/A", (2, 5), "lora", 0, "A"), Entry("lora/0/q/B", (4, 2), "lora", 0, "B")
    >>> layout = Layout((a, b))
    >>> modules(layout)[0].residual
    'residual/0/q/W'
    """
    firsts = (entry.name for entry in layout.entries if entry.part == LORA and entry.factor == "A")
    both = (Module(name, name.removesuffix("A") + "B") for name in firsts)
    return tuple(module for module in both if module.b in layout)


def needs(rule: LoraRule) -> frozenset[str]:
    """The parts of a model that ``rule`` needs besides the LoRA itself."""
    return frozenset({RESIDUAL}) if rule == "fedex" else frozenset()


def owner(rule: LoraRule, entry: Entry) -> Owner:
    """The owner that ``rule`` gives to an entry that the method shares.

    A residual is shared under ``fedex``, although no client trains it; otherwise it is frozen.

    >>> factor = Entry("lora/0/q/A", (2, 5), "lora", 0, "A")
    >>> owner("fedit", factor), owner("ffa", factor)
    (<Owner.SHARED: 'shared'>, <Owner.FROZEN: 'frozen'>)
    """
    if entry.part == RESIDUAL and rule != "fedex":
        return Owner.FROZEN
    if entry.part == LORA and entry.factor == "A" and rule == "ffa":
        return Owner.FROZEN
    if entry.part == LORA and entry.factor == "B" and rule == "fedsa":
        return Owner.PERSONAL
    return Owner.SHARED


def ownership(rule: LoraRule, layout: Layout, owner_of: Callable[[Entry], Owner]) -> Ownership:
    """The owner of each entry of ``layout``: for each that ``owner_of`` marks as shared, the rule decides.

    The residual of a module counts as shared if both of the module's factors do, and as frozen otherwise;
    ``owner_of`` has no say in it.
    """
    owners = {entry.name: owner_of(entry) for entry in layout.entries}
    for module in modules(layout):
        if module.residual in owners:
            both = {owners[module.a], owners[module.b]} == {Owner.SHARED}
            owners[module.residual] = Owner.SHARED if both else Owner.FROZEN

    def refined(entry: Entry) -> Owner:
        return owner(rule, entry) if owners[entry.name] is Owner.SHARED else owners[entry.name]

    return Ownership.of(layout, refined)


def trainable(rule: LoraRule, names: Iterable[str], layout: Layout, round_number: int) -> tuple[str, ...]:
    """Those of ``names`` that clients train in round ``round_number`` and then send; the first round is 1.

    Under ``rolora`` B trains in odd rounds, so also in the first: while B = 0, A has no gradient.

    >>> a, b = Entry("lora/0/q/A", (2, 5), "lora", 0, "A"), Entry("lora/0/q/B", (4, 2), "lora", 0, "B")
    >>> layout = Layout((a, b))
    >>> trainable("rolora", layout.names, layout, 1), trainable("rolora", layout.names, layout, 2)
    (('lora/0/q/B',), ('lora/0/q/A',))
    """
    resting = {"ffa": "A", "rolora": "A" if round_number % 2 else "B"}.get(rule)

    def moves(entry: Entry) -> bool:
        if entry.part == RESIDUAL:
            return False
        return not (entry.part == LORA and entry.factor is not None and entry.factor == resting)

    return tuple(name for name in names if moves(layout[name]))


def without_residuals(tensors: Tensors) -> Tensors:
    """All tensors but the residuals, which only the server changes."""
    return tensors.select(entry.name for entry in tensors.layout.entries if entry.part != RESIDUAL)
