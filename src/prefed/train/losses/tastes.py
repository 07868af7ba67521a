"""The terms of the loss of a selector with a latent taste z: FedVPL and FedVPA-GP (arXiv:2605.30873).

A step's loss is, in the notation of the paper::

    mean −log σ(b + r_w − r_l) + β KL(q ‖ p_i) + λ mean_d (z − p_y*)² + γ ‖P Pᵀ − s² I‖²_F

b is the frozen model's own log-odds of the chosen response. q = N(μ, diag σ²) is the posterior of z after a
set of context pairs. p_i is N(0, I), or a mixture of the other clients' last posteriors with weights of the
client's own. Random numbers are arguments, so that the caller names their draws.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from prefed.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("prefed")

PRIORS = ("standard", "mixture", "bound")
"""Priors of z. Setting ``prior`` of the objective is a place in it: N(0, I); the mixture of the peers'
posteriors, its KL by samples; the same by the convex bound."""
CAPS = ("off", "hard", "soft")
"""Bounds on log σ². Setting ``capped`` of the objective is a place in it."""


class Gaussian(NamedTuple):
    """N(μ, diag σ²), one or several.

    Attributes:
        mean: ``[..., d]`` μ.
        log_variance: ``[..., d]`` log σ².
    """

    mean: Tensor
    log_variance: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """``[..., d]`` μ + σ ε for ``noise`` ε ~ N(0, 1) of that shape; gradients reach μ and log σ²."""
        return self.mean + (0.5 * self.log_variance).exp() * noise

    def log_density(self, z: Tensor) -> Tensor:
        """``[...]`` log N(z; μ, diag σ²) in nats, for ``z`` ``[..., d]`` that broadcasts with μ."""
        square = (z - self.mean).square() * (-self.log_variance).exp()
        return -0.5 * (square + self.log_variance + math.log(2 * math.pi)).sum(-1)


def standard_kl(q: Gaussian) -> Tensor:
    """KL(q ‖ N(0, I)) = ½ Σ_d (μ² + σ² − 1 − log σ²), in nats (VAE, arXiv:1312.6114, appendix B).

    Args:
        q: ``[..., d]``.

    Returns:
        ``[...]``.

    >>> standard_kl(Gaussian(torch.ones(1, 4), torch.zeros(1, 4)))
    tensor([2.])
    """
    mean, log_variance = q
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)


def mixture_kl(q: Gaussian, peers: Gaussian, log_weights: Tensor, noise: Tensor) -> Tensor:
    """KL(q ‖ Σ_j w_j N_j), estimated by K samples of q, in nats (FedVPA-GP, arXiv:2605.30873, eq. 10).

    (1/K) Σ_k [log q(z_k) − log Σ_j exp(log w_j + log N_j(z_k))]. A mixture's KL has no closed form. The
    estimate is unbiased, and its gradient reaches q and the weights. It can be below 0, which a KL cannot.

    Args:
        q: ``[..., d]``.
        peers: ``[J, d]``; constants for the client.
        log_weights: ``[J]`` log w_j; −∞ for a peer that is masked.
        noise: ``[K, ..., d]`` of N(0, 1); z_k = μ + σ ε_k.

    Returns:
        ``[...]``.

    >>> q = Gaussian(torch.zeros(2), torch.zeros(2))
    >>> itself = Gaussian(torch.zeros(1, 2), torch.zeros(1, 2))
    >>> mixture_kl(q, itself, torch.zeros(1), torch.randn(4, 2)).abs() < 1e-6
    tensor(True)
    """
    z = q.sample(noise)
    # At its own sample, (z − μ)/σ is the noise itself.
    own = -0.5 * (noise.square() + q.log_variance + math.log(2 * math.pi)).sum(-1)
    prior = torch.logsumexp(log_weights + peers.log_density(z[..., None, :]), -1)
    return (own - prior).mean(0)


def mixture_kl_bound(q: Gaussian, peers: Gaussian, log_weights: Tensor) -> Tensor:
    """Σ_j w_j KL(q ‖ N_j) ≥ KL(q ‖ Σ_j w_j N_j), in closed form, by the convexity of the KL.

    With peers far apart the bound is far from the KL: half of the weight on a peer at distance Δ costs
    ‖Δ‖²/(4σ²), although the KL never exceeds the least of KL(q ‖ N_j) − log w_j. So its minimum lies between
    the peers, where no peer is. It is logged once as a warning.

    Args:
        q: ``[..., d]``.
        peers: ``[J, d]``.
        log_weights: ``[J]`` log w_j; −∞ for a peer that is masked.

    Returns:
        ``[...]``.
    """
    _warn_of_bound()
    mean, log_variance = (value[..., None, :] for value in q)
    shift = (mean - peers.mean).square() + log_variance.exp()
    each = 0.5 * (shift * (-peers.log_variance).exp() - 1 + peers.log_variance - log_variance).sum(-1)
    return (log_weights.exp() * each).sum(-1)


@cache
def _warn_of_bound() -> None:
    _log.warning(
        "the convex bound on the KL to a mixture pulls a client between its peers: with two peers far apart "
        "it can read 682 nats where the KL is 0.69; the estimate by samples is the default"
    )


def gumbel(uniform: Tensor) -> Tensor:
    """−log(−log u) for ``uniform`` u in [0, 1): noise with which the largest of log π + g is drawn by π."""
    least = torch.finfo(uniform.dtype).tiny
    return -(-uniform.clamp(min=least).log()).log()


def mixture_log_weights(logits: Tensor, noise: Tensor, temperature: float, present: Tensor) -> Tensor:
    """Log w with w = softmax((log π + g)/τ) over the peers that are present (FedVPA-GP; arXiv:1611.01144).

    As τ → 0, w becomes 1 for one peer, which is j with probability π_j. Without noise and with τ = 1 it is
    log π itself: whom a client trusts.

    Args:
        logits: ``[J]`` log π, up to a constant; one per client, in the order of their ids.
        noise: ``[J]`` g; see :func:`gumbel`.
        temperature: τ above 0.
        present: ``[J]``, false for the client itself and for clients without a posterior.

    Returns:
        ``[J]`` log w; −∞ for a peer that is not present, and no gradient reaches that peer's logit.

    Raises:
        ValueError: no peer is present; the prior is then N(0, I).

    >>> logits, present = torch.tensor([0.0, 0.0, 9.0]), torch.tensor([True, True, False])
    >>> mixture_log_weights(logits, torch.zeros(3), 1.0, present).exp()
    tensor([0.5000, 0.5000, 0.0000])
    """
    if not bool(present.any()):
        raise ValueError("a mixture prior needs a posterior of at least one other client")
    perturbed = ((logits + noise) / temperature).masked_fill(~present, -math.inf)
    return torch.log_softmax(perturbed, -1)


def temperature(number: int, rounds: int, first: float = 1.0, last: float = 0.1) -> float:
    """τ of round ``number`` of ``rounds``: geometric from ``first`` to ``last``. The source names no law.

    >>> [round(temperature(number, 3), 4) for number in (1, 2, 3)], temperature(1, 1)
    ([1.0, 0.3162, 0.1], 1.0)
    """
    return float(first * (last / first) ** ((number - 1) / max(rounds - 1, 1)))


def prototype_pull(z: Tensor, prototype: Tensor) -> Tensor:
    """mean_d (z − p)²: the pull of z towards the prototype of the client (FedVPA-GP, arXiv:2605.30873).

    The paper sums over d. The mean makes λ independent of the latent's width.

    Args:
        z: ``[..., d]``.
        prototype: ``[d]`` p_y*; it learns too, so gradients reach it.

    Returns:
        ``[...]``.
    """
    return (z - prototype).square().mean(-1)


def orthogonality(prototypes: Tensor, scale: float) -> Tensor:
    """‖P Pᵀ − s² I‖²_F: how far prototypes are from orthogonal vectors of length s.

    The paper prints I. Its prototypes start far from the origin, at length s, where I would shrink them.

    Args:
        prototypes: ``[M, d]`` P.
        scale: s.

    >>> orthogonality(torch.tensor([[5.0, 0.0], [0.0, 5.0]]), 5.0)
    tensor(0.)
    >>> orthogonality(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 1.0)
    tensor(2.)
    """
    goal = scale**2 * torch.eye(len(prototypes), dtype=prototypes.dtype, device=prototypes.device)
    return (prototypes @ prototypes.T - goal).square().sum()
