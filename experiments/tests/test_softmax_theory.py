"""The log-linear softmax policy: closed forms against automatic differentiation, and what L bounds."""

from __future__ import annotations

import importlib
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from experiment_scripts import EXPERIMENTS
from prefed.theory import Constants

sys.path.append(str(EXPERIMENTS / "distributed_dpo"))
softmax = importlib.import_module("softmax")
Pair, Step, probabilities = softmax.Pair, softmax.Step, softmax.probabilities
log_probability, score, score_jacobian = softmax.log_probability, softmax.score, softmax.score_jacobian


def draw_pair(generator: np.random.Generator, horizon: int, beta: float = 0.7, actions: int = 4) -> Pair:
    """Two trajectories through states of their own."""

    def steps() -> list[Step]:
        return [
            Step(generator.standard_normal((actions, 3)), int(generator.integers(actions)))
            for _ in range(horizon)
        ]

    return Pair(steps(), steps(), beta, float(generator.standard_normal()))


def torch_log_probability(theta: torch.Tensor, steps: list[Step]) -> torch.Tensor:
    terms = [torch.log_softmax(torch.from_numpy(s.features) @ theta, 0)[s.action] for s in steps]
    return torch.stack(terms).sum()


def torch_loss(theta: torch.Tensor, pair: Pair) -> torch.Tensor:
    margin = torch_log_probability(theta, pair.chosen) - torch_log_probability(theta, pair.rejected)
    return -torch.nn.functional.logsigmoid(pair.beta * (margin - pair.reference))


@pytest.mark.parametrize("horizon", [1, 4])
def test_closed_forms_are_the_derivatives(horizon):
    """torch differentiates the log-softmax itself."""
    generator = np.random.default_rng(3)
    pair, theta = draw_pair(generator, horizon), generator.standard_normal(3)
    at = torch.from_numpy(theta)
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    path = pair.chosen
    log_probability_of = lambda x: torch_log_probability(x, path)  # noqa: E731
    loss_of = lambda x: torch_loss(x, pair)  # noqa: E731
    assert log_probability(theta, path) == pytest.approx(log_probability_of(at).item())
    assert score(theta, path) == pytest.approx(jacobian(log_probability_of, at).numpy())
    assert score_jacobian(theta, path) == pytest.approx(hessian(log_probability_of, at).numpy())
    assert pair.loss(theta) == pytest.approx(loss_of(at).item())
    assert pair.gradient(theta) == pytest.approx(jacobian(loss_of, at).numpy())
    assert pair.hessian(theta) == pytest.approx(hessian(loss_of, at).numpy())


def test_large_parameters_do_not_overflow():
    generator = np.random.default_rng(0)
    pair, theta = draw_pair(generator, 3), np.full(3, 1e4)
    assert probabilities(theta, pair.chosen[0].features).sum() == pytest.approx(1)
    assert np.isfinite(pair.loss(theta))
    assert np.isfinite(pair.hessian(theta)).all()


def closed_form(pair: Pair, zeta_phi2: float, c_mix: float) -> float:
    """L. A mixing constant C_mix ≥ 1 is that of ς = ½ and C₀ = (C_mix − 1)/2, or of ς = 0."""
    c0, varsigma = ((c_mix - 1) / 2, 0.5) if c_mix >= 3 else (1.0, (c_mix - 1) / (c_mix + 1))
    constants = Constants(
        beta=pair.beta, horizon=len(pair.chosen), zeta_phi2=zeta_phi2, c0=c0, varsigma=varsigma
    )
    assert constants.c_mix == pytest.approx(c_mix)
    return constants.l


@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0.05, 20), st.floats(0, 30))
def test_l_bounds_the_hessian_where_c_mix_is_the_horizon(seed, horizon, beta, size):
    """Any features, states, actions and θ. For H = 1 this is C_mix = 1. ζ_φ² is above every squared score."""
    generator = np.random.default_rng(seed)
    pair = draw_pair(generator, horizon, beta)
    theta = size * generator.standard_normal(3)
    norm = np.linalg.norm(pair.hessian(theta), 2)
    assert norm <= closed_form(pair, pair.score_bound(), horizon) * (1 + 1e-12)


def aligned(horizon: int, beta: float) -> Pair:
    """Two actions with features ±1 in every step; the chosen trajectory takes one, the rejected the other."""
    features = np.array([[1.0], [-1.0]])
    return Pair([Step(features, 0)] * horizon, [Step(features, 1)] * horizon, beta)


def test_a_mixing_constant_of_one_does_not_bound_the_hessian():
    """At θ = 0 each squared score is 1, and that is the largest mean over θ. Scores of different steps have
    no correlation under the policy, so ς = 0 and C_mix = 1. But v = 2H, and the norm is β²H² = 25 at β = 1,
    H = 5; L = (1 + 2) · 5. With C_mix = H it is (5 + 2) · 5."""
    pair, theta = aligned(5, 1.0), np.zeros(1)
    norm = np.linalg.norm(pair.hessian(theta), 2)
    assert norm == pytest.approx(25)
    assert norm / closed_form(pair, 1.0, 1.0) == pytest.approx(5 / 3)
    assert Constants(beta=1, horizon=5).aligned_norm == pytest.approx(5 / 3)
    assert norm <= closed_form(pair, 1.0, 5.0)


@pytest.mark.parametrize(("horizon", "beta", "c_mix"), [(1, 0.2, 1.0), (5, 2.0, 1.0), (64, 0.2, 3.0)])
def test_the_ratio_of_aligned_features(horizon, beta, c_mix):
    pair = aligned(horizon, beta)
    ratio = np.linalg.norm(pair.hessian(np.zeros(1)), 2) / closed_form(pair, 1.0, c_mix)
    varsigma = (c_mix - 1) / (c_mix + 1)
    constants = Constants(beta=beta, horizon=horizon, varsigma=varsigma)
    assert constants.aligned_norm == pytest.approx(ratio)


def test_the_mean_of_squared_scores_is_too_small_a_bound_even_for_one_step():
    """Assumption 3.4 bounds the mean of ‖ν‖² under the policy. With features −1, 0 a hundred times and 1 the
    mean is nowhere above 0.26 or so, as a softmax that leaves the many zeros is at one end already. The pair
    of the two ends at θ = 0 has the norm β²: above L = 3 · 0.26 at β = 1."""
    features = np.array([[-1.0], *[[0.0]] * 100, [1.0]])
    pair = Pair([Step(features, len(features) - 1)], [Step(features, 0)], 1.0)
    moments = []
    for theta in np.linspace(-12, 12, 2001):
        weights = probabilities(np.array([theta]), features)
        mean = weights @ features
        moments.append((weights @ (features - mean) ** 2).item())
    norm = np.linalg.norm(pair.hessian(np.zeros(1)), 2)
    assert norm == pytest.approx(1)
    assert norm > 1.25 * closed_form(pair, max(moments), 1.0)
    assert norm <= closed_form(pair, pair.score_bound(), 1.0)
