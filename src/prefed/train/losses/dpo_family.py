"""DPO and its variants: label smoothing, robust, offset, hinge, IPO; and KTO on pairs.

In all of them Δ_ir = [log π_θ(y_w|x) − log π_ref(y_w|x)] − [log π_θ(y_l|x) − log π_ref(y_l|x)], and β Δ_ir is
the difference of the implicit rewards. Distributed DPO (arXiv:2605.20696) prints β on the policy term alone
in both of its algorithms. Here β multiplies the whole of Δ_ir, as in DPO itself.
"""

from __future__ import annotations

from prefed.core.lazy import F, torch
from prefed.train.losses.batch import LossOutput, PairBatch, implicit_reward_figures


def dpo(batch: PairBatch, *, beta: float) -> LossOutput:
    """−log σ(β Δ_ir): DPO (arXiv:2305.18290), eq. 7.

    At the start, where the policy is the reference, the loss is log 2.

    >>> at_rest = torch.tensor([-5.0])
    >>> batch = PairBatch(at_rest, torch.tensor([2]), at_rest, torch.tensor([2]), at_rest, at_rest)
    >>> dpo(batch, beta=0.1)[0]
    tensor([0.6931])
    """
    return -F.logsigmoid(beta * batch.delta), implicit_reward_figures(batch, beta)


def cdpo(batch: PairBatch, *, beta: float, label_smoothing: float) -> LossOutput:
    """−(1−ε) log σ(β Δ_ir) − ε log σ(−β Δ_ir): conservative DPO (Mitchell 2023, "A note on DPO with noisy
    preferences"), eq. 3.

    ε is the probability that a label is flipped. The loss has its minimum at σ(β Δ_ir) = 1 − ε, so a pair is
    not pushed further than its label deserves.
    """
    logits = beta * batch.delta
    loss = -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
    return loss, implicit_reward_figures(batch, beta)


def robust(batch: PairBatch, *, beta: float, label_smoothing: float) -> LossOutput:
    """[−(1−ε) log σ(β Δ_ir) + ε log σ(−β Δ_ir)] / (1 − 2ε): robust DPO (arXiv:2403.00409).

    ε is below ½. If labels are flipped with probability ε, the expected loss is the DPO loss on clean labels.
    """
    logits = beta * batch.delta
    clean, flipped = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    loss = ((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    return loss, implicit_reward_figures(batch, beta)


def odpo(batch: PairBatch, *, beta: float, alpha: float, log_margin: float) -> LossOutput:
    """−log σ(β Δ_ir − α f(margin)): DPO with an offset (ODPO, arXiv:2402.10571).

    The implicit rewards must differ by at least the offset α f(margin). So a pair whose chosen response is
    much better counts for more. f is the logarithm, as in the paper's experiments; a margin below 1 then
    gives a negative offset. With ``log_margin`` 0, f is the identity.

    Args:
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
    return -F.logsigmoid(beta * batch.delta - alpha * margin), implicit_reward_figures(batch, beta)


def hinge(batch: PairBatch, *, beta: float) -> LossOutput:
    """max(0, 1 − β Δ_ir): SLiC's hinge (arXiv:2305.10425) on DPO's implicit rewards (RSO, arXiv:2309.06657).

    A pair whose implicit rewards differ by 1 or more has no gradient.
    """
    return torch.relu(1 - beta * batch.delta), implicit_reward_figures(batch, beta)


def ipo(batch: PairBatch, *, beta: float) -> LossOutput:
    """(h − 1 / (2β))²: IPO (arXiv:2310.12036), eq. 17, whose τ is ``beta``.

    h is the difference of the log-ratios per completion token. The paper prints sums, with which the loss
    would grow with the responses' length. Its authors confirmed the averages, and TRL uses them too.
    """
    chosen = batch.chosen_ratio / batch.chosen_length.clamp(min=1)
    rejected = batch.rejected_ratio / batch.need("rejected_length").clamp(min=1)
    return (chosen - rejected - 1 / (2 * beta)) ** 2, implicit_reward_figures(batch, beta)


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
