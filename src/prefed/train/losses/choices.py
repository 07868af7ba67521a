"""The loss of a selector: which of two responses is better, said with one of two letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefed.core.lazy import F
from prefed.train.losses.batch import LossOutput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ChoiceBatch:
    """B pairs, each presented in both orders.

    Attributes:
        orders: ``[B, 2]`` for each order the log-odds, in nats, that the pair's first response is better. The
            first is the one that comes first in alphabetical order.
        sign: ``[B]`` +1 where the first response is the chosen one, −1 where it is the rejected one.

    Raises:
        ValueError: the shapes do not fit.
    """

    orders: Tensor
    sign: Tensor

    def __post_init__(self) -> None:
        if self.orders.shape != (len(self), 2) or self.sign.shape != (len(self),):
            shapes = f"{tuple(self.orders.shape)} and {tuple(self.sign.shape)}"
            raise ValueError(f"orders and sign have shapes {shapes}; expected (B, 2) and (B,)")

    def __len__(self) -> int:
        return self.sign.numel()


def choice(batch: ChoiceBatch) -> LossOutput:
    """Cross-entropy over the two letters, the mean over both orders: FedBiscuit (ICLR 2025), eq. 3.

    A softmax over two logits is σ of their difference. So the loss of an order is −log σ(log-odds of the
    chosen response). Figures: ``accuracy``, the share of pairs whose mean log-odds favour the chosen response
    (a tie counts as wrong), and ``margin``, the mean of these.

    >>> import torch
    >>> orders = torch.tensor([[0.0, 0.0], [-2.0, 0.0]])
    >>> loss, figures = choice(ChoiceBatch(orders, torch.tensor([1.0, -1.0])))
    >>> loss, figures["accuracy"].item(), figures["margin"].item()
    (tensor([0.6931, 0.4100]), 0.5, 0.5)
    """
    chosen = batch.sign[:, None] * batch.orders
    margin = chosen.detach().mean(1)
    figures = {"accuracy": (margin > 0).to(margin.dtype).mean(), "margin": margin.mean()}
    return -F.logsigmoid(chosen).mean(1), figures
