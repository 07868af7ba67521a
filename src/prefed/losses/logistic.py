"""DPO and the variants that keep its logistic loss: label smoothing, robust, offset.

Throughout, Δ_ir = [log π_θ(y_w|x) − log π_ref(y_w|x)] − [log π_θ(y_l|x) − log π_ref(y_l|x)] and β Δ_ir is the
difference of the implicit rewards. Distributed DPO (arXiv:2605.20696) prints β on the policy term
alone in both of its algorithms; here, as in DPO itself, β multiplies the whole of Δ_ir.
"""

from __future__ import annotations

from prefed.core.lazy import F, torch
from prefed.losses.batch import Batch, Losses, pair_figures

__all__ = ["cdpo", "dpo", "odpo", "robust"]


def dpo(batch: Batch, *, beta: float) -> Losses:
    """−log σ(β Δ_ir): DPO (arXiv:2305.18290), eq. 7.

    At the start, where the policy is the reference, the loss is log 2.

    >>> at_rest = torch.tensor([-5.0])
    >>> batch = Batch(at_rest, torch.tensor([2]), at_rest, torch.tensor([2]), at_rest, at_rest)
    >>> dpo(batch, beta=0.1)[0]
    tensor([0.6931])
    """
    return -F.logsigmoid(beta * batch.delta), _figures(batch, beta)


def cdpo(batch: Batch, *, beta: float, label_smoothing: float) -> Losses:
    """−(1−ε) log σ(β Δ_ir) − ε log σ(−β Δ_ir): conservative DPO (Mitchell 2023, "A note on DPO with noisy
    preferences"), eq. 3.

    ε is the probability that a label is flipped. The loss is least at σ(β Δ_ir) = 1 − ε, so it does not
    push a pair further than its label deserves.
    """
    logits = beta * batch.delta
    loss = -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
    return loss, _figures(batch, beta)


def robust(batch: Batch, *, beta: float, label_smoothing: float) -> Losses:
    """[−(1−ε) log σ(β Δ_ir) + ε log σ(−β Δ_ir)] / (1 − 2ε): robust DPO (arXiv:2403.00409).

    Its mean over labels flipped with probability ε is the DPO loss on clean labels. ε is below ½.
    """
    logits = beta * batch.delta
    clean, flipped = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    loss = ((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    return loss, _figures(batch, beta)


def odpo(batch: Batch, *, beta: float, alpha: float, log_margin: float) -> Losses:
    """−log σ(β Δ_ir − α f(margin)): DPO with an offset (ODPO, arXiv:2402.10571).

    The implicit rewards must differ by at least the offset α f(margin), so a pair whose chosen response is
    much better counts for more. f is the logarithm, as in the paper's experiments (a margin below 1 then
    gives a negative offset), or with ``log_margin`` 0 the identity.

    Args:
        beta: β of the implicit reward.
        alpha: α ≥ 0; 0 is DPO.
        log_margin: 1 for f = log, 0 for f = identity.

    Raises:
        ValueError: a pair has no margin, or with ``log_margin`` one that is not above 0.
    """
    margin = batch.need("margin")
    missing = torch.isnan(margin)
    if bool(missing.any()):
        raise ValueError(
            f"{int(missing.sum())} of {len(batch)} pairs have no margin; "
            "odpo reads it from the data's margin column"
        )
    if log_margin:
        if bool((margin <= 0).any()):
            raise ValueError(
                f"odpo takes the logarithm of the margin, and one is {float(margin.min()):g}; "
                "set log_margin to 0 to use margins as they are"
            )
        margin = margin.log()
    return -F.logsigmoid(beta * batch.delta - alpha * margin), _figures(batch, beta)


def _figures(batch: Batch, beta: float) -> dict[str, torch.Tensor]:
    return pair_figures(beta * batch.chosen_ratio, beta * batch.rejected_ratio)
