"""Weights by agreement with the common direction (FedSDG)."""

from __future__ import annotations

from collections.abc import Mapping

from prefed.core import Tensors
from prefed.core.lazy import torch
from prefed.merge.flat import gram_matrix

__all__ = ["alignment_weights"]


EPSILON = 1e-12
"""ε in eq. 10 of FedSDG."""


def alignment_weights(updates: Mapping[str, Tensors], *, leave_one_out: bool = False) -> dict[str, float]:
    """w_k = α_k / (Σ_j α_j + ε), α_k = max(0, ⟨Δ_k, Δ̄⟩ / (‖Δ_k‖ ‖Δ̄‖ + ε)): FedSDG, eq. 10.

    Args:
        updates: client → Δ_k = φ_k − φ. All clients count alike, whatever the size of their data.
        leave_one_out: compare Δ_k with the mean of the other clients. The mean of all contains Δ_k itself, so
            with S clients and unrelated updates the cosine is still near 1/√S.

    Returns:
        Client → weight, at least 0. The weights are uniform (the plain mean) if every α is 0: there is no
        common direction, or ``leave_one_out`` compares one client with nobody.

    >>> from prefed.core import Entry, Layout
    >>> layout = Layout((Entry("a", (2,), "lora"),))
    >>> def update(x, y): return Tensors(layout, torch.tensor([x, y]))
    >>> weights = alignment_weights({"a": update(1.0, 0.0), "b": update(1.0, 0.0), "c": update(-1.0, 0.0)})
    >>> [round(w, 6) for w in weights.values()]
    [0.5, 0.5, 0.0]
    """
    clients = sorted(updates)
    n = len(clients)
    inner = gram_matrix([updates[client] for client in clients])
    own = inner.diagonal()
    # ⟨Δ_k, M_k⟩ and ‖M_k‖² of the mean direction M_k that client k is compared with.
    if leave_one_out and n > 1:
        along = (inner.sum(dim=1) - own) / (n - 1)
        square = (inner.sum() - 2 * inner.sum(dim=1) + own) / (n - 1) ** 2
    elif leave_one_out:
        along, square = torch.zeros_like(own), torch.zeros_like(own)
    else:
        along, square = inner.mean(dim=1), inner.mean().expand(n)
    cosine = along / (own.sqrt() * square.clamp(min=0).sqrt() + EPSILON)
    alpha = cosine.clamp(min=0).tolist()
    if not any(alpha):
        return dict.fromkeys(clients, 1 / n)
    total = sum(alpha) + EPSILON
    return {client: value / total for client, value in zip(clients, alpha, strict=True)}
