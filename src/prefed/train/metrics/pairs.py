"""Metrics of one client: how well a policy or a selector orders the client's pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefed.core.plugins import Registry
from prefed.train.metrics.table import ACCURACY_METRICS, MEAN_METRICS, SHIFT_ERROR


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


@dataclass(frozen=True)
class Metric:
    """A metric from outside prefed: a share of a client's pairs.

    Attributes:
        name: its key in ``summary.json``.
        function: scores of n pairs (:class:`PairScores`; of selectors, :class:`ChoiceScores`) or thumbs
            (:class:`~prefed.train.metrics.ThumbScores`) → ``[n]``, each from 0 to 1.
    """

    name: str
    function: Callable[[Any], npt.NDArray[np.floating | np.bool_]]


METRICS: Registry[Metric] = Registry("metrics", {}, "METRIC", Metric)
"""Name in ``[evaluate] metrics`` → metric."""


def find_metrics(names: Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics of ``[evaluate] metrics``.

    Raises:
        ValueError: there is no such metric, or two metrics have the same name.
    """
    for name in names:
        if name not in METRICS:
            raise ValueError(f"no metric of your own is called {name!r}{METRICS.hint(name)}")
    found = tuple(METRICS[name] for name in names)
    taken = [*ACCURACY_METRICS, *MEAN_METRICS]
    for metric in found:
        if metric.name in taken or not metric.name.isidentifier():
            raise ValueError(f"{metric.name!r} cannot name a metric: choose another name for it")
        taken.append(metric.name)
    return found


def client_metrics(scores: PairScores, beta: float, weight: float = 1.0) -> dict[str, float]:
    """Compute the metrics of one client.

    Args:
        scores: of n ≥ 1 pairs.
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
            the standard error of ``chosen_shift``; of one pair, its absolute value. With a reward head also
            the shares ``combined_accuracy`` (Δ_ir + weight · Δ_er > 0), ``explicit_accuracy`` (Δ_er > 0) and
            ``agreement`` (margins of equal sign), and the mean ``explicit_margin`` (Δ_er).

        Ties, and pairs whose log-probability under π_θ is not finite, count as wrong. ``not_finite`` is the
        number of the latter, if there are any.

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
    if scores.rewards is not None:
        rewards = scores.rewards.astype(np.float64)
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


@dataclass(frozen=True)
class ChoiceScores:
    """Log-odds, in nats, that a selector assigns to the chosen response of n pairs.

    Attributes:
        orders: ``[n, 2]``, one column per presentation order.
        baseline: ``[n, 2]``, the same for the base model.
    """

    orders: npt.NDArray[np.float32]
    baseline: npt.NDArray[np.float32]


def choice_metrics(scores: ChoiceScores, jury: Sequence[ChoiceScores] = ()) -> dict[str, float]:
    """Compute the metrics of one client for a selector (FedBiscuit, ICLR 2025).

    The score of a pair is the mean of its log-odds over both presentation orders, so a selector that always
    picks the same letter scores 0.

    Args:
        scores: of n ≥ 1 pairs.
        jury: scores of several selectors for the same pairs.

    Returns:
        Shares of pairs:

        - ``preference_accuracy`` and ``reward_accuracy``, which are equal: the score is above 0.
        - ``baseline_accuracy``: the score of the base model is above 0.
        - with a jury, the metrics of :func:`jury_metrics`.

        Means over pairs: ``margin`` is the score in nats, ``choice_loss`` the cross-entropy over the two
            letters, averaged over both orders.

        Ties, and pairs whose log-odds are not finite, count as wrong. ``not_finite`` is the number of the
        latter, if there are any.

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
    correct = finite & (margin > 0)
    metrics: dict[str, npt.NDArray[np.float64 | np.bool_]] = {
        "preference_accuracy": correct,
        "reward_accuracy": correct,
        "baseline_accuracy": scores.baseline.astype(np.float64).mean(1) > 0,
    }
    metrics |= {"margin": margin, "choice_loss": losses}
    means = {name: float(values.mean()) for name, values in metrics.items()}
    means |= jury_metrics(jury) if jury else {}
    broken = int((~finite).sum())
    return means | ({"not_finite": broken} if broken else {})


def jury_metrics(jury: Sequence[ChoiceScores]) -> dict[str, float]:
    """Compute the metrics of U ≥ 1 selectors that vote on one client's pairs.

    Returns:
        Shares of pairs. ``majority_accuracy``: more selectors score above 0 than below; the sum of the scores
            decides an even vote. ``selector_0_accuracy`` and so on: this selector scores above 0.

        Ties count as wrong. A selector whose log-odds for a pair are not finite does not vote and counts as
        wrong.

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
    """Return the names of the individual accuracies of ``count`` selectors.

    >>> selector_metrics(2)
    ('selector_0_accuracy', 'selector_1_accuracy')
    """
    return tuple(f"selector_{u}_accuracy" for u in range(count))


def majority(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the vote of U selectors on n pairs.

    Args:
        scores: ``[U, n]`` log-odds; 0 is an abstention.

    Returns:
        ``[n]``: votes for minus votes against, or the sum of the scores if they are even. 0 is a tie.

    >>> majority(np.array([[0.1, 2.0, 1.0], [0.2, -1.0, -1.0], [-9.0, 0.0, 0.0]]))
    array([1., 1., 0.])
    """
    scores = scores.astype(np.float64)
    votes = np.sign(scores).sum(0)
    result: npt.NDArray[np.float64] = np.where(votes != 0, votes, scores.sum(0))
    return result


def _votes(orders: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return ``[n]`` scores; 0 if the log-odds are not finite."""
    finite = np.isfinite(orders).all(1, keepdims=True)
    result: npt.NDArray[np.float64] = np.where(finite, orders.astype(np.float64), 0.0).mean(1)
    return result
