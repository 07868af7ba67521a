"""The terms of the variational selector's loss: closed forms, quadrature, limits, gradients."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from prefed.train.losses import tastes as latent
from prefed.train.losses.tastes import (
    Gaussian,
    gumbel,
    mixture_kl,
    mixture_kl_bound,
    mixture_log_weights,
    orthogonality,
    prototype_pull,
    standard_kl,
    temperature,
)

SEEDS = st.integers(0, 2**16)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quadrature(q: Gaussian, peers: Gaussian, weights: list[float]) -> float:
    """∫ q (log q − log p) over ten standard deviations of q, by scipy's densities and integrator."""
    own = stats.multivariate_normal(q.mean.numpy(), np.diag(q.log_variance.exp().numpy()))
    mixture = [
        stats.multivariate_normal(mean.numpy(), np.diag(log_variance.exp().numpy()))
        for mean, log_variance in zip(*peers, strict=True)
    ]

    def integrand(*z: float) -> float:
        prior = sum(w * other.pdf(z) for w, other in zip(weights, mixture, strict=True))
        return float(own.pdf(z) * (own.logpdf(z) - math.log(prior)))

    spread = (10 * (0.5 * q.log_variance).exp()).tolist()
    ranges = [(m - s, m + s) for m, s in zip(q.mean.tolist(), spread, strict=True)]
    return float(integrate.nquad(integrand, ranges, opts={"epsabs": 1e-3, "limit": 60})[0])


def test_two_dimensions_against_quadrature() -> None:
    """Two peers, the variances of the two axes differ."""
    q = Gaussian(torch.tensor([0.2, -0.4]).double(), torch.tensor([-0.5, 0.4]).double())
    peers = Gaussian(
        torch.tensor([[-0.5, 0.5], [1.0, -1.0]]).double(), torch.tensor([[0.2, -0.3], [-0.8, 0.6]]).double()
    )
    weights = [0.35, 0.65]
    ours = mixture_kl(q, peers, torch.tensor(weights).double().log(), normal(2, 1_000_000, 2))
    assert float(ours) == pytest.approx(quadrature(q, peers, weights), abs=4e-3)


@given(SEEDS)
def test_one_peer_has_the_closed_form(seed: int) -> None:
    """With one peer N(0, I) the estimate tends to the closed form, and the bound is it."""
    q = Gaussian(normal(seed, 3), 0.5 * normal(seed + 1, 3) - 1)
    peer = Gaussian(torch.zeros(1, 3).double(), torch.zeros(1, 3).double())
    one = torch.zeros(1).double()
    exact = float(standard_kl(q))
    assert float(mixture_kl_bound(q, peer, one)) == pytest.approx(exact, rel=1e-12)
    # The estimate's spread: Var of ½ Σ (z² − ε²) = Σ (μ²σ² + ½ (σ² − 1)²).
    variance = q.log_variance.exp()
    spread = math.sqrt(float((q.mean.square() * variance + 0.5 * (variance - 1).square()).sum()) / 20_000)
    assert abs(float(mixture_kl(q, peer, one, normal(seed + 2, 20_000, 3))) - exact) < 6 * spread


def test_standard_kl_against_torch() -> None:
    q = Gaussian(normal(3, 5, 4), normal(4, 5, 4))
    theirs = torch.distributions.kl_divergence(
        torch.distributions.Normal(q.mean, (0.5 * q.log_variance).exp()),
        torch.distributions.Normal(torch.zeros(4).double(), torch.ones(4).double()),
    )
    torch.testing.assert_close(standard_kl(q), theirs.sum(-1))


def test_the_bound_is_no_stand_in_for_the_kl(caplog: pytest.LogCaptureFixture) -> None:
    """Peers at two orthogonal prototypes of length 5, ‖Δ‖² = 50, σ² = e⁻⁴, q one of them, weights ½.
    KL(N_1 ‖ N_2) = 50 e⁴ / 2 = 1364.95 nats and half of it is 682.48; the KL to the mixture is log 2."""
    means = torch.zeros(2, 32).double()
    means[0, 0], means[1, 1] = 5.0, 5.0
    peers = Gaussian(means, torch.full((2, 32), -4.0).double())
    q, halves = Gaussian(peers.mean[0], peers.log_variance[0]), torch.full((2,), 0.5).double().log()
    latent._warn_of_bound.cache_clear()
    with caplog.at_level(logging.WARNING, "prefed"):
        bounds = [float(mixture_kl_bound(q, peers, halves)) for _ in range(2)]
    assert bounds == pytest.approx([12.5 * math.exp(4)] * 2)
    assert len(caplog.records) == 1
    assert "682" in caplog.text
    assert float(mixture_kl(q, peers, halves, normal(5, 4, 32))) == pytest.approx(math.log(2), abs=1e-9)


@given(SEEDS, st.integers(1, 5))
def test_the_bound_is_the_mean_over_peers(seed: int, count: int) -> None:
    """By torch's KL of two Gaussians. At equal samples no mixture is above its peers' mean (Jensen)."""
    q = Gaussian(normal(seed, 2), normal(seed + 1, 2))
    peers = Gaussian(normal(seed + 2, count, 2), normal(seed + 3, count, 2))
    log_weights, noise = torch.log_softmax(normal(seed + 4, count), 0), normal(seed + 5, 64, 2)
    own, others = (torch.distributions.Normal(g.mean, (0.5 * g.log_variance).exp()) for g in (q, peers))
    apart = torch.distributions.kl_divergence(own, others).sum(-1)
    torch.testing.assert_close(mixture_kl_bound(q, peers, log_weights), (log_weights.exp() * apart).sum())
    sampled = [
        mixture_kl(q, Gaussian(m[None], v[None]), torch.zeros(1).double(), noise)
        for m, v in zip(*peers, strict=True)
    ]
    jensen = float((log_weights.exp() * torch.stack(sampled)).sum())
    assert float(mixture_kl(q, peers, log_weights, noise)) <= jensen + 1e-9


