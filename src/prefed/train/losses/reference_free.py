"""Losses that need no reference model: SimPO, ORPO, and supervised fine-tuning.

SimPO and ORPO read log-probabilities per completion token: p̄ = log π_θ(y|x) / |y|.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prefed.core.lazy import F, torch
from prefed.train.losses.batch import LossOutput, PairBatch, reward_figures

if TYPE_CHECKING:
    from torch import Tensor


def sft(batch: PairBatch) -> LossOutput:
    """Next-token loss on y_w: the loss of FedBiscuit's FedAvg baseline (ICLR 2025).

    The loss of a pair is −log π_θ(y_w|x) · B / Σ |y_w|. Its mean over the B pairs is the mean over the
    batch's tokens, −Σ log π_θ(y_w|x) / Σ |y_w|. So every token of a batch has the same weight, as in TRL and
    Transformers, and a pair's loss depends on the lengths of the others.

    >>> loss, figures = sft(PairBatch(torch.tensor([-6.0, -2.0]), torch.tensor([3, 1])))
    >>> loss, loss.mean() == figures["nll"] == 8 / 4
    (tensor([3., 1.]), tensor(True))
    """
    loss = -batch.policy_chosen * (len(batch) / batch.chosen_length.sum().clamp(min=1))
    return loss, {"nll": loss.detach().mean()}


def simpo(batch: PairBatch, *, beta: float, gamma: float) -> LossOutput:
    """−log σ(β p̄_w − β p̄_l − γ): SimPO (arXiv:2405.14734), eq. 6.

    Args:
        beta: β. It multiplies averages per token and is therefore larger than DPO's: 2 to 10.
        gamma: γ, the margin by which the rewards must differ.
    """
    chosen, rejected = beta * batch.average_chosen, beta * batch.average_rejected
    return -F.logsigmoid(chosen - rejected - gamma), reward_figures(chosen, rejected)


def orpo(batch: PairBatch, *, beta: float) -> LossOutput:
    """−p̄_w − β log σ(log odds(y_w|x) − log odds(y_l|x)): ORPO (arXiv:2403.07691), eqs. 6 and 7.

    odds = P / (1 − P) with log P = p̄; ``beta`` is the paper's λ. The likelihood term is the mean over the
    chosen completion's tokens; TRL takes it over prompt and completion.
    """
    chosen, rejected = batch.average_chosen, batch.average_rejected
    ratio = F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return -chosen - beta * ratio, {
        **reward_figures(beta * chosen, beta * rejected),
        "nll": -chosen.detach().mean(),
        "odds_ratio": -ratio.detach().mean(),
    }


def _log_odds(log_p: Tensor) -> Tensor:
    """Log (P / (1 − P)) from log P ≤ 0; finite for P = 1 too."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    # Each form of log(1 − e^x) is accurate on one side of −log 2 only.
    complement = torch.where(
        log_p < -math.log(2), torch.log1p(-torch.exp(log_p)), torch.log(-torch.expm1(log_p))
    )
    return log_p - complement
