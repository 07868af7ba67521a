"""PDPO: the implicit margin of DPO and the margin of an explicit reward head in one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prefed.core.lazy import F, torch
from prefed.losses.batch import Batch, Losses, pair_figures

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["outliers", "pdpo"]

MOMENTUM = 0.95
EPSILON = 1e-8


def pdpo(
    batch: Batch,
    *,
    beta: float,
    weight: float,
    exclude: float,
    k: float,
    most: float,
    scale_least: float,
    scale_most: float,
    scale: float,
) -> Losses:
    """−log σ(β Δ), Δ = Δ_ir + w_r s Δ_er: PDPO (FedPDPO, arXiv:2603.19741), eqs. 4 to 8.

    Δ_er is the reward head's score of the chosen response less that of the rejected one. s brings its size to
    that of Δ_ir: it follows mean|Δ_ir| / (mean|Δ_er| + ε) as an exponential moving average over the steps
    with momentum 0.95, this batch included, and no gradient goes through it. Eq. 7 has no bounds on the
    ratio: ``scale_least`` and ``scale_most`` both 0 are the paper's loss to the letter.

    With exclusion the loss is the mean over the pairs that :func:`outliers` leaves: theirs are scaled up, so
    that the mean over the batch is the mean over them, and the others' are 0.

    Args:
        batch: with ``reward_chosen`` and ``reward_rejected``.
        beta: β.
        weight: w_r ≥ 0; 0 is DPO, apart from exclusion.
        exclude: 1 to leave outliers out, 0 to keep every pair.
        k: how many standard deviations from the mean make an outlier.
        most: the largest share of a batch that is left out.
        scale_least: the least that the ratio counts as; 0 for no bound.
        scale_most: the most that the ratio counts as, no less than ``scale_least``; 0 for no bound.
        scale: s after the last step, 1 at first.

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> batch = Batch(zero, one, zero, one, zero, zero, reward_chosen=one, reward_rejected=zero)
    >>> bounds = {"scale_least": 0.1, "scale_most": 10.0}
    >>> loss, figures = pdpo(batch, beta=1.0, weight=0.8, exclude=1, k=2.0, most=0.5, scale=1.0, **bounds)
    >>> figures["scale"], torch.equal(loss, -F.logsigmoid(0.8 * figures["scale"] * one))
    (tensor(0.9550), True)
    """
    implicit = batch.delta
    explicit = batch.need("reward_chosen") - batch.need("reward_rejected")
    held, given = implicit.detach(), explicit.detach()
    ratio = held.abs().mean() / (given.abs().mean() + EPSILON)
    follow = MOMENTUM * scale + (1 - MOMENTUM) * ratio.clamp(scale_least, scale_most or math.inf)
    delta = implicit + weight * follow * explicit
    loss = -F.logsigmoid(beta * delta)
    dropped = outliers(delta.detach(), k, most) if exclude else torch.zeros_like(held, dtype=torch.bool)
    if exclude:
        loss = torch.where(dropped, 0.0, loss * (len(batch) / (~dropped).sum()))
    return loss, {
        **pair_figures(beta * batch.chosen_ratio, beta * batch.rejected_ratio),
        "implicit_margin": held.mean(),
        "explicit_margin": given.mean(),
        "agreement": (held * given > 0).to(held.dtype).mean(),
        "excluded": dropped.to(held.dtype).mean(),
        "scale": follow,
    }


def outliers(delta: Tensor, k: float, most: float) -> Tensor:
    """Which pairs lie more than ``k`` standard deviations of their batch from its mean.

    If they are more than ``most`` of the batch, the furthest that make up no more than that.

    Args:
        delta: ``[B]``, without gradient. The standard deviation is that of the batch itself (divisor B), so
            that with k = 2 no pair of a batch of five or fewer can be an outlier.
        k: above 0.
        most: at least 0 and below 1.

    Returns:
        ``[B]`` bool.

    >>> outliers(torch.tensor([0.0, 0, 0, 0, 0, 0, 9]), 2.0, 0.5).tolist()
    [False, False, False, False, False, False, True]
    """
    # Doubles on the CPU: equal margins must have a deviation of exactly 0, and not every device has them.
    wide = delta.to("cpu", torch.float64)
    away = (wide - wide.mean()).abs()
    far = away > k * wide.std(correction=0)
    allowed = int(most * len(wide))
    if int(far.sum()) > allowed:
        far = torch.zeros_like(far)
        far[away.sort(descending=True, stable=True).indices[:allowed]] = True
    return far.to(delta.device)