@given(SEEDS)
def test_a_masked_peer_is_as_if_it_were_not_there(seed: int) -> None:
    """Not in the value, and neither its place's logit nor anything else gets another gradient."""
    present = torch.tensor([True, False, True, False])
    q = Gaussian(normal(seed, 3), normal(seed + 1, 3))
    peers = Gaussian(normal(seed + 2, 4, 3), normal(seed + 3, 4, 3))
    noise, g = normal(seed + 4, 4, 3), gumbel(torch.rand(4).double())
    logits = normal(seed + 5, 4).requires_grad_()
    kl = mixture_kl(q, peers, mixture_log_weights(logits, g, 0.5, present), noise)
    (slope,) = torch.autograd.grad(kl, logits)
    few = logits.detach()[present].requires_grad_()
    everyone = torch.ones(2, dtype=torch.bool)
    there = Gaussian(peers.mean[present], peers.log_variance[present])
    alone = mixture_kl(q, there, mixture_log_weights(few, g[present], 0.5, everyone), noise)
    (expected,) = torch.autograd.grad(alone, few)
    torch.testing.assert_close(kl, alone)
    torch.testing.assert_close(slope[present], expected)
    assert slope[~present].tolist() == [0, 0]


def test_no_peer_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one other client"):
        mixture_log_weights(torch.zeros(2), torch.zeros(2), 1.0, torch.zeros(2, dtype=torch.bool))


def test_low_temperature_picks_one_peer_by_its_probability() -> None:
    """At τ = 1e-4 every draw is one peer, and over 20,000 draws peer j comes with probability π_j: the
    standard error of a share is below 0.0036."""
    probability = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    present = torch.ones(3, dtype=torch.bool)
    draws = gumbel(torch.rand(20_000, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64))
    weights = mixture_log_weights(probability.log(), draws, 1e-4, present.expand(20_000, 3)).exp()
    largest, picked = weights.max(-1)
    assert float((largest > 1 - 1e-6).double().mean()) > 0.999
    shares = torch.bincount(picked, minlength=3) / 20_000
    assert shares.tolist() == pytest.approx(probability.tolist(), abs=0.015)


@given(st.floats(-30, 30))
def test_weights_do_not_see_a_constant_in_the_logits(shift: float) -> None:
    """So log π needs no normalisation, however far it is trained."""
    logits, noise, present = normal(7, 5), normal(8, 5), torch.ones(5, dtype=torch.bool)
    moved = mixture_log_weights(logits + shift, noise, 0.3, present)
    torch.testing.assert_close(moved, mixture_log_weights(logits, noise, 0.3, present))


def test_gumbel_is_finite_at_both_ends() -> None:
    """−log(−log u) at u = 0, e⁻¹ and the largest float below 1, which is 1 − 2⁻²⁴: −log 2⁻²⁴."""
    ends = gumbel(torch.tensor([0.0, math.exp(-1), 1 - 2**-24]))
    assert bool(torch.isfinite(ends).all())
    assert ends[1:].tolist() == pytest.approx([0.0, 24 * math.log(2)], abs=1e-6)


@given(st.integers(2, 500))
def test_temperature_falls_by_one_factor(rounds: int) -> None:
    values = [temperature(number, rounds) for number in range(1, rounds + 1)]
    assert values[0] == 1
    assert values[-1] == pytest.approx(0.1)
    ratios = [after / before for before, after in itertools.pairwise(values)]
    assert ratios == pytest.approx([0.1 ** (1 / (rounds - 1))] * (rounds - 1))


def test_pull_and_orthogonality_by_hand() -> None:
    """z − p = (1, −3): mean of 1 and 9. P Pᵀ − 9 I = [[5, 2], [2, 1]] − [[9, 0], [0, 9]]: 16 + 4 + 4 + 64."""
    assert prototype_pull(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])) == 5
    assert orthogonality(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), 3.0) == 88


def test_gradients() -> None:
    """Every argument that trains, by finite differences in float64."""
    arguments = [normal(seed, *shape).requires_grad_() for seed, shape in enumerate([(3,), (3,), (4,)])]
    noise, g = normal(9, 4, 3), normal(10, 4)
    peers, present = Gaussian(normal(11, 4, 3), normal(12, 4, 3)), torch.tensor([True, True, False, True])

    def estimate(mean: torch.Tensor, log_variance: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        log_weights = mixture_log_weights(logits, g, 0.7, present)
        return mixture_kl(Gaussian(mean, log_variance), peers, log_weights, noise)

    def bound(mean: torch.Tensor, log_variance: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return mixture_kl_bound(
            Gaussian(mean, log_variance), peers, mixture_log_weights(logits, g, 0.7, present)
        )

    assert torch.autograd.gradcheck(estimate, arguments)
    assert torch.autograd.gradcheck(bound, arguments)
    assert torch.autograd.gradcheck(lambda m, v: standard_kl(Gaussian(m, v)), arguments[:2])
    prototypes = normal(13, 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: orthogonality(p, 5.0), [prototypes])
    assert torch.autograd.gradcheck(lambda z, p: prototype_pull(z, p[1]), [arguments[0], prototypes])
