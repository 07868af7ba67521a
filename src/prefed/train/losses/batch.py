"""Input and output of a loss on preference pairs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

from prefed.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


LossOutput: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"
"""Losses per pair ``[B]`` with gradient, and detached scalar metrics by name."""


@dataclass(frozen=True)
class PairBatch:
    """Log-probabilities of B preference pairs under a policy and its frozen reference.

    Log-probabilities are in nats and summed over the completion, including end-of-text and excluding the
    prompt. Tensors that an objective does not need may be ``None``; see the attributes ``needs_…`` of
    :class:`prefed.train.losses.PairLoss`.

    Attributes:
        policy_chosen: ``[B]`` log π_θ(y_w|x).
        chosen_length: ``[B]`` completion tokens of y_w.
        policy_rejected: ``[B]`` log π_θ(y_l|x).
        rejected_length: ``[B]`` completion tokens of y_l.
        reference_chosen: ``[B]`` log π_ref(y_w|x).
        reference_rejected: ``[B]`` log π_ref(y_l|x).
        margin: ``[B]`` how much better y_w is, on the scale of the data; NaN for a record without a margin.
        reward_chosen: ``[B]`` score of y_w by an explicit reward head.
        reward_rejected: ``[B]`` score of y_l by an explicit reward head.

    Raises:
        ValueError: a tensor has a shape other than ``[B]``.

    >>> import torch
    >>> batch = PairBatch(torch.tensor([-4.0]), torch.tensor([3]), torch.tensor([-6.0]), torch.tensor([2]))
    >>> len(batch), batch.average_chosen
    (1, tensor([-1.3333]))
    """

    policy_chosen: Tensor
    chosen_length: Tensor
    policy_rejected: Tensor | None = None
    rejected_length: Tensor | None = None
    reference_chosen: Tensor | None = None
    reference_rejected: Tensor | None = None
    margin: Tensor | None = None
    reward_chosen: Tensor | None = None
    reward_rejected: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value.shape != (len(self),):
                shape = tuple(value.shape)
                raise ValueError(f"{field.name} has shape {shape}; expected ({len(self)},)")

    def __len__(self) -> int:
        return self.policy_chosen.numel()

    def need(self, name: str) -> Tensor:
        """Return the tensor ``name``.

        Raises:
            ValueError: it is ``None``.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"this objective requires {name}, which the batch lacks")
        assert isinstance(value, torch.Tensor)
        return value

    @property
    def chosen_ratio(self) -> Tensor:
        """``[B]`` log π_θ(y_w|x) − log π_ref(y_w|x)."""
        return self.policy_chosen - self.need("reference_chosen")

    @property
    def rejected_ratio(self) -> Tensor:
        """``[B]`` log π_θ(y_l|x) − log π_ref(y_l|x)."""
        return self.need("policy_rejected") - self.need("reference_rejected")

    @property
    def delta(self) -> Tensor:
        """``[B]`` Δ_ir: the chosen log-ratio minus the rejected one."""
        return self.chosen_ratio - self.rejected_ratio

    @property
    def average_delta(self) -> Tensor:
        """``[B]`` the chosen log-ratio per completion token minus the rejected one."""
        chosen = self.chosen_ratio / self.chosen_length.clamp(min=1)
        return chosen - self.rejected_ratio / self.need("rejected_length").clamp(min=1)

    @property
    def average_chosen(self) -> Tensor:
        """``[B]`` log π_θ(y_w|x) per completion token."""
        return self.policy_chosen / self.chosen_length.clamp(min=1)

    @property
    def average_rejected(self) -> Tensor:
        """``[B]`` log π_θ(y_l|x) per completion token."""
        return self.need("policy_rejected") / self.need("rejected_length").clamp(min=1)


def implicit_reward_metrics(batch: PairBatch, beta: float) -> dict[str, Tensor]:
    """Return :func:`reward_metrics` of DPO's implicit rewards, β times the log-ratios."""
    return reward_metrics(beta * batch.chosen_ratio, beta * batch.rejected_ratio)


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return metrics of the rewards of a batch.

    Args:
        chosen: ``[B]`` rewards of the chosen responses.
        rejected: ``[B]`` rewards of the rejected responses.

    Returns:
        ``accuracy``: share of pairs with the chosen reward above the rejected one (ties count as wrong);
            ``margin``: mean difference; ``reward_chosen`` and ``reward_rejected``: means.

    >>> import torch
    >>> metrics = reward_metrics(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]))
    >>> metrics["accuracy"].item(), metrics["margin"].item()
    (0.5, 0.5)
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": (chosen > rejected).to(chosen.dtype).mean(),
        "margin": (chosen - rejected).mean(),
        "reward_chosen": chosen.mean(),
        "reward_rejected": rejected.mean(),
    }
