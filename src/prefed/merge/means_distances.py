"""Float64 arithmetic on many flat buffers at once, in chunks to save memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prefed.core import Tensors
from prefed.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


_CHUNK = 1 << 16


def weighted_mean(values: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Return Σ_k w_k x_k for weights that sum to 1, accumulated in float64, in the dtype of the first value.

    Computed as x_j + Σ_k w_k (x_k − x_j), where x_j has the largest weight, so that the mean of equal values
    is that value bit for bit.

    >>> from prefed.core import Entry, Layout
    >>> layout = Layout((Entry("a", (2,), "lora"),))
    >>> low, high = Tensors(layout, torch.tensor([0.0, 0.1])), Tensors(layout, torch.tensor([4.0, 0.1]))
    >>> weighted_mean([low, high], [0.25, 0.75])["a"]
    tensor([3.0000, 0.1000])
    """
    center = max(range(len(values)), key=lambda k: weights[k])
    base = values[center].flat.double()
    total = torch.zeros_like(base)
    for k, (value, weight) in enumerate(zip(values, weights, strict=True)):
        if k != center and weight:
            total.add_(value.flat.double() - base, alpha=weight)
    return Tensors(values[0].layout, (base + total).to(values[0].flat.dtype))


def normalize(weights: Sequence[float]) -> list[float]:
    """Divide the weights by their sum.

    Raises:
        ValueError: a weight is negative, or all are 0.
    """
    total = sum(weights)
    if not (total > 0 and min(weights) >= 0):
        raise ValueError(f"weights must be at least 0 and not all 0, got {list(weights)}")
    return [weight / total for weight in weights]


def chunks(values: Sequence[Tensors]) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of columns, and the stacked buffers ``[n, columns]`` in float64."""
    size = values[0].layout.size
    for start in range(0, size, _CHUNK):
        columns = slice(start, min(start + _CHUNK, size))
        yield columns, torch.stack([value.flat[columns].double() for value in values])


def gram_matrix(values: Sequence[Tensors], origin: Tensors | None = None) -> Tensor:
    """Return the inner products ⟨x_i − o, x_j − o⟩, float64 ``[n, n]``; o is ``origin`` or zero."""
    total = torch.zeros(len(values), len(values), dtype=torch.float64)
    for columns, rows in chunks(values):
        if origin is not None:
            rows -= origin.flat[columns].double()
        total += (rows @ rows.T).cpu()
    return total


def squared_distances(values: Sequence[Tensors], origin: Tensors) -> Tensor:
    """Return ‖x_i − x_j‖², float64 ``[n, n]``.

    ``origin`` should be near most buffers, such as their common starting point. Distances are computed from
    differences to it, which preserves small distances in the presence of a very large one.
    """
    inner = gram_matrix(values, origin)
    squares = inner.diagonal()
    return (squares[:, None] + squares[None, :] - 2 * inner).clamp(min=0)
