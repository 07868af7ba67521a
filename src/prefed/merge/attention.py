"""Weights from the clients' models themselves: FedSDG's for one mean, FedAMP's for a mixture per client.

In FedAMP (Huang et al. 2021, arXiv:2007.03797) each client receives its own mixture of all clients' models.
Its functions give receiver → sender → weight, where a receiver's weights sum to 1.
:meth:`prefed.merge.Aggregator.blend` makes a mixture from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefed.core import Tensors
from prefed.core.lazy import torch
from prefed.merge.flat import gram_matrix, squared_distances

if TYPE_CHECKING:
    from torch import Tensor


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


def similarity_attention(
    models: Mapping[str, Tensors], initial: Tensors, *, temperature: float = 0.5, floor: float | None = None
) -> dict[str, dict[str, float]]:
    """Softmax of the cosines between updates: the FedAMP baseline of FedPDPO (arXiv:2603.19741).

    a_ij = softmax_j(cos(Δφ_i, Δφ_j) / τ) over all j, i included, with Δφ = φ − φ_init. Weights below
    ``floor`` are raised to it, and the row is normalised again. A client that has not moved has cosine 0 to
    every client.

    Args:
        temperature: τ.
        floor: the least weight before the second normalisation; min(0.05, 1/N) unless given.
    """
    clients = sorted(models)
    inner = gram_matrix([models[client] for client in clients], initial)
    norms = inner.diagonal().clamp(min=0).sqrt()
    lengths = norms[:, None] * norms[None, :]
    cosine = torch.where(lengths > 0, inner / lengths.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    least = min(0.05, 1 / len(clients)) if floor is None else floor
    weights = torch.softmax(cosine / temperature, dim=1).clamp(min=least)
    return _rows(clients, weights / weights.sum(dim=1, keepdim=True))


def distance_attention(
    models: Mapping[str, Tensors], *, alpha: float, sigma: float
) -> dict[str, dict[str, float]]:
    """The message passing of the FedAMP paper (arXiv:2007.03797).

    c_ij = α A'(‖φ_i − φ_j‖²) for j ≠ i with A(x) = 1 − e^(−x/σ), so A'(x) = e^(−x/σ) / σ, and
    u_i = (1 − Σ_j c_ij) φ_i + Σ_j c_ij φ_j.

    Args:
        alpha: the server's step size α.
        sigma: the scale σ of squared distances.

    Raises:
        ValueError: a client's weight on its own model would be negative. α ≤ σ / (N − 1) always serves.
    """
    clients = sorted(models)
    n = len(clients)
    distances = _squared_distances(models)
    weights = alpha * torch.exp(-distances / sigma) / sigma
    weights.fill_diagonal_(0)
    own = 1 - weights.sum(dim=1)
    if bool((own < -1e-9).any()):
        worst = clients[int(own.argmin())]
        raise ValueError(
            f"client {worst!r} would keep {float(own.min()):.3g} of its own model: lower alpha from "
            f"{alpha:g} (at most sigma / (N - 1) = {sigma / (n - 1):g} always serves) or raise sigma"
        )
    return _rows(clients, weights + torch.diag(own.clamp(min=0)))


def largest_alpha(models: Mapping[str, Tensors], sigma: float) -> float:
    """The largest α with which no client's weight on its own model is negative.

    It is σ / max_i Σ_{j≠i} e^(−‖φ_i − φ_j‖²/σ): infinite for one client, σ / (N − 1) where all are equal.

    >>> from prefed.core import Entry, Layout
    >>> layout = Layout((Entry("a", (1,), "lora"),))
    >>> largest_alpha({client: Tensors(layout, torch.ones(1)) for client in "abc"}, 3.0)
    1.5
    """
    near = torch.exp(-_squared_distances(models) / sigma).fill_diagonal_(0).sum(dim=1)
    return float(sigma / near.max())


def mean_squared_distance(models: Mapping[str, Tensors]) -> float:
    """The mean of ‖φ_i − φ_j‖² over all pairs of different clients; 0 for one client.

    >>> from prefed.core import Entry, Layout
    >>> layout = Layout((Entry("a", (1,), "lora"),))
    >>> points = {"a": 0.0, "b": 1.0, "c": 3.0}
    >>> mean_squared_distance({client: Tensors(layout, torch.tensor([x])) for client, x in points.items()})
    4.666666666666667
    """
    n = len(models)
    return float(_squared_distances(models).sum()) / (n * (n - 1)) if n > 1 else 0.0


def _squared_distances(models: Mapping[str, Tensors]) -> Tensor:
    """``[n, n]`` ‖φ_i − φ_j‖², clients sorted."""
    values = [models[client] for client in sorted(models)]
    return squared_distances(values, values[0])


def _rows(clients: list[str], weights: Tensor) -> dict[str, dict[str, float]]:
    rows = weights.tolist()
    return {client: dict(zip(clients, row, strict=True)) for client, row in zip(clients, rows, strict=True)}
