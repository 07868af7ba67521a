"""Weights computed from client models: FedSDG's for one mean, FedAMP's for one mixture per client.

In FedAMP (Huang et al. 2021, arXiv:2007.03797), each client receives its own mixture of all client models,
computed by :meth:`prefed.merge.Aggregator.blend`. The weights are receiver → sender → weight; those of each
receiver sum to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefed.core import Tensors
from prefed.core.lazy import torch
from prefed.merge.means_distances import gram_matrix, squared_distances

if TYPE_CHECKING:
    from torch import Tensor


EPSILON = 1e-12
"""ε in eq. 10 of FedSDG."""


def alignment_weights(updates: Mapping[str, Tensors], *, leave_one_out: bool = False) -> dict[str, float]:
    """w_k = α_k / (Σ_j α_j + ε), α_k = max(0, ⟨Δ_k, Δ̄⟩ / (‖Δ_k‖ ‖Δ̄‖ + ε)): FedSDG, eq. 10.

    Args:
        updates: client → Δ_k = φ_k − φ.
        leave_one_out: compare Δ_k with the mean of the other updates. The mean of all S updates contains Δ_k
            itself, so even unrelated updates have a cosine near 1/√S.

    Returns:
        Client → weight, at least 0. The weights are uniform if every α is 0.

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
    # ⟨Δ_k, M_k⟩ and ‖M_k‖², where M_k is the mean that client k is compared with.
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

    a_ij = softmax_j(cos(Δφ_i, Δφ_j) / τ) over all j, including i, with Δφ = φ − φ_init. Weights below
    ``floor`` are raised to it, and each row is normalised again. The cosine of a zero update is 0.

    Args:
        models: client → φ.
        initial: φ_init.
        temperature: τ.
        floor: minimum weight before the second normalisation, by default min(0.05, 1/N).
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
    """Message passing of the FedAMP paper (arXiv:2007.03797).

    u_i = (1 − Σ_j c_ij) φ_i + Σ_j c_ij φ_j with c_ij = α A'(‖φ_i − φ_j‖²) for j ≠ i, where
    A(x) = 1 − e^(−x/σ) and A'(x) = e^(−x/σ) / σ.

    Args:
        models: client → φ.
        alpha: step size α of the server.
        sigma: scale σ of squared distances.

    Raises:
        ValueError: the weight of a client on its own model would be negative. It is not if α ≤ σ / (N − 1).
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
            f"client {worst!r} would give its own model the weight {float(own.min()):.3g}; lower alpha from "
            f"{alpha:g} (sigma / (N - 1) = {sigma / (n - 1):g} is always low enough) or raise sigma"
        )
    return _rows(clients, weights + torch.diag(own.clamp(min=0)))


def largest_alpha(models: Mapping[str, Tensors], sigma: float) -> float:
    """Return the largest α for which no client has a negative weight on its own model.

    It is σ / max_i Σ_{j≠i} e^(−‖φ_i − φ_j‖²/σ): infinite for one client, σ / (N − 1) for equal models.

    >>> from prefed.core import Entry, Layout
    >>> layout = Layout((Entry("a", (1,), "lora"),))
    >>> largest_alpha({client: Tensors(layout, torch.ones(1)) for client in "abc"}, 3.0)
    1.5
    """
    near = torch.exp(-_squared_distances(models) / sigma).fill_diagonal_(0).sum(dim=1)
    return float(sigma / near.max())


def mean_squared_distance(models: Mapping[str, Tensors]) -> float:
    """Return the mean of ‖φ_i − φ_j‖² over all pairs of clients; 0 for one client.

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
