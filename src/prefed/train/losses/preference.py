"""Losses on preference pairs: DPO and its variants, PDPO, SimPO, ORPO, SFT.

Losses with a reference use Δ_ir = [log π_θ(y_w|x) − log π_ref(y_w|x)] − [log π_θ(y_l|x) − log π_ref(y_l|x)].
β Δ_ir is the difference of the implicit rewards. Both algorithms in distributed DPO (arXiv:2605.20696) print
β on the policy term only; here it multiplies all of Δ_ir, as in DPO.

SimPO and ORPO use log-probabilities per completion token: p̄ = log π_θ(y|x) / |y|.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prefed.core.lazy import F, torch
from prefed.train.feedback.kind import LossOutput
from prefed.train.feedback.pairs import PairBatch, implicit_reward_metrics, reward_metrics

if TYPE_CHECKING:
    from torch import Tensor


def dpo(batch: PairBatch, *, beta: float) -> LossOutput:
    """−log σ(β Δ_ir): DPO (arXiv:2305.18290), eq. 7. It is log 2 if the policy equals the reference.

    >>> at_rest = torch.tensor([-5.0])
    >>> batch = PairBatch(at_rest, torch.tensor([2]), at_rest, torch.tensor([2]), at_rest, at_rest)
    >>> dpo(batch, beta=0.1)[0]
    tensor([0.6931])
    """
    return -F.logsigmoid(beta * batch.delta), implicit_reward_metrics(batch, beta)


def dpo_norm(batch: PairBatch, *, beta: float) -> LossOutput:
    """−log σ(β (r_w / |y_w| − r_l / |y_l|)): length-normalised DPO (Tülu 3, arXiv:2411.15124).

    r_w and r_l are the log-ratios of the responses, so ``beta`` multiplies averages per token.
    """
    return -F.logsigmoid(beta * batch.average_delta), implicit_reward_metrics(batch, beta)


def rpo(batch: PairBatch, *, beta: float, alpha: float) -> LossOutput:
    """−log σ(β Δ_ir) − α p̄_w: DPO and the likelihood of the chosen response (arXiv:2404.19733, eq. 2).

    DPO alone is satisfied if both responses become less probable, the rejected one faster; this breaks text.
    p̄_w averages over the completion's tokens; the paper averages over those of reasoning and answer, its
    completion. TRL's loss types ``sigmoid`` and ``sft`` average over the tokens of a batch instead.

    Args:
        alpha: α ≥ 0; 0 is DPO.
    """
    loss, metrics = dpo(batch, beta=beta)
    nll = -batch.average_chosen
    return loss + alpha * nll, {**metrics, "nll": nll.detach().mean()}


def dpop(batch: PairBatch, *, beta: float, penalty: float) -> LossOutput:
    """−log σ(β (Δ_ir − λ max(0, −r_w))): DPO-positive (arXiv:2402.13228).

    r_w is the log-ratio of the chosen response: a pair whose chosen response is less probable than under the
    reference is penalised.

    Args:
        penalty: λ ≥ 0; 0 is DPO.
    """
    drop = torch.relu(-batch.chosen_ratio)
    loss = -F.logsigmoid(beta * (batch.delta - penalty * drop))
    return loss, {**implicit_reward_metrics(batch, beta), "drop": drop.detach().mean()}


def grpo(batch: PairBatch, *, beta: float) -> LossOutput:
    """−Δ_ir + β (r_w² + r_l²) / 2: the policy gradient of wins, with a KL penalty (GRPO, arXiv:2402.03300).

    r_w and r_l are the log-ratios of the responses. Over all pairs of k completions, the loss is k − 1 times
    Σ_i (−A_i r_i + β r_i² / 2), where A_i is the share of the others that completion i beats, less the share
    that beats it. For completions of the current policy, its gradient is that of GRPO's loss for whole
    completions, without the division by the deviation of rewards, and E[r ∇r] is that of KL(π_θ ‖ π_ref). The
    penalty bounds a step on older completions instead of clipped ratios.
    """
    penalty = batch.chosen_ratio.square() + batch.rejected_ratio.square()
    return beta * penalty / 2 - batch.delta, implicit_reward_metrics(batch, beta)


def par(batch: PairBatch, *, beta: float) -> LossOutput:
    """−tanh(m / 2) Δ_ir + β (r_w² + r_l²) / 2: :func:`grpo` with bounded rewards (PAR, arXiv:2502.18770).

    The margin m is the log-odds that the chosen response is better, the difference of two proxy rewards. A
    completion's reward is the mean, over the others as references, of σ of its proxy reward less theirs; A_i
    is twice this, less 1. It is between −1 and 1 however large proxy rewards grow, and near-ties count
    little. In the limit of large margins, this is :func:`grpo`. The paper's references are responses of the
    initial policy.

    Raises:
        ValueError: a pair has no margin.
    """
    bounded = torch.tanh(_margins(batch, "par") / 2)
    penalty = batch.chosen_ratio.square() + batch.rejected_ratio.square()
    return beta * penalty / 2 - bounded * batch.delta, implicit_reward_metrics(batch, beta)


def _margins(batch: PairBatch, name: str) -> Tensor:
    margin = batch.need("margin")
    missing = torch.isnan(margin)
    if bool(missing.any()):
        raise ValueError(
            f"{int(missing.sum())} of {len(batch)} pairs have no margin; "
            f"{name} requires the data's margin column"
        )
    return margin


def cdpo(batch: PairBatch, *, beta: float, label_smoothing: float) -> LossOutput:
    """−(1−ε) log σ(β Δ_ir) − ε log σ(−β Δ_ir): conservative DPO (Mitchell 2023, eq. 3).

    Source: "A note on DPO with noisy preferences". ε is the probability that a label is flipped. The minimum
    is at σ(β Δ_ir) = 1 − ε, which limits how far a pair is pushed.
    """
    logits = beta * batch.delta
    loss = -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
    return loss, implicit_reward_metrics(batch, beta)


def robust(batch: PairBatch, *, beta: float, label_smoothing: float) -> LossOutput:
    """[−(1−ε) log σ(β Δ_ir) + ε log σ(−β Δ_ir)] / (1 − 2ε): robust DPO (arXiv:2403.00409).

    ε < ½ is the probability that a label is flipped. The expected loss is then the DPO loss on clean labels.
    """
    logits = beta * batch.delta
    clean, flipped = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    loss = ((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    return loss, implicit_reward_metrics(batch, beta)


def odpo(batch: PairBatch, *, beta: float, alpha: float, log_margin: float) -> LossOutput:
    """−log σ(β Δ_ir − α f(margin)): DPO with an offset (ODPO, arXiv:2402.10571).

    The implicit rewards must differ by at least the offset α f(margin), so pairs with a much better chosen
    response have more weight. f is the logarithm, as in the paper's experiments; margins below 1 then give
    negative offsets.

    Args:
        alpha: α ≥ 0; 0 is DPO.
        log_margin: 1 for f = log, 0 for f = identity.

    Raises:
        ValueError: a pair has no margin, or a margin ≤ 0 with ``log_margin``.
    """
    margin = _margins(batch, "odpo")
    if log_margin:
        if bool((margin <= 0).any()):
            least = float(margin.min())
            remedy = "set log_margin to 0 to use margins directly"
            if least < 0:
                remedy = (
                    "it says that the rejected response is the better one, so correct or remove such pairs"
                )
            raise ValueError(f"odpo uses the logarithm of margins, but one is {least:g}; {remedy}")
        margin = margin.log()
    return -F.logsigmoid(beta * batch.delta - alpha * margin), implicit_reward_metrics(batch, beta)


def hinge(batch: PairBatch, *, beta: float) -> LossOutput:
    """max(0, 1 − β Δ_ir): SLiC's hinge (arXiv:2305.10425) on DPO's implicit rewards (RSO, arXiv:2309.06657).

    Pairs whose implicit rewards differ by 1 or more have no gradient.
    """
    return torch.relu(1 - beta * batch.delta), implicit_reward_metrics(batch, beta)


def ipo(batch: PairBatch, *, beta: float) -> LossOutput:
    """(h − 1 / (2β))²: IPO (arXiv:2310.12036), eq. 17, whose τ is ``beta``.

    h is the difference of the log-ratios per completion token. The paper prints sums, which make the loss
    grow with response length. Its authors confirmed averages, and TRL uses them too.
    """
    return (batch.average_delta - 1 / (2 * beta)) ** 2, implicit_reward_metrics(batch, beta)


def kto_pair(batch: PairBatch, *, beta: float, desirable: float, undesirable: float) -> LossOutput:
    """½ [λ_D σ(−β (r_w − z_l)) + λ_U σ(−β (z_w − r_l))]: KTO (arXiv:2402.01306), eq. 7, on pairs.

    r_w and r_l are the log-ratios of the responses. The baselines are z_l = max(0, mean r_l) and z_w = max(0,
    mean r_w) over the batch, so a response is not part of its own baseline, and the loss of a pair depends on
    its batch. As in the paper, baselines have no gradient.

    Args:
        desirable: λ_D, the weight of chosen responses.
        undesirable: λ_U, the weight of rejected responses.
    """
    chosen, rejected = batch.chosen_ratio, batch.rejected_ratio
    above, below = chosen.detach().mean().clamp(min=0), rejected.detach().mean().clamp(min=0)
    gain = desirable * torch.sigmoid(-beta * (chosen - below))
    cost = undesirable * torch.sigmoid(-beta * (above - rejected))
    return (gain + cost) / 2, {
        **implicit_reward_metrics(batch, beta),
        "baseline_chosen": below,
        "baseline_rejected": above,
    }


def sft(batch: PairBatch) -> LossOutput:
    """Next-token loss on y_w: the loss of FedBiscuit's FedAvg baseline (ICLR 2025).

    The loss of a pair is −log π_θ(y_w|x) · B / Σ |y_w|, so the mean over B pairs is the mean over the tokens
    of the batch. Every token has the same weight, as in TRL and Transformers, and the loss of a pair depends
    on the lengths of the others.

    >>> loss, metrics = sft(PairBatch(torch.tensor([-6.0, -2.0]), torch.tensor([3, 1])))
    >>> loss, loss.mean() == metrics["nll"] == 8 / 4
    (tensor([3., 1.]), tensor(True))
    """
    loss = -batch.policy_chosen * (len(batch) / batch.chosen_length.sum().clamp(min=1))
    return loss, {"nll": loss.detach().mean()}


def simpo(batch: PairBatch, *, beta: float, gamma: float) -> LossOutput:
    """−log σ(β p̄_w − β p̄_l − γ): SimPO (arXiv:2405.14734), eq. 6.

    Args:
        beta: β. It multiplies averages per token and is therefore larger than DPO's: 2 to 10.
        gamma: γ, the target margin between the rewards.
    """
    chosen, rejected = beta * batch.average_chosen, beta * batch.average_rejected
    return -F.logsigmoid(chosen - rejected - gamma), reward_metrics(chosen, rejected)


def orpo(batch: PairBatch, *, beta: float) -> LossOutput:
    """−p̄_w − β log σ(log odds(y_w|x) − log odds(y_l|x)): ORPO (arXiv:2403.07691), eqs. 6 and 7.

    odds = P / (1 − P) with log P = p̄; ``beta`` is the paper's λ. The likelihood term averages over tokens of
    the chosen completion; TRL averages over prompt and completion.
    """
    chosen, rejected = batch.average_chosen, batch.average_rejected
    ratio = F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return -chosen - beta * ratio, {
        **reward_metrics(beta * chosen, beta * rejected),
        "nll": -chosen.detach().mean(),
        "odds_ratio": -ratio.detach().mean(),
    }


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log (P / (1 − P)) from log P ≤ 0; finite for P = 1 too."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    # Each form of log(1 − e^x) is accurate on one side of −log 2 only.
    complement = torch.where(
        log_p < -math.log(2), torch.log1p(-torch.exp(log_p)), torch.log(-torch.expm1(log_p))
    )
    return log_p - complement


MOMENTUM = 0.95
"""Momentum of the moving average s."""
EPSILON = 1e-8
"""ε in the ratio that s averages."""


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

    Δ_er is the reward head's score of the chosen response minus that of the rejected response. s scales Δ_er
    to Δ_ir: it is the exponential moving average of mean|Δ_ir| / (mean|Δ_er| + ε) over the steps, including
    this batch, with momentum 0.95 and no gradient. Eq. 7 does not bound the ratio; setting ``scale_least``
    and ``scale_most`` to 0 gives exactly the paper's loss.

    With exclusion, the pairs marked by :func:`outliers` have loss 0. The other losses are scaled up, so the
    mean over the batch is the mean over the remaining pairs.

    Args:
        batch: with ``reward_chosen`` and ``reward_rejected``.
        weight: w_r ≥ 0; 0 is DPO, except for exclusion.
        exclude: 1 to exclude outliers, 0 to keep every pair.
        k: number of standard deviations from the mean beyond which a pair is an outlier.
        most: maximum share of a batch to exclude.
        scale_least: lower bound on the ratio; 0 for no bound.
        scale_most: upper bound on the ratio, at least ``scale_least``; 0 for no bound.
        scale: s after the last step; 1 before the first.

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> batch = PairBatch(zero, one, zero, one, zero, zero, reward_chosen=one, reward_rejected=zero)
    >>> bounds = {"scale_least": 0.1, "scale_most": 10.0}
    >>> loss, metrics = pdpo(batch, beta=1.0, weight=0.8, exclude=1, k=2.0, most=0.5, scale=1.0, **bounds)
    >>> metrics["scale"], torch.equal(loss, -F.logsigmoid(0.8 * metrics["scale"] * one))
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
        **implicit_reward_metrics(batch, beta),
        "implicit_margin": implicit_margin.mean(),
        "explicit_margin": explicit_margin.mean(),
        "agreement": (implicit_margin * explicit_margin > 0).to(implicit_margin.dtype).mean(),
        "excluded": excluded.to(implicit_margin.dtype).mean(),
        "scale": new_scale,
    }


def outliers(delta: Tensor, k: float, most: float) -> Tensor:
    """Mark pairs more than ``k`` standard deviations from the mean of their batch, as ``[B]`` bool.

    If these exceed the share ``most`` of the batch, only the furthest are marked.

    Args:
        delta: ``[B]``, without gradient. The standard deviation has divisor B, so with k = 2 no pair of a
            batch of five or fewer can be an outlier.
        k: above 0.
        most: at least 0 and below 1.

    >>> outliers(torch.tensor([0.0, 0, 0, 0, 0, 0, 9]), 2.0, 0.5).tolist()
    [False, False, False, False, False, False, True]
    """
    # Equal margins must have a deviation of exactly 0, which requires float64. Not every device supports it.
    wide = delta.to("cpu", torch.float64)
    away = (wide - wide.mean()).abs()
    far = away > k * wide.std(correction=0)
    allowed = int(most * len(wide))
    if int(far.sum()) > allowed:
        far = torch.zeros_like(far)
        far[away.sort(descending=True, stable=True).indices[:allowed]] = True
    return far.to(delta.device)
