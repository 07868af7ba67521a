"""KTO on pairs: each response is judged good or bad against a baseline, not against its partner."""

from __future__ import annotations

from prefed.core.lazy import torch
from prefed.losses.batch import Batch, Losses, pair_figures

__all__ = ["kto_pair"]


def kto_pair(batch: Batch, *, beta: float, desirable: float, undesirable: float) -> Losses:
    """½ [λ_D σ(−β (r_w − z_l)) + λ_U σ(−β (z_w − r_l))]: KTO (arXiv:2402.01306), eq. 7, on pairs.

    r_w and r_l are the log-ratios of the chosen and the rejected response. The baselines are the batch's own
    z_l = max(0, mean r_l) for the chosen and z_w = max(0, mean r_w) for the rejected responses, so that no
    response enters its own baseline; as in the paper no gradient goes through them. They make
    each pair's loss depend on its batch.

    Args:
        beta: β.
        desirable: λ_D, the weight of the chosen responses.
        undesirable: λ_U, the weight of the rejected ones.
    """
    chosen, rejected = batch.chosen_ratio, batch.rejected_ratio
    above, below = chosen.detach().mean().clamp(min=0), rejected.detach().mean().clamp(min=0)
    gain = desirable * torch.sigmoid(-beta * (chosen - below))
    cost = undesirable * torch.sigmoid(-beta * (above - rejected))
    return (gain + cost) / 2, {
        **pair_figures(beta * chosen, beta * rejected),
        "baseline_chosen": below,
        "baseline_rejected": above,
    }
