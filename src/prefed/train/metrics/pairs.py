"""The metrics of one client: how well a policy or a selector orders the client's pairs."""

from __future__ import annotations

from collections.abc import Sequence
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
"""The metrics that selectors do not have, besides :data:`REWARD_METRICS`."""
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
    metrics: dict[str, npt.NDArray[np.float64 | np.bool_]] = {
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
        metrics |= {
            "combined_accuracy": margin + weight * explicit > 0,
            "explicit_accuracy": explicit > 0,
            "agreement": margin * explicit > 0,
            "explicit_margin": explicit,
        }
    means = {name: float(values.mean()) for name, values in metrics.items()}
    broken = float((~np.isfinite(policy).all(1)).sum())
    return means | ({"not_finite": broken} if broken else {})


@dataclass(frozen=True)
class ChoiceScores:
    """The log-odds, in nats, with which a selector prefers the chosen response of n pairs.

    Attributes:
        orders: ``[n, 2]``, a column for each presentation order.
        baseline: ``[n, 2]`` the same of the untouched model.
    """

    orders: npt.NDArray[np.float32]
    baseline: npt.NDArray[np.float32]


def choice_metrics(scores: ChoiceScores, jury: Sequence[ChoiceScores] = ()) -> dict[str, float]:
    """The metrics of one client (FedBiscuit, ICLR 2025).

    A pair's score is the mean of its log-odds over both presentation orders, so a selector that always names
    the same letter scores 0.

    Args:
        scores: of n ≥ 1 pairs.
        jury: the scores that several selectors give to the same pairs.

    Returns:
        Shares of pairs:

        - ``preference_accuracy`` and ``reward_accuracy``, one number: the score is above 0.
        - ``baseline_accuracy``: the score of the untouched model is above 0.
        - those of :func:`jury_metrics`, only with a jury.

        Means over pairs: ``margin`` is the score in nats, ``choice_loss`` the cross-entropy over the two
        letters, the mean of both orders.

        A tie counts as wrong, and so does a pair whose log-odds are not finite; if there are such pairs,
        ``not_finite`` is their number.

    Raises:
        ValueError: there are no pairs.

    >>> pairs = ChoiceScores(np.array([[3.0, -1.0], [1.0, -2.0]]), np.zeros((2, 2)))
    >>> metrics = choice_metrics(pairs)
    >>> metrics["preference_accuracy"], metrics["baseline_accuracy"], metrics["margin"]
    (0.5, 0.0, 0.25)
    """
    if len(scores.orders) == 0:
        raise ValueError("no pairs to measure")
    orders = scores.orders.astype(np.float64)
    finite = np.isfinite(orders).all(1)
    with np.errstate(invalid="ignore"):
        margin, losses = orders.mean(1), np.logaddexp(0.0, -orders)
    right = finite & (margin > 0)
    metrics: dict[str, npt.NDArray[np.float64 | np.bool_]] = {
        "preference_accuracy": right,
        "reward_accuracy": right,
        "baseline_accuracy": scores.baseline.astype(np.float64).mean(1) > 0,
    }
    metrics |= {"margin": margin, "choice_loss": losses}
    means = {name: float(values.mean()) for name, values in metrics.items()}
    means |= jury_metrics(jury) if jury else {}
    broken = int((~finite).sum())
    return means | ({"not_finite": broken} if broken else {})


def jury_metrics(jury: Sequence[ChoiceScores]) -> dict[str, float]:
    """The metrics of U ≥ 1 selectors that vote on one client's pairs.

    Returns:
        Shares of pairs. For ``majority_accuracy`` more selectors score above 0 than below; an even vote goes
        by the sum of their scores. For ``selector_0_accuracy`` and so on (:func:`selector_metrics`) that
        selector by itself scores above 0.

        A tie counts as wrong. A selector has no vote on a pair for which its log-odds are not finite, and is
        wrong on it.

    >>> pairs = np.array([[[1.0, 1.0], [1.0, 1.0]], [[2.0, 0.0], [-9.0, 1.0]], [[3.0, -3.0], [2.0, -1.0]]])
    >>> jury_metrics([ChoiceScores(orders, orders) for orders in pairs])["majority_accuracy"]
    1.0
    """
    votes = np.stack([_votes(each.orders) for each in jury])
    single = (votes > 0).mean(1).tolist()
    return {
        "majority_accuracy": float((majority(votes) > 0).mean()),
        **dict(zip(selector_metrics(len(jury)), single, strict=True)),
    }


def selector_metrics(count: int) -> tuple[str, ...]:
    """The names of the accuracies of ``count`` selectors that vote, each by itself.

    >>> selector_metrics(2)
    ('selector_0_accuracy', 'selector_1_accuracy')
    """
    return tuple(f"selector_{u}_accuracy" for u in range(count))


def majority(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """The vote of U selectors on n pairs.

    Args:
        scores: ``[U, n]`` log-odds; 0 is no vote.

    Returns:
        ``[n]``: votes for minus votes against; where these are even, the sum of the scores. Its sign is the
        vote's, and 0 is a tie.

    >>> majority(np.array([[0.1, 2.0, 1.0], [0.2, -1.0, -1.0], [-9.0, 0.0, 0.0]]))
    array([1., 1., 0.])
    """
    scores = scores.astype(np.float64)
    votes = np.sign(scores).sum(0)
    result: npt.NDArray[np.float64] = np.where(votes != 0, votes, scores.sum(0))
    return result


def _votes(orders: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """``[n]`` scores; 0 where the log-odds are not finite."""
    finite = np.isfinite(orders).all(1, keepdims=True)
    result: npt.NDArray[np.float64] = np.where(finite, orders.astype(np.float64), 0.0).mean(1)
    return result
