"""Objectives: golden numbers, gradients, extremes, settings."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from prefed.train.feedback import PAIRS
from prefed.train.losses import OBJECTIVES, PPO, PairBatch, objective, reward_metrics


def pairs(
    chosen: list[float],
    rejected: list[float],
    *,
    lengths: tuple[list[int], list[int]] | None = None,
    margin: list[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> PairBatch:
    """Pairs with these log-ratios against a reference at −20 and −30."""
    size = len(chosen)
    long = lengths or ([4] * size, [5] * size)
    reference = torch.full((size,), -20.0, dtype=dtype), torch.full((size,), -30.0, dtype=dtype)
    return PairBatch(
        policy_chosen=reference[0] + torch.tensor(chosen, dtype=dtype),
        chosen_length=torch.tensor(long[0]),
        policy_rejected=reference[1] + torch.tensor(rejected, dtype=dtype),
        rejected_length=torch.tensor(long[1]),
        reference_chosen=reference[0],
        reference_rejected=reference[1],
        margin=None if margin is None else torch.tensor(margin, dtype=dtype),
    )


def averages(chosen: float, rejected: float) -> PairBatch:
    """One pair with these log-probabilities per token, over 3 and 2 tokens."""
    return PairBatch(
        policy_chosen=torch.tensor([3 * chosen], dtype=torch.float64),
        chosen_length=torch.tensor([3]),
        policy_rejected=torch.tensor([2 * rejected], dtype=torch.float64),
        rejected_length=torch.tensor([2]),
    )


LOG3 = math.log(3)


@pytest.mark.parametrize(
    ("name", "settings", "batch", "expected"),
    [
        # β Δ = ½ (log 3 + log 3) = log 3 and σ(log 3) = 3/4, σ(−log 3) = 1/4.
        ("dpo", {"beta": 0.5}, pairs([LOG3], [-LOG3]), [math.log(4 / 3)]),
        # An offset of 2 log(√3) = log 3 cancels β Δ = log 3: −log σ(0). The same offset, given as it is.
        ("odpo", {"beta": 0.5, "alpha": 2.0}, pairs([LOG3], [-LOG3], margin=[math.sqrt(3)]), [math.log(2)]),
        (
            "odpo",
            {"beta": 0.5, "alpha": 2.0, "log_margin": 0},
            pairs([LOG3], [-LOG3], margin=[LOG3 / 2]),
            [math.log(2)],
        ),
        # The DPO loss of Δ = 2 log 3, and ½ · (20 − log 3) / 4 nats per token of the chosen response.
        ("rpo", {"beta": 0.5, "alpha": 0.5}, pairs([LOG3], [-LOG3]), [math.log(4 / 3) + (20 - LOG3) / 8]),
        # The first chosen response gained: DPO's loss. The second lost log 3: 5 log 3 − 3 log 3 = 2 log 3.
        (
            "dpop",
            {"beta": 0.5, "penalty": 3.0},
            pairs([LOG3, -LOG3], [-LOG3, -6 * LOG3]),
            [math.log(4 / 3), math.log(4 / 3)],
        ),
        # Per token log 3 / 3 − (−log 3 · 2 / 4) = 5/6 log 3, times 6/5.
        ("dpo_norm", {"beta": 1.2}, pairs([LOG3], [-2 * LOG3], lengths=([3], [4])), [math.log(4 / 3)]),
        # 0.5 · (2² + 1²) / 2 − (2 + 1), and 0.5 · 4 / 2 − 0.
        ("grpo", {"beta": 0.5}, pairs([2.0, 2.0], [-1.0, 2.0]), [-1.75, 2.0]),
        # 1 − 0.1 · (2 + 3) = 0.5; 1 − 0.1 · 20 < 0.
        ("hinge", {"beta": 0.1}, pairs([2.0, 10.0], [-3.0, -10.0]), [0.5, 0.0]),
        # Per token 3/3 − (−2/4) = 1.5, less 1/(2 · 1) = 0.5: 1².
        ("ipo", {"beta": 1.0}, pairs([3.0], [-2.0], lengths=([3], [4])), [1.0]),
        # 2 · (−1 + 2) − (2 − log 3) = log 3.
        ("simpo", {"beta": 2.0, "gamma": 2 - LOG3}, averages(-1.0, -2.0), [math.log(4 / 3)]),
    ],
)
def test_golden(name: str, settings: dict[str, float], batch: PairBatch, expected: list[float]) -> None:
    """Each value is derived in the comment above it; TRL has the others, see ``test_losses_trl.py``."""
    loss, _ = OBJECTIVES[name](batch, settings)
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


ALL = tuple(name for name, loss in OBJECTIVES.items() if loss.feedback is PAIRS)


def wide(seed: int, size: int = 5, reward: float = 0.01) -> PairBatch:
    """Pairs with everything an objective may ask for, away from kinks; mean log-ratios below 0."""
    draw = torch.Generator().manual_seed(seed)

    def normal(mean: float) -> torch.Tensor:
        return mean + torch.randn(size, generator=draw, dtype=torch.float64)

    return PairBatch(
        policy_chosen=normal(-20),
        chosen_length=torch.randint(3, 9, (size,), generator=draw),
        policy_rejected=normal(-25),
        rejected_length=torch.randint(3, 9, (size,), generator=draw),
        reference_chosen=normal(-16),
        reference_rejected=normal(-21),
        margin=normal(0).exp(),
        reward_chosen=reward * normal(0),
        reward_rejected=reward * normal(0),
    )


@pytest.mark.parametrize("name", ALL)
def test_gradients_against_finite_differences(name: str) -> None:
    """Autograd in float64 against central differences; KTO's baselines are at 0 here, PDPO's scale is at its
    bound: constant."""
    batch = wide(0)

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        moved = replace(batch, policy_chosen=chosen, policy_rejected=rejected)
        return OBJECTIVES[name](moved)[0] + 0 * rejected

    assert batch.policy_rejected is not None
    leaves = [t.clone().requires_grad_() for t in (batch.policy_chosen, batch.policy_rejected)]
    assert torch.autograd.gradcheck(loss, leaves)


def test_dpo_gradient_is_the_papers() -> None:
    """DPO's gradient with respect to log π(y_w|x) is −β σ(−β Δ): at Δ = log 3 / β, −β/4."""
    batch = pairs([LOG3], [-LOG3])
    chosen = batch.policy_chosen.clone().requires_grad_()
    OBJECTIVES["dpo"](replace(batch, policy_chosen=chosen), {"beta": 0.5})[0].sum().backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([-0.125], dtype=torch.float64))


