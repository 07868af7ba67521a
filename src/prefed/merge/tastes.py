"""What a client sends of its latent taste: the posterior of z (FedVPA-GP, arXiv:2605.30873).

It is 2 · d_z numbers, means over the client's training pairs. It reveals what the client prefers, since that
is its purpose: anyone with the selector can judge with it as the client would. It is no function of a text,
but if it is over few pairs, it reveals much about each. So a client with fewer than ``[privacy]
minimum_pairs`` sends none, and noise can be added to it.
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
"""About where log σ² lies; a constant that everybody knows, so clipping around it tells nothing."""
OUTLYING = 3.0
"""A mean this many times as long as the median is shortened, and a posterior this many times as wide as
N(0, I) is narrowed."""
WIDEST = 12.0
"""The bounds on log σ̄² are ± this."""
ACTIVE = 0.01
"""The least variance over clients of an active unit (arXiv:1509.00519, section 5)."""


class Posterior(NamedTuple):
    """N(μ̄, diag σ̄²) of one client: ``[d_z]`` each. The logarithm keeps σ̄² positive whatever is added."""

    mean: Tensor
    log_variance: Tensor


def summarize(means: Tensor, log_variances: Tensor) -> Posterior:
    """One Gaussian for the posteriors after a client's contexts: μ̄ = mean μ, σ̄² = mean σ² + Var μ.

    These are the mean and the variance of the even mixture of the posteriors (law of total variance). log σ̄²
    is kept within ±:data:`WIDEST`: a selector that another client's upload has driven to σ = 0 still gives
    numbers that can be sent, and so can be trained back.

    Args:
        means: ``[m, d_z]`` μ after each of m ≥ 1 disjoint contexts.
        log_variances: ``[m, d_z]``.

    >>> summarize(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
    Posterior(mean=tensor([2.]), log_variance=tensor([0.6931]))
    """
    variance = log_variances.exp().mean(0) + means.var(0, correction=0)
    return Posterior(means.mean(0), variance.log().clamp(-WIDEST, WIDEST))


def active_units(means: npt.ArrayLike, least: float = ACTIVE) -> int:
    """Number of dimensions whose posterior mean differs between clients (arXiv:1509.00519, section 5).

    Args:
        means: ``[n, d_z]`` μ̄ of n clients.
        least: a unit is active where the variance over clients is above this.

    >>> active_units([[1.0, 0.5, 0.0], [-1.0, 0.5, 0.1]])
    1
    """
    return int((np.asarray(means, np.float64).var(0) > least).sum())


def privatize(posterior: Posterior, clip: float, noise: float, key: Key) -> Posterior:
    """``posterior`` as one vector, clipped, with Gaussian noise (arXiv:1607.00133, algorithm 1).

    The vector is (μ̄, log σ̄² − c) with a constant c. Two data sets of a client give clipped vectors at most
    2 · ``clip`` apart, from which an accountant starts.

    Args:
        clip: bound on the Euclidean length; 0 for none.
        noise: the noise's standard deviation over ``clip``; 0 for none.
        key: the noise's randomness.

    Raises:
        ValueError: noise is asked for, and no clip, without which no noise suffices.
    """
    if noise and not clip:
        raise ValueError("noise on a posterior needs a bound on its length: set the clip above 0")
    vector = torch.cat([posterior.mean, posterior.log_variance - CENTER])
    if clip:
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        vector = vector * min(1.0, clip / norm) if norm else vector
    if noise:
        vector = vector + clip * noise * torch.randn(len(vector), generator=key.torch())
    mean, log_variance = vector.chunk(2)
    return Posterior(mean, log_variance + CENTER)


def bound_posteriors(posteriors: Mapping[str, Posterior], length: float) -> dict[str, Posterior]:
    """Client → its posterior with numbers that can do no harm to other clients, sorted by client.

    A client may send any finite numbers. A mean that is :data:`OUTLYING` times as long as the upper median
    and longer than ``length`` is shortened to the longer of the two. One or two posteriors have no median
    that a single client could not choose: √d_z, the length of a draw of N(0, I), stands for it. log σ̄² is
    kept within ±:data:`WIDEST`, so that every density is finite in float32. Where draws would lie further
    from their mean, by √Σσ̄², than a mean may be long and than :data:`OUTLYING` · √d_z, all σ̄ are scaled down
    to the longer of the two: whoever draws from it, such as an alignment, gets tastes of usual length.

    Args:
        length: that of the longest prototype; means up to it are left as they are.
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
