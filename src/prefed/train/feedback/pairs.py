"""Preference pairs: log-probabilities of a chosen and a rejected response under a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from prefed.core.lazy import np, torch
from prefed.train.feedback.kind import Array, Feedback
from prefed.train.metrics.table import SHIFT_ERROR

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from prefed.data import TokenSet
    from prefed.train.forward_passes import PairModel
    from prefed.train.pair_cache import Rows


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


@dataclass(frozen=True)
class PairScores:
    """Scores of n pairs: column 0 is the chosen response, column 1 the rejected response.

    Log-probabilities are sums over a completion's tokens, in nats.

    Attributes:
        policy: ``[n, 2]`` log-probabilities under the model that is scored.
        reference: ``[n, 2]`` log-probabilities under the base model.
        lengths: ``[n, 2]`` number of completion tokens, including end-of-text.
        rewards: ``[n, 2]`` scores of an explicit reward head; ``None`` if the model has none.
    """

    policy: npt.NDArray[np.float32]
    reference: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int32]
    rewards: npt.NDArray[np.float32] | None = None

    def metrics(self, beta: float = 0.1, weight: float = 1.0, jury: Sequence[Any] = ()) -> dict[str, float]:
        """Compute the metrics of one client.

        Args:
            beta: β of the DPO loss.
            weight: weight of the explicit margin Δ_er = r_w − r_l of a reward head relative to the implicit
                margin: w_r s of the PDPO loss (FedPDPO, arXiv:2603.19741, eqs. 4 to 8).

        Returns:
            Shares of pairs:

            - ``preference_accuracy``: log π_θ(y_w|x) > log π_θ(y_l|x).
            - ``reward_accuracy``: Δ_ir > 0.
            - ``baseline_accuracy``: log π_ref(y_w|x) > log π_ref(y_l|x).
            - ``normalized_accuracy``: as ``preference_accuracy``, with log-probabilities per token.

            Means over pairs: ``margin`` is Δ_ir in nats, ``chosen_shift`` and ``rejected_shift`` are its two
                terms log π_θ(y|x) − log π_ref(y|x), ``dpo_loss`` is −log σ(β Δ_ir). ``chosen_shift_error`` is
                the standard error of ``chosen_shift``; of one pair, its absolute value. With a reward head
                also the shares ``combined_accuracy`` (Δ_ir + weight · Δ_er > 0), ``explicit_accuracy`` (Δ_er
                > 0) and ``agreement`` (margins of equal sign), and the mean ``explicit_margin`` (Δ_er).

            Ties, and pairs whose log-probability under π_θ is not finite, count as wrong. ``not_finite`` is
            the number of the latter, if there are any.

        Raises:
            ValueError: there are no pairs.
        """
        if len(self.policy) == 0:
            raise ValueError("no pairs to measure")
        policy, reference = self.policy.astype(np.float64), self.reference.astype(np.float64)
        per_token = policy / self.lengths
        with np.errstate(invalid="ignore"):
            gain = policy - reference
            margin = gain[:, 0] - gain[:, 1]
            losses = np.logaddexp(0.0, -beta * margin)
        finite = np.isfinite(policy).all(1)
        metrics: dict[str, npt.NDArray[np.float64 | np.bool_]] = {
            "preference_accuracy": finite & (policy[:, 0] > policy[:, 1]),
            "reward_accuracy": finite & (margin > 0),
            "baseline_accuracy": reference[:, 0] > reference[:, 1],
            "normalized_accuracy": finite & (per_token[:, 0] > per_token[:, 1]),
            "margin": margin,
            "chosen_shift": gain[:, 0],
            "rejected_shift": gain[:, 1],
            "dpo_loss": losses,
        }
        if self.rewards is not None:
            rewards = self.rewards.astype(np.float64)
            explicit = rewards[:, 0] - rewards[:, 1]
            metrics |= {
                "combined_accuracy": finite & (margin + weight * explicit > 0),
                "explicit_accuracy": explicit > 0,
                "agreement": finite & (margin * explicit > 0),
                "explicit_margin": explicit,
            }
        means = {name: float(values.mean()) for name, values in metrics.items()}
        means[SHIFT_ERROR] = _standard_error(gain[:, 0])
        broken = float((~finite).sum())
        return means | ({"not_finite": broken} if broken else {})


def _standard_error(values: npt.NDArray[np.float64]) -> float:
    """Return the standard error of the mean of n values; for one value, its absolute value.

    >>> _standard_error(np.array([1.0, 3.0])), _standard_error(np.array([-2.0]))
    (1.0, 2.0)
    """
    if len(values) == 1:
        return abs(float(values[0]))
    with np.errstate(invalid="ignore"):
        return float(values.std(ddof=1) / np.sqrt(len(values)))


def _owns(tokens: TokenSet, rows: Rows) -> Array:
    from prefed.data.tokens import thumbs

    none = tokens.letters is not None
    return np.zeros(len(rows), bool) if none else thumbs(tokens.lengths[rows]) == 0


def _batch(model: PairModel, rows: Rows, outputs: Tensor, reference: Array | None, loss: Any) -> PairBatch:
    tokens, device = model.tokens, outputs.device
    lengths = torch.from_numpy(tokens.lengths[rows, 1:].astype(np.int64)).to(device)
    known = None if reference is None else torch.from_numpy(reference).to(device)
    return PairBatch(
        policy_chosen=outputs[:, 0],
        chosen_length=lengths[:, 0],
        policy_rejected=outputs[:, 1] if loss.needs_rejected else None,
        rejected_length=lengths[:, 1] if loss.needs_rejected else None,
        reference_chosen=None if known is None else known[:, 0],
        reference_rejected=None if known is None else known[:, 1],
        margin=torch.from_numpy(tokens.margins[rows]).to(device) if loss.needs_margin else None,
        reward_chosen=outputs[:, 2] if loss.needs_reward else None,
        reward_rejected=outputs[:, 3] if loss.needs_reward else None,
    )


def _scores(model: PairModel, rows: Rows, outputs: Array, reference: Array) -> PairScores:
    rewards = outputs[:, 2:] if outputs.shape[1] > 2 else None
    return PairScores(outputs[:, :2], reference, model.tokens.lengths[rows, 1:], rewards)


PAIRS = Feedback(
    "pairs",
    "use 'kto_pair', or read every pair as two thumbs with [data] format = \"thumbs\"",
    _owns,
    _batch,
    _scores,
    stop_loss="dpo_loss",
)
"""A chosen and a rejected response to the same prompt, read by a policy."""
