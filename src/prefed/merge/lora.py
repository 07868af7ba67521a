"""LoRA rules: owners of the factors, factors that train in a round, and the mean of the products B A.

The update of a LoRA module is s · B A, and the mean of products is not the product of means.

========== ================ ================================================= ====================
rule       A, B are         the server                                        source
========== ================ ================================================= ====================
fedit      shared, shared   averages A and B separately                       arXiv:2305.05644
ffa        frozen, shared   averages B; A keeps its initial value             arXiv:2403.12313
rolora     shared, shared   as fedit; odd rounds train B, even rounds A       arXiv:2502.01755
fedsa      shared, personal averages A                                        arXiv:2410.01463
fedex      shared, shared   as fedit, and adds mean(B A) − B̄ Ā to the base    arXiv:2410.09432
flexlora   shared, shared   splits mean(B A) by its singular values           arXiv:2402.11505
flora      shared, shared   adds mean(B A) to the base; a new A and B = 0     arXiv:2409.05976
========== ================ ================================================= ====================

With ``ffa``, and within a round of ``rolora``, all clients have the same value of one factor, so averaging
the other gives the exact mean product. With ``fedex``, ``flexlora`` and ``flora``, the reference is still the
original base model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefed.core import Entry, Key, Layout, Owner, Ownership, Tensors
from prefed.core.lazy import torch
from prefed.merge.config import LoraRule
from prefed.merge.means_distances import weighted_mean

if TYPE_CHECKING:
    from torch import Tensor


LORA = "lora"
"""The part of a model with its LoRA factors."""
RESIDUAL = "residual"
"""The part that ``fedex`` and ``flora`` add to: entries ``residual/<block>/<module>/W``, out × in."""
WITH_RESIDUAL: frozenset[LoraRule] = frozenset({"fedex", "flora"})
"""The rules that need this part."""


@dataclass(frozen=True)
class Module:
    """The names of the factors of a LoRA module, e.g. ``lora/3/attn.c_attn/A`` and ``…/B``."""

    a: str
    b: str

    @property
    def residual(self) -> str:
        """The name of the dense residual, e.g. ``residual/3/attn.c_attn/W``."""
        return "/".join((RESIDUAL, *self.a.split("/")[1:-1], "W"))


def modules(layout: Layout) -> tuple[Module, ...]:
    """Return the LoRA modules with both factors in ``layout``.

    >>> a, b = Entry("lora/0/q/A", (2, 5), "lora", 0, "A"), Entry("lora/0/q/B", (4, 2), "lora", 0, "B")
    >>> layout = Layout((a, b))
    >>> modules(layout)[0].residual
    'residual/0/q/W'
    """
    firsts = (entry.name for entry in layout.entries if entry.part == LORA and entry.factor == "A")
    both, there = (Module(name, name.removesuffix("A") + "B") for name in firsts), set(layout.names)
    return tuple(module for module in both if module.b in there)


def needs(rule: LoraRule) -> frozenset[str]:
    """Return the parts of a model that ``rule`` needs in addition to the LoRA."""
    return frozenset({RESIDUAL}) if rule in WITH_RESIDUAL else frozenset()


def owner(rule: LoraRule, entry: Entry) -> Owner:
    """Return the owner of an entry shared by the method, according to ``rule``.

    A residual is shared under ``fedex`` and ``flora``, although no client trains it; otherwise it is frozen.

    >>> factor = Entry("lora/0/q/A", (2, 5), "lora", 0, "A")
    >>> owner("fedit", factor), owner("ffa", factor)
    (<Owner.SHARED: 'shared'>, <Owner.FROZEN: 'frozen'>)
    """
    if entry.part == RESIDUAL and rule not in WITH_RESIDUAL:
        return Owner.FROZEN
    if entry.part == LORA and entry.factor == "A" and rule == "ffa":
        return Owner.FROZEN
    if entry.part == LORA and entry.factor == "B" and rule == "fedsa":
        return Owner.PERSONAL
    return Owner.SHARED


def ownership(rule: LoraRule, layout: Layout, owner_of: Callable[[Entry], Owner]) -> Ownership:
    """Return the owner of each entry, applying the rule to the entries that ``owner_of`` shares.

    A residual counts as shared if both factors of its module are, and as frozen otherwise.
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
    """Return those of ``names`` that clients train in round ``round_number``, counted from 1.

    Under ``rolora``, B trains in odd rounds, since A has no gradient while B = 0.

    >>> a, b = Entry("lora/0/q/A", (2, 5), "lora", 0, "A"), Entry("lora/0/q/B", (4, 2), "lora", 0, "B")
    >>> layout = Layout((a, b))
    >>> trainable("rolora", layout.names, layout, 1), trainable("rolora", layout.names, layout, 2)
    (('lora/0/q/B',), ('lora/0/q/A',))
    """
    factor = {"ffa": "A", "rolora": "A" if round_number % 2 else "B"}.get(rule, "")
    resting = {e.name for e in layout.entries if (e.part, e.factor) == (LORA, factor) or e.part == RESIDUAL}
    return tuple(name for name in names if name not in resting)


