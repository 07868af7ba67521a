"""A selector's metrics, with numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from prefed.core import Privacy
from prefed.train.metrics import ChoiceScores, federated_metrics, majority, selector_metrics


def scores(orders: list[list[float]], baseline: list[list[float]] | None = None) -> ChoiceScores:
    plain = np.zeros((len(orders), 2)) if baseline is None else np.array(baseline)
    return ChoiceScores(np.array(orders, np.float32), plain.astype(np.float32))


def test_four_pairs_by_hand() -> None:
    """Scores 1, −1, 0 (a tie: wrong) and 2, mean ½: 2 of 4 right. Baseline 1, 1, −1, 0 (a tie): 2 of 4.

    Softplus of the negated log-odds, with l = ln(1 + e): ln(1 + e⁻²) + ln 2; l + l; ln(1 + e⁻³) + ln(1 + e³);
    2 ln(1 + e⁻²).
    """
    figures = scores([[2, 0], [-1, -1], [3, -3], [2, 2]], [[1, 1], [2, 0], [-1, -1], [4, -4]]).metrics()
    two, three = math.log1p(math.exp(-2)), math.log1p(math.exp(-3))
    losses = two + math.log(2) + 2 * math.log(1 + math.e) + three + math.log1p(math.exp(3)) + 2 * two
    assert figures == {
        "preference_accuracy": 0.5,
        "reward_accuracy": 0.5,
        "baseline_accuracy": 0.5,
        "margin": 0.5,
        "choice_loss": pytest.approx(losses / 8),
    }


def test_one_presentation_order_is_not_enough() -> None:
    """A selector gives letter A 5 nats too many: its log-odds are s + 5 in order 1 and s − 5 in order 2. With
    s = 1 and s = −1 one of two pairs is right. Order 1 alone would call both right, order 2 alone none."""
    figures = scores([[6, -4], [4, -6]]).metrics()
    assert figures["preference_accuracy"] == 0.5
    assert figures["margin"] == 0


def test_a_selector_that_always_names_a_letter_is_wrong_on_every_pair() -> None:
    """Its log-odds in the two orders are +c and −c, a tie. Ties counted for A would make it right."""
    figures = scores([[3, -3], [-3, 3]]).metrics(jury=[scores([[3, -3], [-3, 3]])])
    assert figures["preference_accuracy"] == figures["baseline_accuracy"] == figures["majority_accuracy"] == 0


def test_majority_by_hand() -> None:
    """Four selectors, five pairs: 3 to 1; 1 to 3 though the sum is 97; 2 to 2 with sums 3, −3 and 0. The
    selectors alone are right on 5, 4, 1 and 0 of the five."""
    jury = [
        scores([[a, a] for a in column])
        for column in ([1, 100, 5, 1, 1], [1, -1, 1, 1, 1], [1, -1, -1, -4, -1], [-100, -1, -2, -1, -1])
    ]
    figures = jury[0].metrics(jury=jury)
    assert figures["majority_accuracy"] == 2 / 5
    assert [figures[name] for name in selector_metrics(4)] == [5 / 5, 4 / 5, 1 / 5, 0]
    votes = majority(np.stack([each.orders.mean(1) for each in jury]))
    np.testing.assert_array_equal(votes, [2, -2, 3, -3, 0])


def test_a_selector_without_finite_log_odds_has_no_vote() -> None:
    """Pair 1: NaN, +, + is 2 to 0. Pair 2: NaN, +1, −2 is even, the sum −1. An own NaN is wrong."""
    broken = scores([[math.nan, 1], [math.inf, -math.inf], [1, 1]])
    jury = [broken, scores([[1, 1], [1, 1], [1, 1]]), scores([[1, 1], [-2, -2], [1, 1]])]
    figures = broken.metrics(jury=jury)
    assert figures["majority_accuracy"] == 2 / 3
    assert [figures[name] for name in selector_metrics(3)] == [1 / 3, 1, 2 / 3]
    assert figures["preference_accuracy"] == 1 / 3
    assert figures["not_finite"] == 2
    assert math.isnan(figures["choice_loss"])


@given(arrays(np.float32, (3, 5, 2), elements=st.floats(-8, 8, width=32)))
def test_swapped_responses_turn_each_pair_that_is_no_tie(orders: np.ndarray) -> None:
    """Accuracy and its mirror add up to the share of pairs without a tie, for one selector and the vote."""
    jury = [scores(each.tolist()) for each in orders]
    mirrored = [scores((-each).tolist()) for each in orders]
    ours, theirs = jury[0].metrics(jury=jury), mirrored[0].metrics(jury=mirrored)
    own = orders[0].astype(np.float64).mean(1)
    together = majority(orders.astype(np.float64).mean(2))
    assert ours["preference_accuracy"] + theirs["preference_accuracy"] == pytest.approx((own != 0).mean())
    assert ours["majority_accuracy"] + theirs["majority_accuracy"] == pytest.approx((together != 0).mean())
    assert ours["margin"] == -theirs["margin"]


def test_no_pairs() -> None:
    with pytest.raises(ValueError, match="no pairs to measure"):
        scores([]).metrics()


def test_the_worst_choice_loss_is_the_highest() -> None:
    metrics = {"a": scores([[4, 4]]).metrics(), "b": scores([[-4, -4]]).metrics()}
    over = federated_metrics(metrics, {"a": 1, "b": 1}, Privacy(minimum_pairs=1))
    assert over["choice_loss"]["worst"] == metrics["b"]["choice_loss"]
    assert over["preference_accuracy"]["worst"] == 0
