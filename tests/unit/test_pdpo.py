"""PDPO: its equation in float64, golden numbers, the scale, exclusion, ablations."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from prefed.train.losses import OBJECTIVES, PairBatch
from prefed.train.losses.preference import outliers

PDPO, DPO = OBJECTIVES["pdpo"], OBJECTIVES["dpo"]


def margins(implicit: list[float], explicit: list[float]) -> PairBatch:
    """Pairs with these margins Δ_ir and Δ_er."""
    size = len(implicit)
    zero, one = torch.zeros(size, dtype=torch.float64), torch.ones(size)
    return PairBatch(
        policy_chosen=torch.tensor(implicit, dtype=torch.float64) - 9,
        chosen_length=one,
        policy_rejected=zero - 7,
        rejected_length=one,
        reference_chosen=zero - 9,
        reference_rejected=zero - 7,
        reward_chosen=torch.tensor(explicit, dtype=torch.float64) + 3,
        reward_rejected=zero + 3,
    )


def close(value: torch.Tensor, expected: float | list[float]) -> None:
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-7)


def test_golden() -> None:
    """mean|Δ_ir| = 3 and mean|Δ_er| = 1: ratio 3, s = 0.95 · 3 + 0.05 · 3 = 3 from a memory of 3.
    With w_r = ½, Δ = 2 + 1.5 · 1 = 3.5 and −4 + 1.5 · (−1) = −5.5."""
    loss, figures = PDPO(margins([2.0, -4.0], [1.0, -1.0]), {"beta": 0.5, "weight": 0.5, "scale": 3.0})
    close(loss, [math.log1p(math.exp(-1.75)), math.log1p(math.exp(2.75))])
    close(figures["scale"], 3.0)
    close(figures["implicit_margin"], -1.0)
    close(figures["explicit_margin"], 0.0)
    close(figures["agreement"], 1.0)
    close(figures["excluded"], 0.0)
    close(figures["margin"], -0.5)


def test_scale_follows_the_ratio_within_bounds() -> None:
    """From 1: ratio 3 gives 0.95 + 0.15; 0/0 and 0/1 count as 0.1: 0.955; 1/0 counts as 10: 1.45."""
    for implicit, explicit, expected in (
        (3.0, 1.0, 1.1),
        (0.0, 0.0, 0.955),
        (0.0, 1.0, 0.955),
        (1.0, 0.0, 1.45),
    ):
        _, figures = PDPO(margins([implicit, -implicit], [explicit, explicit]))
        close(figures["scale"], expected)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        # Ratio 30: 0.95 + 0.05 · 30 = 2.45 to the letter of eq. 7, 0.95 + 0.05 · 10 = 1.45 by default.
        ({}, [1.45, 0.955]),
        ({"scale_most": 0.0}, [2.45, 0.955]),
        ({"scale_most": 20.0}, [1.95, 0.955]),
        # Ratio 0, as at step 0, where the policy is the reference: 0.95 to the letter.
        ({"scale_least": 0.0}, [1.45, 0.95]),
        ({"scale_least": 0.0, "scale_most": 0.0}, [2.45, 0.95]),
        ({"scale_least": 0.5}, [1.45, 0.975]),
    ],
)
def test_the_ratios_bounds_are_settings(bounds: dict[str, float], expected: list[float]) -> None:
    for implicit, scale in zip((30.0, 0.0), expected, strict=True):
        batch = margins([implicit, -implicit], [1.0, 1.0])
        _, figures = PDPO(batch, bounds)
        close(figures["scale"], scale)


@pytest.mark.parametrize("name", ["scale_least", "scale_most"])
def test_bounds_below_0_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 0"):
        PDPO(margins([1.0], [1.0]), {name: -1.0})


def test_scale_is_remembered() -> None:
    """Two batches of ratio 3: s = 3 − 2 · 0.95², each step starting from what the last one left."""
    batch, memory = margins([3.0], [1.0]), dict(PDPO.memory)
    for _ in range(2):
        _, figures = PDPO(batch, memory)
        memory = {name: float(figures[name]) for name in PDPO.memory}
    assert memory["scale"] == pytest.approx(3 - 2 * 0.95**2, rel=1e-7)


def test_a_bound_that_binds_says_where_the_scale_goes() -> None:
    """Step 1 has Δ_ir = 0 and takes s to 0.955; with ratios of 30 and more, s is 10 − 9.045 · 0.95^(k − 1)
    after k steps whatever they are: 7.21996 after 24. Without the upper bound it goes by the ratios."""
    ends = {}
    for most in (10.0, 0.0):
        memory = dict(PDPO.memory)
        for step in range(24):
            implicit = 0.0 if step == 0 else 30.0 + step
            _, figures = PDPO(margins([implicit, -implicit], [1.0, 1.0]), {"scale_most": most, **memory})
            memory = {name: float(figures[name]) for name in PDPO.memory}
        ends[most] = memory["scale"]
    assert ends[10.0] == pytest.approx(10 - 9.045 * 0.95**23, rel=1e-6)
    assert ends[10.0] == pytest.approx(7.21996, abs=1e-5)
    expected = 0.955
    for step in range(1, 24):
        expected = 0.95 * expected + 0.05 * (30 + step)
    assert ends[0.0] == pytest.approx(expected, rel=1e-6)


def naive(
    leaves: list[torch.Tensor], scale: float, beta: float, weight: float, included: list[int]
) -> torch.Tensor:
    """Eqs. 4 to 8 written out, pair by pair."""
    pw, pl, rw, rl, hw, hl = leaves
    implicit = [(pw[i] - rw[i]) - (pl[i] - rl[i]) for i in range(len(pw))]
    explicit = [hw[i] - hl[i] for i in range(len(pw))]
    ratio = sum(abs(float(d.detach())) for d in implicit) / sum(abs(float(d.detach())) for d in explicit)
    s = 0.95 * scale + 0.05 * ratio
    losses = [torch.log1p(torch.exp(-beta * (implicit[i] + weight * s * explicit[i]))) for i in included]
    return sum(losses, torch.zeros((), dtype=torch.float64)) / len(included)


@pytest.mark.parametrize("exclude", [0, 1])
def test_gradients_are_those_of_the_equation(exclude: int) -> None:
    """All four log-probabilities' and both scores' gradients, the batch's mean; pair 3 is an outlier."""
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(8, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(6)]
    with torch.no_grad():
        leaves[0][3] += 30
    included = [i for i in range(8) if not (exclude and i == 3)]
    expected = torch.autograd.grad(naive(leaves, 2.0, 0.3, 0.7, included), leaves)
    pw, pl, rw, rl, hw, hl = leaves
    batch = PairBatch(pw, torch.ones(8), pl, torch.ones(8), rw, rl, None, hw, hl)
    loss, figures = PDPO(batch, {"beta": 0.3, "weight": 0.7, "exclude": exclude, "scale": 2.0})
    close(loss.mean(), float(naive(leaves, 2.0, 0.3, 0.7, included).detach()))
    close(figures["excluded"], exclude / 8)
    for ours, theirs in zip(torch.autograd.grad(loss.mean(), leaves), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)
    assert not any(value.requires_grad for value in figures.values())