def test_kto_baselines_carry_no_gradient() -> None:
    """With z_w = 2 a constant, d/dr_l of ½ σ(−(z_w − r_l)) is ½ σ(x) σ(−x) at x = r_l − z_w, and chosen
    responses move their own term alone."""
    batch = pairs([1.0, 3.0], [-1.0, -3.0])
    chosen = batch.policy_chosen.clone().requires_grad_()
    OBJECTIVES["kto_pair"](replace(batch, policy_chosen=chosen), {"beta": 1.0})[0].sum().backward()
    sigma = torch.sigmoid(torch.tensor([1.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(chosen.grad, -0.5 * sigma * (1 - sigma))


@pytest.mark.parametrize("name", ALL)
def test_extremes_stay_finite(name: str) -> None:
    """Certain and impossible responses in float32: no overflow, no NaN, in loss, gradient or metrics."""
    one = torch.ones(1, dtype=torch.int64)
    for chosen, rejected in ((0.0, 0.0), (0.0, -1e4), (-1e4, 0.0)):
        policy, other = (torch.tensor([value]).requires_grad_() for value in (chosen, rejected))
        half = torch.full((1,), min(chosen, rejected) / 2)
        batch = PairBatch(policy, one, other, one, half, half, torch.tensor([1e-6]), half, -half)
        loss, metrics = OBJECTIVES[name](batch)
        loss.sum().backward()
        assert torch.isfinite(loss).all()
        assert all(torch.isfinite(value) for value in metrics.values())
        assert policy.grad is not None
        assert torch.isfinite(policy.grad).all()
        assert other.grad is None or torch.isfinite(other.grad).all()


@pytest.mark.parametrize("name", ALL)
def test_batch_statistics_is_declared_correctly(name: str) -> None:
    """The loss of a batch is the losses of its halves if and only if no statistic runs over the batch."""
    batch = wide(1, 6, reward=10.0)
    assert batch.reference_chosen is not None
    batch = replace(batch, reference_chosen=batch.reference_chosen - 20)
    halves = [
        PairBatch(**{k: None if v is None else v[part] for k, v in vars(batch).items()})
        for part in (slice(0, 2), slice(2, 6))
    ]
    whole = OBJECTIVES[name](batch)[0]
    split = torch.cat([OBJECTIVES[name](half)[0] for half in halves])
    assert torch.equal(whole, split) is not OBJECTIVES[name].batch_statistics


@pytest.mark.parametrize("name", ALL)
def test_needs_are_declared_correctly(name: str) -> None:
    """An objective works without what it says it does not need, and names what it does."""
    loss, full = OBJECTIVES[name], wide(2)
    needs = {
        **dict.fromkeys(("reference_chosen", "reference_rejected"), loss.needs_reference),
        **dict.fromkeys(("policy_rejected", "rejected_length"), loss.needs_rejected),
        **dict.fromkeys(("reward_chosen", "reward_rejected"), loss.needs_reward),
        "margin": loss.needs_margin,
    }
    less = replace(full, **{name: None for name, needed in needs.items() if not needed})
    assert torch.equal(loss(less)[0], loss(full)[0])
    for each in ("reference_chosen", "policy_rejected", "margin", "reward_rejected"):
        if needs[each]:
            with pytest.raises(ValueError, match=each):
                loss(replace(full, **{each: None}))


@given(st.floats(-50, 50), st.floats(0, 0.49))
def test_robust_is_dpo_in_the_mean(delta: float, epsilon: float) -> None:
    """(1−ε) robust(Δ) + ε robust(−Δ) = DPO(Δ): unbiased under labels flipped with probability ε."""
    robust = OBJECTIVES["robust"](pairs([delta], [0.0]), {"label_smoothing": epsilon})[0]
    flipped = OBJECTIVES["robust"](pairs([0.0], [delta]), {"label_smoothing": epsilon})[0]
    clean = OBJECTIVES["dpo"](pairs([delta], [0.0]))[0]
    torch.testing.assert_close((1 - epsilon) * robust + epsilon * flipped, clean, rtol=1e-9, atol=1e-9)


@given(st.floats(0.01, 0.49), st.floats(-4, 4))
def test_cdpo_is_least_at_the_labels_own_odds(epsilon: float, away: float) -> None:
    """d/dx [−(1−ε) log σ(x) − ε log σ(−x)] = σ(x) − (1−ε): least at x = log((1−ε)/ε)."""
    best = math.log((1 - epsilon) / epsilon)
    settings = {"beta": 1.0, "label_smoothing": epsilon}
    least = OBJECTIVES["cdpo"](pairs([best], [0.0]), settings)[0]
    assert OBJECTIVES["cdpo"](pairs([best + away], [0.0]), settings)[0] >= least - 1e-12


@pytest.mark.parametrize(
    ("name", "twist"),
    [
        ("cdpo", "label_smoothing"),
        ("robust", "label_smoothing"),
        ("odpo", "alpha"),
        ("rpo", "alpha"),
        ("dpop", "penalty"),
    ],
)
def test_variants_without_their_twist_are_dpo(name: str, twist: str) -> None:
    batch = wide(3)
    torch.testing.assert_close(OBJECTIVES[name](batch, {twist: 0.0})[0], OBJECTIVES["dpo"](batch)[0])


def test_figures() -> None:
    """Δ = (2, 0, −2): one of three is right, a tie counts wrong; β Δ has mean 0; rewards ½·(1+0−1)/3 = 0."""
    loss, figures = OBJECTIVES["dpo"](pairs([1.0, 0.0, -1.0], [-1.0, 0.0, 1.0]), {"beta": 0.5})
    assert not any(value.requires_grad for value in figures.values())
    assert {name: round(float(value), 12) for name, value in figures.items()} == {
        "accuracy": round(1 / 3, 12),
        "margin": 0.0,
        "reward_chosen": 0.0,
        "reward_rejected": 0.0,
    }
    assert loss.shape == (3,)
    assert reward_metrics(torch.tensor([2.0]), torch.tensor([-1.0]))["margin"] == 3


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dpo", {"betta": 0.1}, "objective 'dpo' has no setting 'betta'; did you mean 'beta'?"),
        ("sft", {"beta": 0.1}, "objective 'sft' has no setting 'beta'; it has: none"),
        ("dpo", {"beta": 0.0}, "beta must be above 0, not 0.0"),
        ("cdpo", {"label_smoothing": 0.5}, "label_smoothing must be at least 0 and below 0.5"),
        ("odpo", {"log_margin": 2}, "log_margin must be 0 or 1"),
        ("pdpo", {"most": 1.0}, "most must be at least 0 and below 1"),
        ("ppo", {"trace": 1.5}, "trace must be from 0 to 1, not 1.5"),
    ],
)
def test_settings_are_refused_by_name(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        (PPO if name == "ppo" else objective(name)).resolve(settings)
    assert message in str(caught.value)


def test_defaults() -> None:
    """β is 0.1 where the paper reads whole responses; every default is allowed."""
    assert OBJECTIVES["dpo"].resolve() == {"beta": 0.1}
    assert OBJECTIVES["robust"].resolve({"beta": 0.3}) == {"beta": 0.3, "label_smoothing": 0.1}
    for entry in (*OBJECTIVES.values(), PPO):
        assert entry.resolve(entry.defaults) == dict(entry.defaults)


def test_unknown_objective() -> None:
    with pytest.raises(ValueError, match="unknown objective 'ktopair'; did you mean 'kto_pair'"):
        objective("ktopair")


def test_margins_that_cannot_serve() -> None:
    """A missing margin is counted; 0 has no logarithm, but is fine as it is; less than 0 is not."""
    with pytest.raises(ValueError, match="1 of 2 pairs have no margin"):
        OBJECTIVES["odpo"](pairs([1.0, 1.0], [0.0, 0.0], margin=[1.0, math.nan]))
    level = pairs([1.0], [0.0], margin=[0.0])
    with pytest.raises(ValueError, match="log_margin"):
        OBJECTIVES["odpo"](level)
    with pytest.raises(ValueError, match="rejected response is the better one") as error:
        OBJECTIVES["odpo"](pairs([1.0], [0.0], margin=[-1.0]))
    assert "log_margin" not in str(error.value)
    assert torch.equal(OBJECTIVES["odpo"](level, {"log_margin": 0})[0], OBJECTIVES["dpo"](level)[0])


def test_ragged_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="chosen_length has shape"):
        PairBatch(torch.zeros(2), torch.ones(3))
