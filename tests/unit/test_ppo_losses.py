"""Offline PPO's pure functions: golden numbers, laws, and the policy gradient they start from."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from prefed.train.losses.ppo import (
    gae,
    kl_estimate,
    pair_rewards,
    policy_loss,
    rollout,
    standardize,
    token_rewards,
    value_loss,
)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


SEEDS = st.integers(0, 2**16)
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def test_standardise_golden() -> None:
    """Scores 0, 2, 4, 6: mean 3, σ = √5. One a among 49 zeros lies (49/50) / √(49/2500) = 7 σ up, cut
    to 5; the zeros lie 1/7 σ down. Turned over, one −a lies 7 σ down, cut to −5, and the zeros 1/7 σ up."""
    close(standardize(t(0, 2, 4, 6).view(2, 2)), t(-3, -1, 1, 3).view(2, 2) / math.sqrt(5))
    lone = torch.zeros(25, 2, dtype=torch.float64)
    lone[3, 1] = 9.0
    close(standardize(lone)[3], t(-1 / 7, 5))
    close(standardize(-lone)[3], t(1 / 7, -5))
    assert not standardize(torch.full((3, 2), 0.1)).any()


@given(SEEDS, st.floats(0.01, 100), st.floats(-100, 100))
def test_standardised_scores_do_not_depend_on_the_unit(seed: int, scale: float, shift: float) -> None:
    """A reward model's zero and unit are arbitrary: a r + b, a > 0, gives the same."""
    scores = normal(seed, 6, 2)
    torch.testing.assert_close(standardize(scale * scores + shift), standardize(scores), rtol=1e-6, atol=1e-6)


def test_pair_rewards_golden() -> None:
    """d = 5 and d = −2: in the second pair the reward model prefers the rejected response."""
    close(pair_rewards(t(3, -2, 0, 2).view(2, 2)), t(2.5, -2.5, -1, 1).view(2, 2))


def test_token_rewards_golden() -> None:
    """Log-ratios 1, −2, 3 at weight 0.1; responses of two tokens and one, rewarded 4 and −4 at their ends."""
    ours = token_rewards(t(-1, -4, 0), t(-2, -2, -3), t(4, -4), torch.tensor([2, 1]), kl=0.1)
    close(ours, t(-0.1, 4.2, -4.3))


def test_gae_golden() -> None:
    """γ = ½, λ = ½, r = (1, 2, 4), V = (2, 4, 8): δ_2 = 4 − 8 = −4; δ_1 = 2 + 4 − 4 = 2; δ_0 = 1 + 2 − 2 = 1.
    A_2 = −4; A_1 = 2 − 4/4 = 1; A_0 = 1 + 1/4. A response of one token in the same batch: A = 3 − 1."""
    advantages, returns = gae(t(1, 2, 4, 3), t(2, 4, 8, 1), torch.tensor([3, 1]), discount=0.5, trace=0.5)
    close(advantages, t(1.25, 1, -4, 2))
    close(returns, t(3.25, 5, 4, 3))


@given(LENGTHS, SEEDS, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_sum(lengths: list[int], seed: int, discount: float, trace: float) -> None:
    """A_t = Σ_k (γλ)^k δ_{t+k}, written out within each response."""
    rewards, values = normal(seed, 2, sum(lengths))
    expected, start = [], 0
    for length in lengths:
        r, v = rewards[start : start + length], [*values[start : start + length], torch.zeros(())]
        delta = [r[k] + discount * v[k + 1] - v[k] for k in range(length)]
        expected += [
            sum((discount * trace) ** (k - s) * delta[k] for k in range(s, length)) for s in range(length)
        ]
        start += length
    ours, returns = gae(rewards, values, torch.tensor(lengths), discount=discount, trace=trace)
    close(ours, torch.stack(expected))
    close(returns, ours + values)


@given(LENGTHS, SEEDS)
def test_gae_at_its_ends(lengths: list[int], seed: int) -> None:
    """With γ = λ = 1 the sum is the rewards to come minus V; with λ = 0 it is δ_t."""
    rewards, values = normal(seed, 2, sum(lengths))
    sizes = torch.tensor(lengths)
    to_come = torch.cat([r.flip(0).cumsum(0).flip(0) for r in rewards.split(lengths)])
    close(gae(rewards, values, sizes, discount=1, trace=1)[0], to_come - values)
    after = torch.cat([torch.cat([v[1:], v[:1] * 0]) for v in values.split(lengths)])
    close(gae(rewards, values, sizes, discount=1, trace=0)[0], rewards + after - values)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # ε = 0.2. Inside: −ρA, slope d/d log ρ = −ρA. Beyond the bound that A pushes to: flat.
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_policy_loss_golden(ratio: float, advantage: float, loss: float, slope: float) -> None:
    new = t(ratio).log().requires_grad_()
    ours = policy_loss(new, t(0.0), t(advantage), clip=0.2)
    close(ours.detach(), t(loss))
    close(torch.autograd.grad(ours.sum(), new)[0], t(slope))


@given(SEEDS, st.floats(0.01, 0.9))
def test_a_clipped_loss_is_no_smaller(seed: int, clip: float) -> None:
    """The clipped loss is at least the unclipped one, for the policy and for the critic."""
    new, old, other = normal(seed, 3, 20)
    assert (policy_loss(new, old, other, clip=clip) >= -(new - old).exp() * other - 1e-12).all()
    assert (value_loss(new, old, other, clip=clip) >= (new - other).square()).all()


def test_value_loss_golden() -> None:
    """V_old = 1, ε = ½. G = 4, V = 3: clipped to 1.5, so 2.5² and not 1². G = 0, V = 3: 3² and not 1.5².
    V = 1.2 lies inside: 0.8²."""
    close(value_loss(t(3, 3, 1.2), t(1, 1, 1), t(4, 0, 2), clip=0.5), t(6.25, 9, 0.64))


@given(SEEDS)
def test_kl_estimate_is_a_divergence(seed: int) -> None:
    """ρ − 1 − log ρ ≥ 0, 0 where nothing moved; averaged over π_old it is KL(π_old ‖ π)."""
    old, new = normal(seed, 2, 6).log_softmax(1)
    assert (kl_estimate(new, old) >= 0).all()
    assert not kl_estimate(old, old).any()
    close((old.exp() * kl_estimate(new, old)).sum(), (old.exp() * (old - new)).sum())


SETTINGS = {"kl": 0.0, "discount": 1.0, "trace": 1.0, "scaled": 0.0}


def test_rollout_without_any_reward_has_no_advantages() -> None:
    """The advantages are all 0. Their standard deviation is 0 too, and nothing is divided by it."""
    zero = torch.zeros(3)
    assert not rollout(
        zero, zero, zero, zero[:1], torch.tensor([3]), **{**SETTINGS, "scaled": 1.0}
    ).advantages.any()
