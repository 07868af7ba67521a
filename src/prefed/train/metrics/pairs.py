"""The metrics of one client: how well a model orders the client's pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ACCURACY_METRICS = (
    "preference_accuracy",
    "reward_accuracy",
    "baseline_accuracy",
    "normalized_accuracy",
    "combined_accuracy",
    "explicit_accuracy",
    "agreement",
    "shared_accuracy",
    "majority_accuracy",
)
"""Metrics that are shares of a client's pairs. A run records every client's value."""
MEAN_METRICS = ("margin", "explicit_margin", "dpo_loss", "choice_loss")
"""The other metrics. A run records only their mean over clients."""
REWARD_METRICS = ("combined_accuracy", "explicit_accuracy", "agreement", "explicit_margin")
"""The metrics that only a model with an explicit reward head has."""
CHOICE_METRICS = ("majority_accuracy", "choice_loss")
"""The metrics that only selectors have; the first where several of them vote."""
POLICY_METRICS = ("normalized_accuracy", "dpo_loss")
"""The metrics that selectors have not, beside :data:`REWARD_METRICS`."""
LOWER_IS_BETTER = frozenset({"dpo_loss", "choice_loss"})
"""The metrics of which the highest value is the worst."""


@dataclass(frozen=True)
class PairScores:
    """The scores of n pairs: column 0 is the chosen response, column 1 the rejected one.

    Log-probabilities are sums over a completion's tokens, in nats.

    Attributes:
        policy: ``[n, 2]`` log-probabilities under the model that is scored.
        reference: ``[n, 2]`` log-probabilities under the untouched model.
        lengths: ``[n, 2]`` numbers of completion tokens, end-of-text included.
        rewards: ``[n, 2]`` scores of an explicit reward head; ``None`` if the model has none.
    """

    policy: npt.NDArray[np.float32]
    reference: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int32]
    rewards: npt.NDArray[np.float32] | None = None


def client_metrics(scores: PairScores, beta: float, weight: float = 1.0) -> dict[str, float]:
    """The metrics of one client.

    Args:
        scores: of n ≥ 1 pairs.
        beta: β of the DPO loss.
        weight: weight of the explicit margin Δ_er = r_w − r_l of a reward head, where the implicit margin has
            weight 1: w_r s of the PDPO loss (FedPDPO, arXiv:2603.19741, eqs. 4 to 8).

    Returns:
        Shares of pairs:

        - ``preference_accuracy``: log π_θ(y_w|x) > log π_θ(y_l|x).
        - ``reward_accuracy``: Δ_ir > 0.
        - ``baseline_accuracy``: log π_ref(y_w|x) > log π_ref(y_l|x).
        - ``normalized_accuracy``: as ``preference_accuracy``, with log-probabilities per token.

        Means over pairs: ``margin`` is Δ_ir in nats, ``dpo_loss`` is −log σ(β Δ_ir). With a reward head there
        are also the shares ``combined_accuracy`` (Δ_ir + weight · Δ_er > 0), ``explicit_accuracy`` (Δ_er > 0)
        and ``agreement`` (both margins above 0 or both below), and the mean ``explicit_margin`` (Δ_er).

        A tie counts as wrong. A pair whose log-probability under π_θ is not finite counts as wrong too; if
        there are such pairs, ``not_finite`` is their number.

    Raises:
        ValueError: there are no pairs.
    """
    if len(scores.policy) == 0:
        raise ValueError("no pairs to measure")
    policy, reference = scores.policy.astype(np.float64), scores.reference.astype(np.float64)
    per_token = policy / scores.lengths
    with np.errstate(invalid="ignore"):
        gain = policy - reference
        margin = gain[:, 0] - gain[:, 1]
        losses = np.logaddexp(0.0, -beta * margin)
    figures: dict[str, npt.NDArray[np.float64 | np.bool_]] = {
        "preference_accuracy": policy[:, 0] > policy[:, 1],
        "reward_accuracy": margin > 0,
        "baseline_accuracy": reference[:, 0] > reference[:, 1],
        "normalized_accuracy": per_token[:, 0] > per_token[:, 1],
        "margin": margin,
        "dpo_loss": losses,
    }
    if scores.rewards is not None:
        rewards = scores.rewards.astype(np.float64)
        explicit = rewards[:, 0] - rewards[:, 1]
        figures |= {
            "combined_accuracy": margin + weight * explicit > 0,
            "explicit_accuracy": explicit > 0,
            "agreement": margin * explicit > 0,
            "explicit_margin": explicit,
        }
    means = {name: float(values.mean()) for name, values in figures.items()}
    broken = float((~np.isfinite(policy).all(1)).sum())
    return means | ({"not_finite": broken} if broken else {})
