"""Arithmetic on many flat buffers at once, in float64 and in pieces that stay small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prefed.core import Tensors
from prefed.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["combine", "gram", "pieces"]

_PIECE = 1 << 16


def combine(values: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Σ_k w_k x_k for weights that sum to 1, accumulated in float64, in the dtype of the first.

    It is taken as x_j + Σ_k w_k (x_k − x_j) around the x_j of the largest weight, so that equal values
    give that value to the bit, whatever the weights.

    >>> from prefed.core import Entry, Layout
    >>> layout = Layout((Entry("a", (2,), "lora"),))
    >>> low, high = Tensors(layout, torch.tensor([0.0, 0.1])), Tensors(layout, torch.tensor([4.0, 0.1]))
    >>> combine([low, high], [0.25, 0.75])["a"]
    tensor([3.0000, 0.1000])
    """
    center = max(range(len(values)), key=lambda k: weights[k])
    base = values[center].flat.double()
    total = torch.zeros_like(base)
    for k, (value, weight) in enumerate(zip(values, weights, strict=True)):
        if k != center and weight:
            total.add_(value.flat.double() - base, alpha=weight)
    return Tensors(values[0].layout, (base + total).to(values[0].flat.dtype))


def pieces(values: Sequence[Tensors]) -> Iterator[tuple[slice, Tensor]]:
    """The buffers stacked ``[n, columns]`` in float64, some columns at a time."""
    size = values[0].layout.size
    for start in range(0, size, _PIECE):
        columns = slice(start, min(start + _PIECE, size))
        yield columns, torch.stack([value.flat[columns].double() for value in values])


def gram(values: Sequence[Tensors], origin: Tensors | None = None) -> Tensor:
    """``[n, n]`` float64 inner products of the buffers, as seen from ``origin`` (zero unless given)."""
    total = torch.zeros(len(values), len(values), dtype=torch.float64)
    for columns, rows in pieces(values):
        if origin is not None:
            rows -= origin.flat[columns].double()
        total += (rows @ rows.T).cpu()
    return total
