"""The metrics of a selector on one client's pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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
    >>> figures = choice_metrics(pairs)
    >>> figures["preference_accuracy"], figures["baseline_accuracy"], figures["margin"]
    (0.5, 0.0, 0.25)
    """
    if len(scores.orders) == 0:
        raise ValueError("no pairs to measure")
    orders = scores.orders.astype(np.float64)
    finite = np.isfinite(orders).all(1)
    with np.errstate(invalid="ignore"):
        margin, losses = orders.mean(1), np.logaddexp(0.0, -orders)
    right = finite & (margin > 0)
    figures: dict[str, npt.NDArray[np.float64 | np.bool_]] = {
        "preference_accuracy": right,
        "reward_accuracy": right,
        "baseline_accuracy": scores.baseline.astype(np.float64).mean(1) > 0,
    }
    figures |= {"margin": margin, "choice_loss": losses}
    means = {name: float(values.mean()) for name, values in figures.items()}
    means |= jury_metrics(jury) if jury else {}
    broken = int((~finite).sum())
    return means | ({"not_finite": broken} if broken else {})


def jury_metrics(jury: Sequence[ChoiceScores]) -> dict[str, float]:
    """The metrics of U ≥ 1 selectors that vote on one client's pairs.

    Returns:
        Shares of pairs. For ``majority_accuracy`` more selectors score above 0 than below; an even vote goes
        by the sum of their scores. For ``selector_0_accuracy`` and so on (:func:`selector_metrics`) that
        selector alone scores above 0.

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
