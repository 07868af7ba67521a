"""PDPO: one loss on the implicit margin of DPO and the margin of an explicit reward head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prefed.core.lazy import F, torch
from prefed.train.losses.batch import LossOutput, PairBatch, implicit_reward_figures

if TYPE_CHECKING:
    from torch import Tensor


MOMENTUM = 0.95
"""Of the moving average that the scale s is."""
EPSILON = 1e-8
"""ε in the ratio that s follows."""


def pdpo(
    batch: PairBatch,
    *,
    beta: float,
    weight: float,
    exclude: float,
    k: float,
    most: float,
    scale_least: float,
    scale_most: float,
    scale: float,
) -> LossOutput:
    """−log σ(β Δ), Δ = Δ_ir + w_r s Δ_er: PDPO (FedPDPO, arXiv:2603.19741), eqs. 4 to 8.

    Δ_er is the reward head's score of the chosen response minus its score of the rejected one. s brings Δ_er
    to the size of Δ_ir. It is the exponential moving average of mean|Δ_ir| / (mean|Δ_er| + ε) over the steps,
    this batch included, with momentum 0.95. No gradient goes through it. Eq. 7 does not bound the ratio:
    with ``scale_least`` and ``scale_most`` both 0 the loss is exactly the paper's.

    With exclusion, the pairs that :func:`outliers` marks have loss 0. The other pairs' losses are scaled up,
    so that the mean over the batch is the mean over these other pairs.

    Args:
        batch: with ``reward_chosen`` and ``reward_rejected``.
        weight: w_r ≥ 0; 0 is DPO, apart from exclusion.
        exclude: 1 to exclude outliers, 0 to keep every pair.
        k: a pair further than this many standard deviations from the mean is an outlier.
        most: the largest share of a batch that may be excluded.
        scale_least: lower bound on the ratio; 0 for no bound.
        scale_most: upper bound on the ratio, at least ``scale_least``; 0 for no bound.
        scale: s after the last step; 1 before the first.

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> batch = PairBatch(zero, one, zero, one, zero, zero, reward_chosen=one, reward_rejected=zero)
    >>> bounds = {"scale_least": 0.1, "scale_most": 10.0}
    >>> loss, figures = pdpo(batch, beta=1.0, weight=0.8, exclude=1, k=2.0, most=0.5, scale=1.0, **bounds)
    >>> figures["scale"], torch.equal(loss, -F.logsigmoid(0.8 * figures["scale"] * one))
    (tensor(0.9550), True)
    """
    implicit = batch.delta
    explicit = batch.need("reward_chosen") - batch.need("reward_rejected")
    implicit_margin, explicit_margin = implicit.detach(), explicit.detach()
    ratio = implicit_margin.abs().mean() / (explicit_margin.abs().mean() + EPSILON)
    new_scale = MOMENTUM * scale + (1 - MOMENTUM) * ratio.clamp(scale_least, scale_most or math.inf)
    delta = implicit + weight * new_scale * explicit
    loss = -F.logsigmoid(beta * delta)
    excluded = torch.zeros_like(delta, dtype=torch.bool)
    if exclude:
        excluded = outliers(delta.detach(), k, most)
        loss = torch.where(excluded, 0.0, loss * (len(batch) / (~excluded).sum()))
    return loss, {
        **implicit_reward_figures(batch, beta),
        "implicit_margin": implicit_margin.mean(),
        "explicit_margin": explicit_margin.mean(),
        "agreement": (implicit_margin * explicit_margin > 0).to(implicit_margin.dtype).mean(),
        "excluded": excluded.to(implicit_margin.dtype).mean(),
        "scale": new_scale,
    }


def outliers(delta: Tensor, k: float, most: float) -> Tensor:
    """Mark the pairs that lie more than ``k`` standard deviations from the mean of their batch.

    If these are more than the share ``most`` of the batch, only the furthest are marked, as many as the share
    allows.

    Args:
        delta: ``[B]``, without gradient. The standard deviation is the batch's own (divisor B), so with k = 2
            no pair of a batch of five or fewer can be an outlier.
        k: above 0.
        most: at least 0 and below 1.

    Returns:
        ``[B]`` bool.

    >>> outliers(torch.tensor([0.0, 0, 0, 0, 0, 0, 9]), 2.0, 0.5).tolist()
    [False, False, False, False, False, False, True]
    """
    # Equal margins must have a deviation of exactly 0. That needs float64, which not every device has.
    wide = delta.to("cpu", torch.float64)
    away = (wide - wide.mean()).abs()
    far = away > k * wide.std(correction=0)
    allowed = int(most * len(wide))
    if int(far.sum()) > allowed:
        far = torch.zeros_like(far)
        far[away.sort(descending=True, stable=True).indices[:allowed]] = True
    return far.to(delta.device)