def without_residuals(tensors: Tensors) -> Tensors:
    """Return all tensors except the residuals, which only the server changes."""
    return tensors.select(entry.name for entry in tensors.layout.entries if entry.part != RESIDUAL)


def first_rows(tensors: Tensors, layout: Layout) -> Tensors:
    """Return the tensors of ``layout``: of factors with a lower rank there, the first rows and columns."""
    parts = {e.name: tensors[e.name][tuple(map(slice, e.shape))] for e in layout.entries}
    return Tensors.gather(layout, parts)


def with_rows_above(value: Tensors, rank: int, current: Tensors) -> Tensors:
    """Return ``value``, padded from ``rank``, with those rows of A and columns of B of ``current`` instead.

    As zeros, they would never train again: the gradient of each is a product with the other.

    >>> from prefed.core import Entry
    >>> layout = Layout((Entry("lora/0/q/A", (2, 1), "lora", 0, "A"),))
    >>> padded, current = (Tensors(layout, torch.tensor(x)) for x in ([3.0, 0.0], [1.0, 2.0]))
    >>> with_rows_above(padded, 1, current).flat
    tensor([3., 2.])
    """
    result = value.clone()
    for entry in value.layout.entries:
        if entry.factor is not None:
            axis = 0 if entry.factor == "A" else 1
            more = max(0, entry.shape[axis] - rank)
            start = entry.shape[axis] - more
            result[entry.name].narrow(axis, start, more).copy_(current[entry.name].narrow(axis, start, more))
    return result


def change_norm(tensors: Tensors, origin: Tensors | None = None, scaling: float = 1.0) -> float:
    """Return the norm of the change of the adapted weights from ``origin`` to ``tensors``, residuals apart.

    It is ‖s (B A − B₀ A₀)‖_F over all modules, computed from d = B − B₀ and a = A − A₀ as d A + B₀ a, plus
    the norm of the residuals in ``tensors``, which uploads do not have.

    Args:
        tensors: both factors of each module.
        origin: B₀ and A₀; factors that it lacks, or has with another shape, are 0.
        scaling: s = α / rank of the LoRA.

    >>> from prefed.core import Entry
    >>> a, b = Entry("lora/0/q/A", (1, 2), "lora", 0, "A"), Entry("lora/0/q/B", (1, 1), "lora", 0, "B")
    >>> now, start = (Tensors(Layout((a, b)), torch.tensor(x)) for x in ([3.0, 4.0, 2.0], [0.0, 4.0, 2.0]))
    >>> change_norm(now, scaling=0.5), change_norm(now, start, scaling=0.5)
    (5.0, 3.0)
    """
    square = 0.0
    for module in modules(tensors.layout):
        b, a = tensors[module.b].double(), tensors[module.a].double()
        b0, a0 = _known(origin, module.b, b), _known(origin, module.a, a)
        left, right = torch.cat([b - b0, b0], dim=1), torch.cat([a, a - a0], dim=0)
        square += float(((left.T @ left) * (right @ right.T)).sum())
    dense = sum(float(tensors[e.name].norm()) ** 2 for e in tensors.layout.entries if e.part == RESIDUAL)
    # Products of enormous factors may overflow to infinity, and their sum to NaN.
    return scaling * max(square, 0.0) ** 0.5 + dense**0.5 if math.isfinite(square) else math.inf


