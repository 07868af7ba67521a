"""Supervised fine-tuning on the chosen responses."""

from __future__ import annotations

from prefed.losses.batch import LossOutput, PairBatch

__all__ = ["sft"]


def sft(batch: PairBatch) -> LossOutput:
    """Next-token loss on y_w: the loss of FedBiscuit's FedAvg baseline (ICLR 2025).

    The loss of a pair is −log π_θ(y_w|x) · B / Σ |y_w|. Its mean over the B pairs is the mean over the
    batch's tokens, −Σ log π_θ(y_w|x) / Σ |y_w|. So every token of a batch has the same weight, as in TRL and
    Transformers, and a pair's loss depends on the lengths of the others.

    >>> import torch
    >>> loss, figures = sft(PairBatch(torch.tensor([-6.0, -2.0]), torch.tensor([3, 1])))
    >>> loss, loss.mean() == figures["nll"] == 8 / 4
    (tensor([3., 1.]), tensor(True))
    """
    loss = -batch.policy_chosen * (len(batch) / batch.chosen_length.sum().clamp(min=1))
    return loss, {"nll": loss.detach().mean()}
