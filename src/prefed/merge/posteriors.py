"""The posterior of the latent taste z that a client sends (FedVPA-GP, arXiv:2605.30873).

It consists of 2 · d_z numbers, means over the client's training pairs. It reveals the client's preferences:
anyone with the selector can judge like the client. If it is over few pairs, it reveals much about each of
them. Therefore, clients with fewer than ``[privacy] minimum_pairs`` send none, and noise can be added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from prefed.core import Key
from prefed.core.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

CENTER = -3.0
"""Typical value of log σ², a public constant around which posteriors are clipped."""
OUTLYING = 3.0
"""Maximum ratio of the norm of a mean to the median norm, and of the width of a posterior to N(0, I)."""
WIDEST = 12.0
"""Bound on the absolute value of log σ̄²."""
ACTIVE = 0.01
"""Minimum variance over clients of an active unit (arXiv:1509.00519, section 5)."""


class Posterior(NamedTuple):
    """N(μ̄, diag σ̄²) of one client, ``[d_z]`` each. The logarithm keeps σ̄² positive under noise."""

    mean: Tensor
    log_variance: Tensor


def summarize(means: Tensor, log_variances: Tensor) -> Posterior:
    """Combine the posteriors of a client's contexts: μ̄ = mean μ, σ̄² = mean σ² + Var μ.

    These are the mean and variance of the uniform mixture of the posteriors (law of total variance).
    |log σ̄²| is clipped to :data:`WIDEST`, so that the result is finite even if a bad upload made σ = 0.

    Args:
        means: ``[m, d_z]`` μ for each of m ≥ 1 disjoint contexts.
        log_variances: ``[m, d_z]``.

    >>> summarize(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
    Posterior(mean=tensor([2.]), log_variance=tensor([0.6931]))
    """
    variance = log_variances.exp().mean(0) + means.var(0, correction=0)
    return Posterior(means.mean(0), variance.log().clamp(-WIDEST, WIDEST))


def active_units(means: npt.ArrayLike, least: float = ACTIVE) -> int:
    """Count the dimensions in which posterior means differ between clients (arXiv:1509.00519, section 5).

    Args:
        means: ``[n, d_z]`` μ̄ of n clients.
        least: minimum variance over clients of an active unit.

    >>> active_units([[1.0, 0.5, 0.0], [-1.0, 0.5, 0.1]])
    1
    """
    return int((np.asarray(means, np.float64).var(0) > least).sum())


def privatize(posterior: Posterior, clip: float, noise: float, key: Key) -> Posterior:
    """Clip the vector (μ̄, log σ̄² − :data:`CENTER`) and add noise (arXiv:1607.00133, algorithm 1).

    The sensitivity is 2 · ``clip``.

    Args:
        clip: bound on the Euclidean norm; 0 for none.
        noise: standard deviation of the Gaussian noise, relative to ``clip``; 0 for none.

    Raises:
        ValueError: ``noise`` without ``clip``.
    """
    if noise and not clip:
        raise ValueError("noise on a posterior requires a clip above 0")
    vector = torch.cat([posterior.mean, posterior.log_variance - CENTER])
    if clip:
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        vector = vector * min(1.0, clip / norm) if norm else vector
    if noise:
        vector = vector + clip * noise * torch.randn(len(vector), generator=key.torch())
    mean, log_variance = vector.chunk(2)
    return Posterior(mean, log_variance + CENTER)


def bound_posteriors(posteriors: Mapping[str, Posterior], length: float) -> dict[str, Posterior]:
    """Bound the posteriors, sorted by client, so that bad uploads cannot harm other clients.

    - Means are clipped to ``length`` or, if greater, to :data:`OUTLYING` times the upper median norm. For one
      or two posteriors, √d_z, the typical norm of a draw from N(0, I), replaces the median.
    - |log σ̄²| is clipped to :data:`WIDEST`, so that densities are finite in float32.
    - σ̄ is scaled down so that √Σσ̄² is at most the bound on means or, if greater, :data:`OUTLYING` · √d_z.

    Args:
        posteriors: client → posterior.
        length: norm of the longest prototype.
    """
    clients = sorted(posteriors)
    if not clients:
        return {}
    norms = {c: float(torch.linalg.vector_norm(posteriors[c].mean, dtype=torch.float64)) for c in clients}
    ranked, prior = sorted(norms.values()), math.sqrt(len(posteriors[clients[0]].mean))
    most = max(length, OUTLYING * (ranked[len(ranked) // 2] if len(ranked) > 2 else prior))
    widest = max(most, OUTLYING * prior)

    def bounded(client: str) -> Posterior:
        mean, log_variance = posteriors[client]
        if norms[client] > most:
            mean = (mean.double() * (most / norms[client])).to(mean.dtype)
        log_variance = log_variance.clamp(-WIDEST, WIDEST)
        width = math.sqrt(float(log_variance.double().exp().sum()))
        if width > widest:
            log_variance = (log_variance - 2 * math.log(width / widest)).clamp(min=-WIDEST)
        return Posterior(mean, log_variance)

    return {client: bounded(client) for client in clients}