def _known(origin: Tensors | None, name: str, like: Tensor) -> Tensor:
    start = None if origin is None else origin.get(name)
    return torch.zeros_like(like) if start is None or start.shape != like.shape else start.double()


def product_error(values: Sequence[Tensors], weights: Sequence[float]) -> float:
    """Return ‖mean(B A) − B̄ Ā‖_F / ‖mean(B A)‖_F over all modules with both factors; 0 if all products are.

    Args:
        values: one per client.
        weights: one per client, summing to 1.
    """
    mean = weighted_mean(values, weights)
    error = whole = 0.0
    for module in modules(mean.layout):
        left, right = _lost(module, values, weights, mean)
        lost, product = _squares(left, right, mean[module.b].double(), mean[module.a].double())
        error += lost
        whole += product
    return (error / whole) ** 0.5 if whole else 0.0


def residuals(
    values: Sequence[Tensors], weights: Sequence[float], mean: Tensors, scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield FedEx-LoRA's correction of each base weight, s · [mean(B A) − B̄ Ā].

    Args:
        values: one per client, with both factors of each module.
        weights: one per client, summing to 1.
        mean: Ā and B̄ as received by clients, so that the correction includes their rounding.
        scaling: s = α / rank of the LoRA.

    Yields:
        Name of the residual, and its increment, float64 ``[out, in]``.
    """
    for module in modules(mean.layout):
        left, right = _lost(module, values, weights, mean)
        yield module.residual, scaling * (left @ right)


def stacked(
    values: Sequence[Tensors], weights: Sequence[float], scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield FLoRA's update of each base weight, s · Σ w_i B_i A_i (arXiv:2409.05976, section 3).

    It is one product of the stacked factors, B = [B_1 … B_n] and A = [w_1 A_1; …; w_n A_n]. Clients may have
    different ranks.

    Args:
        values: one per client, with both factors of each module.
        weights: one per client, summing to at most 1.
        scaling: s = α / rank of the LoRA.

    Yields:
        Name of the residual, and its increment, float64 ``[out, in]``.
    """
    for module in modules(values[0].layout):
        b = torch.cat([value[module.b].double() for value in values], dim=1)
        a = torch.cat([w * v[module.a].double() for v, w in zip(values, weights, strict=True)], dim=0)
        yield module.residual, scaling * (b @ a)


def restarted(layout: Layout, key: Key) -> dict[str, Tensor]:
    """Return a new LoRA by name: A ~ U(−1/√in, 1/√in), as in a new model, and B = 0.

    Each A is float64, drawn at its own name in ``key``.
    """
    factors = {}
    for module in modules(layout):
        rank, width = layout[module.a].shape
        draw = torch.rand(rank, width, dtype=torch.float64, generator=key.at("flora", module.a).torch())
        factors[module.a] = (2 * draw - 1) * width**-0.5
        factors[module.b] = torch.zeros(layout[module.b].shape, dtype=torch.float64)
    return factors


def _lost(
    module: Module, values: Sequence[Tensors], weights: Sequence[float], mean: Tensors
) -> tuple[Tensor, Tensor]:
    """Return stacked float64 factors ``[out, k]`` and ``[k, in]`` of mean(B A) − B̄ Ā, for rounded Ā and B̄.

    With b_i = B_i − B̄ and a_i = A_i − Ā, it is Σ w_i b_i a_i + (Σ w_i b_i) Ā + B̄ (Σ w_i a_i). The last two
    terms are due to rounding. For equal clients, the result is exactly zero.
    """
    mean_a, mean_b = mean[module.a].double(), mean[module.b].double()
    off_a = [value[module.a].double() - mean_a for value in values]
    off_b = [w * (value[module.b].double() - mean_b) for value, w in zip(values, weights, strict=True)]
    rest_a = sum((w * a for w, a in zip(weights, off_a, strict=True)), torch.zeros_like(mean_a))
    rest_b = sum(off_b, torch.zeros_like(mean_b))
    return torch.cat([*off_b, rest_b, mean_b], dim=1), torch.cat([*off_a, mean_a, rest_a], dim=0)


def _squares(left: Tensor, right: Tensor, b: Tensor, a: Tensor) -> tuple[float, float]:
    """Return ‖left @ right‖_F² and ‖left @ right + b @ a‖_F² without forming products of thin factors."""
    (rows, inner), columns = left.shape, right.shape[1]
    if inner * (rows + columns) >= rows * columns:
        product = left @ right
        return float(product.square().sum()), float((product + b @ a).square().sum())
    both_left, both_right = torch.cat([left, b], dim=1), torch.cat([right, a], dim=0)
    terms = (both_left.T @ both_left) * (both_right @ both_right.T)
    return max(float(terms[:inner, :inner].sum()), 0.0), max(float(terms.sum()), 0.0)


def flexlora(values: Sequence[Tensors], weights: Sequence[float]) -> tuple[dict[str, Tensor], float]:
    """Return the best factors of the given rank for mean(B A), per module.

    With mean(B A) = U Σ Vᵀ, they are B̂ = U_r Σ_r and Â = V_rᵀ. Â has orthonormal rows even if the product is
    zero, so B̂ always has a gradient. Signs are chosen so that the largest entry of each column of U is
    positive.

    Args:
        values: one per client, with both factors of each module.
        weights: one per client, summing to 1.

    Returns:
        The factors by name, in the dtype of ``values``; and the relative error
        ‖mean(B A) − B̂ Â‖_F / ‖mean(B A)‖_F over all modules.
    """
    factors: dict[str, Tensor] = {}
    cut = whole = 0.0
    for module in modules(values[0].layout):
        rank = values[0][module.a].shape[0]
        left = torch.cat([w * v[module.b].double() for v, w in zip(values, weights, strict=True)], dim=1)
        right = torch.cat([value[module.a].double() for value in values], dim=0)
        u, s, vt = _svd_of_product(left, right)
        cut += float(s[rank:].square().sum())
        whole += float(s.square().sum())
        u, s, vt = _padded(u[:, :rank], s[:rank], vt[:rank], rank)
        largest = u.abs().argmax(dim=0)
        signs = torch.where(u.gather(0, largest[None])[0] < 0, -1.0, 1.0).double()
        dtype = values[0].flat.dtype
        factors[module.b] = (u * (s * signs)).to(dtype)
        factors[module.a] = (vt * signs[:, None]).to(dtype)
    return factors, (cut / whole) ** 0.5 if whole else 0.0


def _svd_of_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin SVD of ``left @ right`` without forming a product of low rank."""
    if left.shape[1] >= min(left.shape[0], right.shape[1]):
        u, s, vt = torch.linalg.svd(left @ right, full_matrices=False)
        return u, s, vt
    left_basis, left_small = torch.linalg.qr(left)
    right_basis, right_small = torch.linalg.qr(right.T)
    u, s, vt = torch.linalg.svd(left_small @ right_small.T)
    return left_basis @ u, s, vt @ right_basis.T


def _padded(u: Tensor, s: Tensor, vt: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the decomposition with zeros to ``rank``, for a LoRA with a rank above the width of the module."""
    extra = rank - s.numel()
    if extra <= 0:
        return u, s, vt
    pad = torch.nn.functional.pad
    return pad(u, (0, extra)), pad(s, (0, extra)), pad(vt, (0, 0, 0, extra))
