"""Metrics of one client on thumbs: how well the implicit reward of a policy separates ups from downs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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


def thumb_metrics(scores: ThumbScores, beta: float) -> dict[str, float]:
    """Compute the metrics of one client.

    The implicit reward r of a response is its log-ratio, log π_θ(y|x) − log π_ref(y|x). The threshold t of
    the client is the mean log-ratio of the n unrelated responses, and 0 if n = 1. The reference point of KTO
    (arXiv:2402.01306) is z_0 = max(0, t). Training often lowers all log-ratios below 0, and t with them.

    Args:
        scores: of n ≥ 1 responses.
        beta: β of the KTO loss.

    Returns:
        Shares of thumbs predicted correctly, averaged over the client's ups and its downs with equal weight
            (balanced accuracy), or over its thumbs if all are equal:

        - ``preference_accuracy``: a thumb up is predicted if r > t.
        - ``reward_accuracy``: a thumb up is predicted if r > z_0.
        - ``baseline_accuracy``: as for the base model, with r = t = 0: no thumb up, so ½ for both thumbs.

        Means: ``margin``, with the same weights, of r − t, negated for thumbs down, in nats; over the thumbs,
            ``kto_loss`` with weights λ = 1; ``reward_up`` and ``reward_down``, r of the ups and of the downs
            in nats, absent for a client without any.

        Responses whose log-probability under π_θ is not finite count as wrong. ``not_finite`` is their
        number, if there are any.

    Raises:
        ValueError: there are no responses.

    >>> up, zero = np.array([True, True, False]), np.zeros((3, 2))
    >>> metrics = thumb_metrics(ThumbScores(np.array([[3.0, 2], [1, 2], [0, 2]]), zero, up), beta=0.1)
    >>> metrics["preference_accuracy"], metrics["margin"], metrics["reward_up"], metrics["reward_down"]
    (0.75, 1.0, 2.0, 0.0)
    """
    up = scores.up
    if len(up) == 0:
        raise ValueError("no thumbs to measure")
    with np.errstate(invalid="ignore"):
        ratio, other = (scores.policy.astype(np.float64) - scores.reference.astype(np.float64)).T
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