def test_dropped_pairs_cost_nothing_and_the_mean_is_over_the_rest() -> None:
    """Nine pairs at Δ_ir = 0, one at 100: mean 10, σ = √(0.9 · 10² + 0.1 · 90²) = 30, 2σ = 60 < 90."""
    loss, figures = PDPO(margins([0.0] * 9 + [100.0], [0.0] * 10))
    close(figures["excluded"], 0.1)
    close(loss[-1], 0.0)
    close(loss.mean(), math.log(2))
    close(PDPO(margins([0.0] * 9 + [100.0], [0.0] * 10), {"k": 4.0})[1]["excluded"], 0.0)


def test_at_most_a_share_is_dropped_the_furthest_first() -> None:
    """Deviations from the mean 0 are 5, 5, 4, 4, 1, 1 (σ = √14): with k = 1, four lie beyond; half is three:
    both fives and, of equals, the first four."""
    delta = torch.tensor([-4.0, 5.0, 1.0, 4.0, -1.0, -5.0])
    assert outliers(delta, 1.0, 0.9).tolist() == [True, True, False, True, False, True]
    assert outliers(delta, 1.0, 0.5).tolist() == [True, True, False, False, False, True]
    assert not outliers(delta, 1.0, 0.0).any()


@pytest.mark.parametrize("value", [0.0, 0.1, -1e4])
def test_equal_margins_are_no_outliers(value: float) -> None:
    """σ = 0 in exact arithmetic; rounding must not make outliers of pairs that are all alike."""
    assert not outliers(torch.full((7,), value), 0.5, 0.5).any()


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.floats(0.1, 3), st.floats(0, 0.99))
def test_exclusion_keeps_its_bounds(values: list[float], k: float, most: float) -> None:
    """At least one pair stays, at most the share goes, and by Chebyshev never more than 1/k²."""
    far = outliers(torch.tensor(values, dtype=torch.float64), k, most)
    assert far.sum() <= min(most * len(values), len(values) / k**2)
    assert not far.all()


@given(st.integers(0, 2**16), st.floats(0.01, 2))
def test_without_the_reward_head_it_is_dpo(seed: int, beta: float) -> None:
    """w_r = 0 and no exclusion: DPO, bit for bit; the reward head gets no gradient."""
    draw = torch.Generator().manual_seed(seed)
    implicit, explicit = (torch.randn(4, generator=draw) * 3 for _ in range(2))
    batch = margins(implicit.tolist(), explicit.tolist())
    ours = PDPO(batch, {"beta": beta, "weight": 0, "exclude": 0})[0]
    assert torch.equal(ours, DPO(batch, {"beta": beta})[0])


def test_agreement_counts_equal_signs() -> None:
    """Signs (+,+), (−,+), (0,+), (−,−): two of four; a policy that is the reference agrees with nothing."""
    _, figures = PDPO(margins([1.0, -1.0, 0.0, -1.0], [2.0, 2.0, 2.0, -2.0]))
    close(figures["agreement"], 0.5)


def test_an_outlier_is_one_of_the_combined_margin() -> None:
    """Δ_ir alone has no outlier here; w_r s Δ_er makes one."""
    batch = margins([0.0] * 10, [0.0] * 9 + [100.0])
    _, figures = PDPO(batch, {"weight": 1.0})
    close(figures["excluded"], 0.1)
    close(PDPO(batch, {"weight": 0.0})[1]["excluded"], 0.0)
