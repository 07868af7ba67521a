"""Preference losses with a margin instead of a logistic: hinge and IPO."""

from __future__ import annotations

from prefed.core.lazy import torch
from prefed.losses.batch import Batch, Losses, pair_figures

__all__ = ["hinge", "ipo"]


def hinge(batch: Batch, *, beta: float) -> Losses:
    """max(0, 1 − β Δ_ir): SLiC's hinge (arXiv:2305.10425) on DPO's implicit rewards (RSO, arXiv:2309.06657).

    A pair whose implicit rewards differ by 1 or more no longer moves the policy.
    """
    return torch.relu(1 - beta * batch.delta), _figures(batch, beta)


def ipo(batch: Batch, *, beta: float) -> Losses:
    """(h − 1 / (2β))²: IPO (arXiv:2310.12036), eq. 17, whose τ is ``beta``.

    h is the difference of the log-ratios per completion token: with sums, as printed, the loss would grow
    with the responses' length. Its authors confirmed the averages, and TRL uses them too.
    """
    chosen = batch.chosen_ratio / batch.chosen_length.clamp(min=1)
    rejected = batch.rejected_ratio / batch.need("rejected_length").clamp(min=1)
    return (chosen - rejected - 1 / (2 * beta)) ** 2, _figures(batch, beta)


def _figures(batch: Batch, beta: float) -> dict[str, torch.Tensor]:
    return pair_figures(beta * batch.chosen_ratio, beta * batch.rejected_ratio)
