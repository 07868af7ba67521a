"""Thumbs: log-probabilities of single responses, each with a thumb up or down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefed.core.lazy import np, torch
from prefed.train.feedback.kind import Array, Feedback, LossOutput

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from prefed.data import TokenSet
    from prefed.train.forward_passes import PairModel
    from prefed.train.pair_cache import Rows


@dataclass(frozen=True)
class ThumbBatch:
    """B responses with thumbs. Log-probabilities are in nats and summed over the completion.

    Attributes:
        policy: ``[B]`` log π_θ(y_i|x_i).
        reference: ``[B]`` log π_ref(y_i|x_i).
        mismatched: ``[B]`` log π_θ(y'_i|x_i) − log π_ref(y'_i|x_i) of an unrelated response y'_i, usually
            y_{i+1} of the batch. It is used without its gradient.
        up: ``[B]`` bool, true for a thumb up.

    Raises:
        ValueError: the shapes do not match.
    """

    policy: Tensor
    reference: Tensor
    mismatched: Tensor
    up: Tensor

    def __post_init__(self) -> None:
        shapes = {tuple(each.shape) for each in (self.policy, self.reference, self.mismatched, self.up)}
        if shapes != {(len(self),)}:
            raise ValueError(f"the tensors of {len(self)} thumbs have shapes {sorted(shapes)}; expected (B,)")

    def __len__(self) -> int:
        return self.up.numel()


def kto(batch: ThumbBatch, *, beta: float, desirable: float, undesirable: float) -> LossOutput:
    """λ_D σ(β (z_0 − r)) for a thumb up, λ_U σ(β (r − z_0)) for a thumb down: KTO (arXiv:2402.01306), eq. 7.

    r is the log-ratio of the response. The reference point z_0 = max(0, mean of the mismatched log-ratios),
    shared by the batch and without gradient, estimates the KL divergence of the policy from the reference.
    The paper's value λ_y − v is this loss. A larger batch gives a less noisy z_0.

    Metrics: ``accuracy``, the share of thumbs for which r − z_0 has the sign of the thumb (0 counts as down);
    ``margin``, the mean of β (r − z_0), negated for a thumb down; ``kl``, z_0 in nats.

    Args:
        desirable: λ_D, the weight of thumbs up.
        undesirable: λ_U, the weight of thumbs down.

    >>> zero = torch.zeros(2)
    >>> batch = ThumbBatch(zero, zero, torch.tensor([3.0, 1.0]), torch.tensor([True, False]))
    >>> loss, metrics = kto(batch, beta=0.1, desirable=1.0, undesirable=2.0)
    >>> loss, metrics["kl"].item(), metrics["accuracy"].item()
    (tensor([0.5498, 0.9003]), 2.0, 0.5)
    """
    ratio = batch.policy - batch.reference
    point = batch.mismatched.detach().mean().clamp(min=0)
    gain = beta * (ratio - point) * torch.where(batch.up, 1.0, -1.0)
    weight = torch.full_like(gain.detach(), undesirable).masked_fill(batch.up, desirable)
    above = ratio.detach() > point
    return weight * torch.sigmoid(-gain), {
        "accuracy": (above == batch.up).to(ratio.dtype).mean(),
        "margin": gain.detach().mean(),
        "kl": point,
    }


@dataclass(frozen=True)
class ThumbScores:
    """Log-probabilities of n responses with thumbs, sums over tokens in nats.

    Column 0 is the response, column 1 an unrelated response to the same prompt: the next one of the n.

    Attributes:
        policy: ``[n, 2]`` under the model that is scored.
        reference: ``[n, 2]`` under the base model.
        up: ``[n]`` bool, true for a thumb up.
    """

    policy: npt.NDArray[np.float32]
    reference: npt.NDArray[np.float32]
    up: npt.NDArray[np.bool_]

    def metrics(self, beta: float = 0.1, weight: float = 1.0, jury: Sequence[Any] = ()) -> dict[str, float]:
        """Compute the metrics of one client.

        The implicit reward r of a response is its log-ratio, log π_θ(y|x) − log π_ref(y|x). The threshold t
        of the client is the mean log-ratio of the n unrelated responses, and 0 if n = 1. The reference point
        of KTO (arXiv:2402.01306) is z_0 = max(0, t). Training often lowers all log-ratios below 0, and t with
        them.

        Args:
            beta: β of the KTO loss.

        Returns:
            Shares of thumbs predicted correctly, averaged over the client's ups and its downs with equal
                weight (balanced accuracy), or over its thumbs if all are equal:

            - ``preference_accuracy``: a thumb up is predicted if r > t.
            - ``reward_accuracy``: a thumb up is predicted if r > z_0.
            - ``baseline_accuracy``: as for the base model, with r = t = 0: no thumb up, so ½ for both thumbs.

            Means: ``margin``, with the same weights, of r − t, negated for thumbs down, in nats; over the
                thumbs, ``kto_loss`` with weights λ = 1; ``reward_up`` and ``reward_down``, r of the ups and
                of the downs in nats, absent for a client without any.

            Responses whose log-probability under π_θ is not finite count as wrong. ``not_finite`` is their
            number, if there are any.

        Raises:
            ValueError: there are no responses.

        >>> up, zero = np.array([True, True, False]), np.zeros((3, 2))
        >>> metrics = ThumbScores(np.array([[3.0, 2], [1, 2], [0, 2]]), zero, up).metrics(beta=0.1)
        >>> metrics["preference_accuracy"], metrics["margin"], metrics["reward_up"], metrics["reward_down"]
        (0.75, 1.0, 2.0, 0.0)
        """
        up = self.up
        if len(up) == 0:
            raise ValueError("no thumbs to measure")
        with np.errstate(invalid="ignore"):
            ratio, other = (self.policy.astype(np.float64) - self.reference.astype(np.float64)).T
            threshold = float(other.mean()) if len(up) > 1 else 0.0
            point, sign = max(threshold, 0.0), np.where(up, 1.0, -1.0)
            losses = np.exp(-np.logaddexp(0.0, beta * sign * (ratio - point)))
        finite = np.isfinite(ratio) & np.isfinite(threshold)
        classes, broken = [mask for mask in (up, ~up) if mask.any()], int((~finite).sum())

        def balanced(values: npt.NDArray[np.float64 | np.bool_]) -> float:
            return float(np.mean([values[mask].mean() for mask in classes]))

        metrics = {
            "preference_accuracy": balanced(finite & ((ratio > threshold) == up)),
            "reward_accuracy": balanced(finite & ((ratio > point) == up)),
            "baseline_accuracy": balanced(~up),
            "margin": balanced(sign * (ratio - threshold)),
            "kto_loss": float(losses.mean()),
        }
        rewards = {"reward_up": ratio[up], "reward_down": ratio[~up]}
        metrics |= {name: float(values.mean()) for name, values in rewards.items() if len(values)}
        return metrics | ({"not_finite": broken} if broken else {})


def _thumbs(tokens: TokenSet, rows: Rows) -> Array:
    from prefed.data.tokens import thumbs

    return thumbs(tokens.lengths[rows])


def pairing(rows: Rows) -> Rows:
    """Return ``[n, 2]``: each of ``rows`` with the next one, whose response is unrelated to its prompt.

    The last row has the first: KTO's estimate of a KL divergence (arXiv:2402.01306, section 4).

    >>> pairing(np.array([5, 3, 8])).tolist()
    [[5, 3], [3, 8], [8, 5]]
    """
    return np.stack([rows, np.roll(rows, -1)], 1)


def _batch(model: PairModel, rows: Rows, outputs: Tensor, reference: Array | None, loss: Any) -> ThumbBatch:
    known = torch.from_numpy(reference).to(outputs.device)
    up = torch.from_numpy(_thumbs(model.tokens, rows[:, 0]) > 0).to(outputs.device)
    ratio = outputs[:, 1].detach() - known[:, 1]
    # A batch of one has no mismatched response.
    ratio = ratio if len(rows) > 1 else torch.zeros_like(ratio)
    return ThumbBatch(outputs[:, 0], known[:, 0], ratio, up)


def _scores(model: PairModel, rows: Rows, outputs: Array, reference: Array) -> ThumbScores:
    return ThumbScores(outputs[:, :2], reference, _thumbs(model.tokens, rows) > 0)


THUMBS = Feedback(
    "thumbs",
    "they need objective = 'kto' and a method with this setting, such as feddpo",
    lambda tokens, rows: _thumbs(tokens, rows) != 0,
    _batch,
    _scores,
    pairing=pairing,
)
"""A thumb up or down on one response."""
