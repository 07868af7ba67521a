"""KTO on pairs: a baseline decides whether a response counts as good or bad, not the other response."""

from __future__ import annotations

from prefed.core.lazy import torch
from prefed.losses.batch import LossOutput, PairBatch, implicit_reward_figures

__all__ = ["kto_pair"]


def kto_pair(batch: PairBatch, *, beta: float, desirable: float, undesirable: float) -> LossOutput:
    """½ [λ_D σ(−β (r_w − z_l)) + λ_U σ(−β (z_w − r_l))]: KTO (arXiv:2402.01306), eq. 7, on pairs.

    r_w and r_l are the log-ratios of the chosen and the rejected response. The baselines are taken over the
    batch: z_l = max(0, mean r_l) for the chosen responses and z_w = max(0, mean r_w) for the rejected ones.
    So no response enters its own baseline, and each pair's loss depends on its batch. As in the paper, no
    gradient goes through the baselines.

    Args:
        desirable: λ_D, the weight of the chosen responses.
        undesirable: λ_U, the weight of the rejected ones.
    """
    chosen, rejected = batch.chosen_ratio, batch.rejected_ratio
    above, below = chosen.detach().mean().clamp(min=0), rejected.detach().mean().clamp(min=0)
    gain = desirable * torch.sigmoid(-beta * (chosen - below))
    cost = undesirable * torch.sigmoid(-beta * (above - rejected))
    return (gain + cost) / 2, {
        **implicit_reward_figures(batch, beta),
        "baseline_chosen": below,
        "baseline_rejected": above,
    }
