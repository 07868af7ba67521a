"""Loss terms of a selector with a latent taste z: FedVPL and FedVPA-GP (arXiv:2605.30873).

In the notation of the paper, the loss of a step is::

    mean −log σ(b + r_w − r_l) + β KL(q ‖ p_i) + λ mean_d (z − p_y*)² + γ ‖P Pᵀ − s² I‖²_F

b is the frozen model's log-odds of the chosen response. q = N(μ, diag σ²) is the posterior of z given a set
of context pairs. p_i is N(0, I), or a mixture of the other clients' last posteriors with weights that the
client learns. Random numbers are arguments, so that callers can name their draws.
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
"""Priors of z, indexed by the setting ``prior``.

N(0, I); the mixture of the peers' posteriors, with a sampled KL; the same, with the convex bound on the KL.
"""
CAPS = ("off", "hard", "soft")
"""Bounds on log σ², indexed by the setting ``capped``."""


class Gaussian(NamedTuple):
    """One or several N(μ, diag σ²).

    Attributes:
        mean: ``[..., d]`` μ.
        log_variance: ``[..., d]`` log σ².
    """

    mean: Tensor
    log_variance: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """Return ``[..., d]`` μ + σ ε for ``noise`` ε ~ N(0, 1), differentiable in μ and log σ²."""
        return self.mean + (0.5 * self.log_variance).exp() * noise

    def log_density(self, z: Tensor) -> Tensor:
        """Return ``[...]`` log N(z; μ, diag σ²) in nats, for ``z`` ``[..., d]`` that broadcasts with μ."""
        square = (z - self.mean).square() * (-self.log_variance).exp()
        return -0.5 * (square + self.log_variance + math.log(2 * math.pi)).sum(-1)


def standard_kl(q: Gaussian) -> Tensor:
    """Return ``[...]`` KL(q ‖ N(0, I)) = ½ Σ_d (μ² + σ² − 1 − log σ²), in nats.

    Source: VAE, arXiv:1312.6114, appendix B.

    >>> standard_kl(Gaussian(torch.ones(1, 4), torch.zeros(1, 4)))
    tensor([2.])
    """
    mean, log_variance = q
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)


def mixture_kl(q: Gaussian, peers: Gaussian, log_weights: Tensor, noise: Tensor) -> Tensor:
    """Estimate KL(q ‖ Σ_j w_j N_j) by K samples of q, in nats (FedVPA-GP, arXiv:2605.30873, eq. 10).

    (1/K) Σ_k [log q(z_k) − log Σ_j exp(log w_j + log N_j(z_k))], since the KL has no closed form. The
    estimate is unbiased and differentiable in q and the weights. Unlike a KL, it can be negative.

    Args:
        q: ``[..., d]``.
        peers: ``[J, d]``, constants.
        log_weights: ``[J]`` log w_j; −∞ for masked peers.
        noise: ``[K, ..., d]`` from N(0, 1); z_k = μ + σ ε_k.

    Returns:
        ``[...]``.

    >>> q = Gaussian(torch.zeros(2), torch.zeros(2))
    >>> itself = Gaussian(torch.zeros(1, 2), torch.zeros(1, 2))
    >>> mixture_kl(q, itself, torch.zeros(1), torch.randn(4, 2)).abs() < 1e-6
    tensor(True)
    """
    z = q.sample(noise)
    # For samples of q, (z − μ)/σ is the noise itself.
    own = -0.5 * (noise.square() + q.log_variance + math.log(2 * math.pi)).sum(-1)
    prior = torch.logsumexp(log_weights + peers.log_density(z[..., None, :]), -1)
    return (own - prior).mean(0)


def mixture_kl_bound(q: Gaussian, peers: Gaussian, log_weights: Tensor) -> Tensor:
    """Return Σ_j w_j KL(q ‖ N_j) ≥ KL(q ‖ Σ_j w_j N_j), a closed-form bound by convexity.

    The bound is loose for distant peers: half of the weight on a peer at distance Δ costs ‖Δ‖²/(4σ²),
    although the KL never exceeds the minimum of KL(q ‖ N_j) − log w_j. Its minimum therefore lies between the
    peers, where no peer is. A warning about this is logged once.

    Args:
        q: ``[..., d]``.
        peers: ``[J, d]``.
        log_weights: ``[J]`` log w_j; −∞ for masked peers.

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
        "the convex bound on the KL to a mixture pulls a client between distant peers: with two peers it can "
        "be 682 nats for a KL of 0.69; prefer the sampled estimate"
    )


def gumbel(uniform: Tensor) -> Tensor:
    """Return −log(−log u) for ``uniform`` u in [0, 1): the argmax of log π + g is then distributed as π."""
    least = torch.finfo(uniform.dtype).tiny
    return -(-uniform.clamp(min=least).log()).log()


def mixture_log_weights(logits: Tensor, noise: Tensor, temperature: float, present: Tensor) -> Tensor:
    """Return log softmax((log π + g)/τ) over the peers that are present (FedVPA-GP; arXiv:1611.01144).

    As τ → 0, the softmax selects one peer, j with probability π_j. Without noise and with τ = 1 it is π.

    Args:
        logits: ``[J]`` log π, up to a constant; one per client, in the order of their ids.
        noise: ``[J]`` g; see :func:`gumbel`.
        temperature: τ above 0.
        present: ``[J]``, false for the client itself and for clients without a posterior.

    Returns:
        ``[J]`` log w; −∞ and without gradient for peers that are not present.

    Raises:
        ValueError: no peer is present; the prior is then N(0, I).

    >>> logits, present = torch.tensor([0.0, 0.0, 9.0]), torch.tensor([True, True, False])
    >>> mixture_log_weights(logits, torch.zeros(3), 1.0, present).exp()
    tensor([0.5000, 0.5000, 0.0000])
    """
    if not bool(present.any()):
        raise ValueError("a mixture prior requires the posterior of at least one other client")
    perturbed = ((logits + noise) / temperature).masked_fill(~present, -math.inf)
    return torch.log_softmax(perturbed, -1)


def temperature(number: int, rounds: int, first: float = 1.0, last: float = 0.1) -> float:
    """Return τ of round ``number``: geometric from ``first`` to ``last``. The paper gives no schedule.

    >>> [round(temperature(number, 3), 4) for number in (1, 2, 3)], temperature(1, 1)
    ([1.0, 0.3162, 0.1], 1.0)
    """
    return float(first * (last / first) ** ((number - 1) / max(rounds - 1, 1)))


def prototype_pull(z: Tensor, prototype: Tensor) -> Tensor:
    """Return mean_d (z − p)², which pulls z towards the client's prototype (FedVPA-GP, arXiv:2605.30873).

    The paper sums over d; the mean makes λ independent of the latent width.

    Args:
        z: ``[..., d]``.
        prototype: ``[d]`` p_y*, trained as well.

    Returns:
        ``[...]``.
    """
    return (z - prototype).square().mean(-1)


def orthogonality(prototypes: Tensor, scale: float) -> Tensor:
    """Return ‖P Pᵀ − s² I‖²_F, the deviation of prototypes from orthogonal vectors of length s.

    The paper prints I, which would shrink its prototypes: they start at length s, far from the origin.

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
