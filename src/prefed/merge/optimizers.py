"""Server optimisers on the pseudo-gradient Δ = merged model − current model.

Adaptive Federated Optimization (arXiv:2003.00295), algorithm 2; FedAvgM: Hsu et al. 2019
(arXiv:1909.06335). With momentum m and second moment v, elementwise:

- fedavgm: m ← β₁ m + Δ; φ ← φ + η m
- fedadagrad: v ← v + Δ²
- fedyogi: v ← v − (1−β₂) Δ² sign(v − Δ²)
- fedadam: v ← β₂ v + (1−β₂) Δ²
- the last three: m ← β₁ m + (1−β₁) Δ; φ ← φ + η m / (√v + τ), starting with m = 0 and v = τ².
"""

from __future__ import annotations

from collections.abc import Mapping

from prefed.core import Tensors
from prefed.core.lazy import torch
from prefed.merge.config import ServerOptimizer


def slots(settings: ServerOptimizer, shared: Tensors) -> dict[str, Tensors]:
    """Return the initial state of the optimiser: ``momentum`` = 0 and, if adaptive, ``second`` = τ².

    >>> from prefed.core import Entry, Layout
    >>> shared = Tensors.zeros(Layout((Entry("a", (2,), "lora"),)))
    >>> sorted(slots(ServerOptimizer(name="fedyogi"), shared))
    ['momentum', 'second']
    """
    zero = Tensors.zeros(shared.layout, shared.flat.dtype)
    if settings.name == "fedavgm":
        return {"momentum": zero}
    return {"momentum": zero, "second": zero + settings.tau**2}


def step(
    settings: ServerOptimizer, current: Tensors, merged: Tensors, memory: Mapping[str, Tensors]
) -> tuple[Tensors, dict[str, Tensors]]:
    """Take one step from ``current`` towards ``merged``.

    The new model is computed as merged + (step − Δ) instead of current + step, so that it is exactly the
    merged model if step = Δ (FedAvgM without momentum at rate 1).

    Args:
        current: φ.
        merged: φ + Δ.
        memory: from :func:`slots` or the last step, in the layout of ``current``.

    Returns:
        The new φ and the new state.
    """
    delta = merged.flat.double() - current.flat.double()
    momentum = memory["momentum"].flat.double()
    if settings.name == "fedavgm":
        momentum = settings.momentum * momentum + delta
        move, after = settings.rate * momentum, {"momentum": momentum}
    else:
        momentum = settings.momentum * momentum + (1 - settings.momentum) * delta
        second = _second(settings, memory["second"].flat.double(), delta.square())
        move = settings.rate * momentum / (second.sqrt() + settings.tau)
        after = {"momentum": momentum, "second": second}
    layout, dtype = current.layout, current.flat.dtype
    moved = Tensors(layout, (merged.flat.double() + (move - delta)).to(dtype))
    return moved, {name: Tensors(layout, value.to(dtype)) for name, value in after.items()}


def _second(settings: ServerOptimizer, second: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    if settings.name == "fedadagrad":
        return second + square
    if settings.name == "fedyogi":
        return second - (1 - settings.beta2) * square * torch.sign(second - square)
    return settings.beta2 * second + (1 - settings.beta2) * square
