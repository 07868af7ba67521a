"""The mean of the clients' LoRA products B A: what averaging A and B apart loses, and rules that keep it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prefed.core import Tensors
from prefed.core.lazy import torch
from prefed.merge.flat import weighted_mean
from prefed.merge.lora import Module, modules

if TYPE_CHECKING:
    from torch import Tensor


def product_error(values: Sequence[Tensors], weights: Sequence[float]) -> float:
    """‖mean(B A) − B̄ Ā‖_F / ‖mean(B A)‖_F over all modules: the error of averaging A and B apart.

    Args:
        values: one per client. A module is counted if both of its factors are there.
        weights: one per client, summing to 1.

    Returns:
        The relative error. It is 0 if one factor is the same on all clients, or if every product is zero.
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
    """FedEx-LoRA's correction of each module's base weight, s · [mean(B A) − B̄ Ā].

    Args:
        values: one per client, with both factors of each module.
        weights: one per client, summing to 1.
        mean: Ā and B̄ as clients will receive them. The correction includes their rounding.
        scaling: s = α / rank of the LoRA.

    Yields:
        Name of the residual and its increment ``[out, in]``, in float64.
    """
    for module in modules(mean.layout):
        left, right = _lost(module, values, weights, mean)
        yield module.residual, scaling * (left @ right)


def _lost(
    module: Module, values: Sequence[Tensors], weights: Sequence[float], mean: Tensors
) -> tuple[Tensor, Tensor]:
    """Stacked float64 factors ``[out, k]`` and ``[k, in]`` of mean(B A) − B̄ Ā, for rounded means Ā and B̄.

    With b_i = B_i − B̄ and a_i = A_i − Ā it is Σ w_i b_i a_i + (Σ w_i b_i) Ā + B̄ (Σ w_i a_i). The last two
    terms are due to rounding. For equal clients the result is exactly zero.
    """
    mean_a, mean_b = mean[module.a].double(), mean[module.b].double()
    off_a = [value[module.a].double() - mean_a for value in values]
    off_b = [w * (value[module.b].double() - mean_b) for value, w in zip(values, weights, strict=True)]
    rest_a = sum((w * a for w, a in zip(weights, off_a, strict=True)), torch.zeros_like(mean_a))
    rest_b = sum(off_b, torch.zeros_like(mean_b))
    return torch.cat([*off_b, rest_b, mean_b], dim=1), torch.cat([*off_a, mean_a, rest_a], dim=0)


def _squares(left: Tensor, right: Tensor, b: Tensor, a: Tensor) -> tuple[float, float]:
    """‖left @ right‖_F² and ‖left @ right + b @ a‖_F², not forming the products of thin factors."""
    (rows, inner), columns = left.shape, right.shape[1]
    if inner * (rows + columns) >= rows * columns:
        product = left @ right
        return float(product.square().sum()), float((product + b @ a).square().sum())
    both_left, both_right = torch.cat([left, b], dim=1), torch.cat([right, a], dim=0)
    terms = (both_left.T @ both_left) * (both_right @ both_right.T)
    return max(float(terms[:inner, :inner].sum()), 0.0), max(float(terms.sum()), 0.0)


def flexlora(values: Sequence[Tensors], weights: Sequence[float]) -> tuple[dict[str, Tensor], float]:
    """The best factors of the given rank for mean(B A), per module.

    mean(B A) = U Σ Vᵀ; B̂ = U_r Σ_r and Â = V_rᵀ. So Â has orthonormal rows even where the product is zero,
    and B̂ has a gradient there. The sign of each column of U makes its largest entry positive.

    Args:
        values: one per client, with both factors of each module.
        weights: one per client, summing to 1.

    Returns:
        The factors by name, in the dtype of ``values``; and the relative error
        ‖mean(B A) − B̂ Â‖_F / ‖mean(B A)‖_F over all modules, which is due to the rank.
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
    """Thin singular value decomposition of ``left @ right``, not forming a product of low rank."""
    if left.shape[1] >= min(left.shape[0], right.shape[1]):
        u, s, vt = torch.linalg.svd(left @ right, full_matrices=False)
        return u, s, vt
    left_basis, left_small = torch.linalg.qr(left)
    right_basis, right_small = torch.linalg.qr(right.T)
    u, s, vt = torch.linalg.svd(left_small @ right_small.T)
    return left_basis @ u, s, vt @ right_basis.T


def _padded(u: Tensor, s: Tensor, vt: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The decomposition padded with zeros to ``rank``, for a LoRA whose rank exceeds the module's width."""
    extra = rank - s.numel()
    if extra <= 0:
        return u, s, vt
    pad = torch.nn.functional.pad
    return pad(u, (0, extra)), pad(s, (0, extra)), pad(vt, (0, 0, 0, extra))
