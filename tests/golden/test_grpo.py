"""``grpo`` on all pairs of some completions, against GRPO written plainly, TRL's, and the KL divergence."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from prefed.train.losses import OBJECTIVES, PairBatch

WINS = {(0, 1): 1, (0, 2): 1, (0, 3): -1, (1, 2): 1, (1, 3): 0, (2, 3): -1}
"""Who beats whom of four completions: 1 if the first, −1 if the second, 0 for a tie. It is no order."""
K, BETA = 4, 0.3
ADVANTAGES = torch.tensor([1 / 3, 0.0, -1.0, 2 / 3], dtype=torch.float64)
"""Wins less defeats of each of them, as shares of the three others."""


def batch(policy: Tensor, reference: Tensor, pairs: dict[tuple[int, int], int]) -> PairBatch:
    """The labelled pairs of the completions with these log-probabilities."""
    chosen, rejected = zip(*(pair[::sign] for pair, sign in pairs.items() if sign), strict=True)
    lengths = torch.ones(len(chosen), dtype=torch.int64)
    w, l = list(chosen), list(rejected)  # noqa: E741
    return PairBatch(policy[w], lengths, policy[l], lengths, reference[w], reference[l])


def gradient(policy: Tensor, reference: Tensor, beta: float, pairs: dict[tuple[int, int], int]) -> Tensor:
    """That of the sum over pairs, by the log-probabilities of completions, per other completion."""
    loss, _ = OBJECTIVES["grpo"](batch(policy, reference, pairs), {"beta": beta})
    return torch.autograd.grad(loss.sum(), policy)[0] / (K - 1)


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens of four completions by policy and reference, and their mask."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.arange(7) < torch.tensor([[3], [7], [1], [5]])
    policy, reference = (-torch.rand(2, K, 7, generator=draw, dtype=torch.float64)) * mask
    return policy.requires_grad_(), reference, mask


def test_wins_are_advantages(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    """A plain policy gradient of wins among all completions, of which each has a ratio of 1 and A r."""
    policy, _, mask = tokens
    sums = (policy * mask).sum(1)
    table = torch.zeros(K, K, dtype=torch.float64)
    for (i, j), sign in WINS.items():
        table[i, j], table[j, i] = sign, -sign
    advantages = table.sum(1) / (K - 1)
    assert torch.allclose(advantages, ADVANTAGES)
    ratio = torch.exp(sums - sums.detach())
    (expected,) = torch.autograd.grad(-(advantages * ratio).sum(), policy)
    own = sums.detach().requires_grad_()
    got = gradient(own, torch.zeros(K, dtype=torch.float64), 1e-12, WINS)
    torch.testing.assert_close(got[:, None] * mask, expected, atol=1e-9, rtol=1e-9)


def test_rewards_are_bounded(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    """A plain policy gradient of PAR's rewards, centred: σ of a reward less another's, by the mean over the
    other completions. Rewards beyond all bounds are wins."""
    policy, _, mask = tokens
    sums = (policy * mask).sum(1)
    for rewards in torch.tensor([[0.3, -1.2, 2.0, 0.1], [1e4, 3e4, 2e4, 0.0]], dtype=torch.float64):
        rest = [torch.cat([rewards[:i], rewards[i + 1 :]]) for i in range(K)]
        advantages = torch.stack([2 * torch.sigmoid(r - rest[i]).mean() - 1 for i, r in enumerate(rewards)])
        objective = -(advantages * torch.exp(sums - sums.detach())).sum()
        (expected,) = torch.autograd.grad(objective, policy, retain_graph=True)
        own, zero = sums.detach().requires_grad_(), torch.zeros(K, dtype=torch.float64)
        gaps = {(i, j): rewards[i] - rewards[j] for i, j in WINS}
        made = batch(own, zero, {pair: int(gap.sign()) for pair, gap in gaps.items()})
        margins = replace(made, margin=torch.stack([gap.abs() for gap in gaps.values()]))
        loss, _ = OBJECTIVES["par"](margins, {"beta": 1e-12})
        found = torch.autograd.grad(loss.sum(), own, retain_graph=True)[0] / (K - 1)
        torch.testing.assert_close(found[:, None] * mask, expected, atol=1e-9, rtol=1e-9)
        assert advantages.abs().max() <= 1
    (wins,) = torch.autograd.grad(OBJECTIVES["grpo"](made, {"beta": 1e-12})[0].sum() / (K - 1), own)
    torch.testing.assert_close(found, wins)


def trl_gradient(policy: Tensor, reference: Tensor, mask: Tensor, beta: float) -> Tensor:
    """TRL's GRPOTrainer on these tokens, without σ and length normalisation, by log-probability."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        loss_type="dr_grpo",
        importance_sampling_level="token",
        max_completion_length=policy.shape[1],
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=beta,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
    )
    ids = torch.zeros(policy.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": ADVANTAGES,
        "ref_per_token_logps": reference,
    }
    loss = trainer.GRPOTrainer._compute_loss(stub, None, inputs)
    (found,) = torch.autograd.grad(loss * policy.numel(), policy)
    return found


def test_trl_has_the_same_gradient(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    """Of completions of any length; with KL of one token each, as TRL penalises token by token."""
    policy, reference, mask = tokens
    theirs = trl_gradient(policy, reference, mask, 0.0)
    own = policy.detach().sum(1).requires_grad_()
    ours = gradient(own, reference.sum(1), 1e-12, WINS)
    torch.testing.assert_close(ours[:, None] * mask, theirs, atol=1e-9, rtol=1e-9)
    first, before = policy.detach()[:, :1].requires_grad_(), reference[:, :1]
    theirs = trl_gradient(first, before, mask[:, :1], BETA)
    # Without a tie, each completion's penalty is there three times.
    own, untied = first.detach()[:, 0].requires_grad_(), {**WINS, (1, 3): 1}
    penalty = gradient(own, before[:, 0], BETA, untied) - gradient(own, before[:, 0], 1e-12, untied)
    ours = gradient(own, before[:, 0], 1e-12, WINS) + penalty
    torch.testing.assert_close(ours[:, None], theirs, atol=1e-9, rtol=1e-9)


def test_the_penalty_has_the_gradient_of_the_divergence() -> None:
    """E over the policy of β ∇ (r²) / 2 is ∇ β KL(π ‖ π_ref), summed over all of a vocabulary of six."""
    draw = torch.Generator().manual_seed(1)
    logits, other = torch.randn(2, 6, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    divergence = BETA * (policy.exp() * (policy - reference)).sum()
    # A completion paired with itself has twice its penalty, and no other loss.
    ones = torch.ones(6, dtype=torch.int64)
    pairs = PairBatch(policy, ones, policy, ones, reference, reference)
    loss, _ = OBJECTIVES["grpo"](pairs, {"beta": BETA})
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (found,) = torch.autograd.grad((policy.exp().detach() * loss / 2).sum(), logits)
    torch.testing.assert_close(found, expected)
