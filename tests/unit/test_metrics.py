"""Accuracies from log-probabilities, with numbers worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefed.core import Privacy
from prefed.train.metrics import (
    TABLE,
    ChoiceScores,
    PairScores,
    ThumbScores,
    federated_metric,
    federated_metrics,
    not_finite_counts,
)
from prefed.train.metrics.run_warnings import flat_loss_warning, small_clients_note

ALL = (
    "preference_accuracy", "reward_accuracy", "baseline_accuracy", "normalized_accuracy", "margin",
    "chosen_shift", "rejected_shift", "chosen_shift_error", "dpo_loss",
    "combined_accuracy", "explicit_accuracy", "agreement", "explicit_margin",
)  # fmt: skip
"""What ``PairScores.metrics`` gives of a model with a reward head."""


class Scores(PairScores):
    """Scores whose rewards a test sets."""

    __setattr__ = object.__setattr__


def scores(policy, reference, lengths=None):
    policy = np.array(policy, np.float32).reshape(-1, 2)
    lengths = np.ones(policy.shape, np.int32) if lengths is None else np.array(lengths, np.int32)
    return Scores(policy, np.array(reference, np.float32).reshape(-1, 2), lengths)


@pytest.mark.parametrize("bad", [(-5, -math.inf), (-math.inf, -5), (-5, math.nan), (math.inf, -5)])
def test_a_pair_whose_log_probability_is_not_finite_is_wrong(bad):
    """Of two pairs the second is right by each accuracy of the policy, so all of them are 1/2."""
    both = scores([bad, (-5, -6)], [(-5, -6), (-6, -6)])
    both.rewards = np.array([[1, 0], [1, 0]], np.float32)
    figures = both.metrics(beta=0.1)
    ours = ("preference", "reward", "normalized", "combined")
    assert [figures[f"{name}_accuracy"] for name in ours] == [0.5] * 4
    assert figures["agreement"] == 0.5
    assert (figures["baseline_accuracy"], figures["explicit_accuracy"], figures["not_finite"]) == (0.5, 1, 1)


def test_four_pairs_by_hand():
    """Pairs (policy; reference; lengths), Δ = (w − w_ref) − (l − l_ref):

    1. −1, −2; −1, −2; 1, 1: right before and after, Δ = 0 (a tie: wrong), per token right
    2. −2, −2; −3, −1; 2, 1: a tie (wrong), before wrong, Δ = 1 + 1 = 2, per token −1 > −2 right
    3. −6, −3; −6, −4; 3, 1: wrong, before wrong, Δ = 0 − 1 = −1, per token −2 > −3 right
    4. −1, −5; −2, −3; 1, 5: right, before right, Δ = 1 + 2 = 3, per token −1 = −1 (a tie: wrong)
    """
    figures = scores(
        [[-1, -2], [-2, -2], [-6, -3], [-1, -5]],
        [[-1, -2], [-3, -1], [-6, -4], [-2, -3]],
        [[1, 1], [2, 1], [3, 1], [1, 5]],
    ).metrics(beta=0.5)
    assert figures["preference_accuracy"] == 0.5
    assert figures["baseline_accuracy"] == 0.5
    assert figures["reward_accuracy"] == 0.5
    assert figures["normalized_accuracy"] == 0.75
    assert figures["margin"] == 1.0
    # Chosen responses gained 0, 1, 0 and 1, rejected ones 0, −1, 1 and −2.
    assert (figures["chosen_shift"], figures["rejected_shift"]) == (0.5, -0.5)
    # Four squares of ±0.5 over 3 · 4.
    assert figures["chosen_shift_error"] == pytest.approx(math.sqrt(4 * 0.25 / 12))
    losses = [math.log(1 + math.exp(-0.5 * delta)) for delta in (0, 2, -1, 3)]
    assert figures["dpo_loss"] == pytest.approx(sum(losses) / 4, rel=1e-12)


def test_the_untouched_model_orders_nothing_by_reward():
    """Policy = reference: Δ = 0 everywhere, which is a tie, and the loss is log 2."""
    same = [[-1.5, -2.5], [-3.0, -1.0]]
    figures = scores(same, same).metrics(0.1)
    assert (figures["reward_accuracy"], figures["margin"]) == (0.0, 0.0)
    assert figures["dpo_loss"] == pytest.approx(math.log(2))
    assert figures["preference_accuracy"] == figures["baseline_accuracy"] == 0.5


def test_a_reward_head_by_hand():
    """Implicit margins Δ_ir 2, −1, 1, 0 (the reference gives 0 everywhere), explicit ones Δ_er 1, 3, −4, 2.

    At a weight of 1/2 the sums are 2.5, 0.5, −1, 1: three pairs of four are right. The head alone is right
    on three, the two signs agree on the first pair only (0 agrees with nothing), and mean Δ_er is 2/4.
    """
    rewarded = scores([[-1, -3], [-2, -1], [-2, -3], [-4, -4]], [[0, 0]] * 4)
    rewarded.rewards = np.array([[1, 0], [0, -3], [-2, 2], [0.5, -1.5]], np.float32)
    figures = rewarded.metrics(0.1, weight=0.5)
    assert figures["combined_accuracy"] == 0.75
    assert figures["explicit_accuracy"] == 0.75
    assert figures["agreement"] == 0.25
    assert figures["explicit_margin"] == 0.5
    assert figures["margin"] == 0.5
    # 2.25, −0.25, 0 (a tie) and 0.5.
    assert rewarded.metrics(0.1, weight=0.25)["combined_accuracy"] == 0.5
    rewarded.rewards = None
    assert rewarded.metrics(0.1).keys() == figures.keys() - {
        "combined_accuracy", "explicit_accuracy", "agreement", "explicit_margin",
    }  # fmt: skip


def test_no_pairs_are_an_error():
    with pytest.raises(ValueError, match="no pairs"):
        scores([], []).metrics(0.1)
    with pytest.raises(ValueError, match="no client"):
        federated_metric({})


def test_the_worst_tenth():
    """Of 11 clients at 0, 0.1, …, 1.0 the lowest ⌈11/10⌉ = 2 have 0 and 0.1: mean 0.05."""
    figure = federated_metric({str(k): k / 10 for k in range(11)})
    assert figure["mean"] == pytest.approx(0.5)
    assert figure["worst"] == 0
    assert figure["worst_decile"] == pytest.approx(0.05)


def test_the_worst_of_a_loss_is_the_highest():
    """The same 11 clients: the two highest have 1.0 and 0.9. The DPO loss is the
    only metric of ``PairScores`` that is better where it is lower."""
    figure = federated_metric({str(k): k / 10 for k in range(11)}, loss=True)
    assert (figure["worst"], figure["mean"]) == (1.0, pytest.approx(0.5))
    assert figure["worst_decile"] == pytest.approx(0.95)
    metrics = {"a": dict.fromkeys(ALL, 1.0), "b": dict.fromkeys(ALL, 2.0)}
    over = federated_metrics(metrics, {"a": 1, "b": 1}, Privacy())
    assert {name: figure["worst"] for name, figure in over.items()} == {
        name: 2.0 if name == "dpo_loss" else 1.0 for name in ALL
    }


def test_small_clients_count_in_the_mean_alone():
    """With at least 4 pairs each: b (3 pairs) and c (2) are not listed, and as they have 5 together the mean
    counts them: (0.5 + 0 + 1 + 0.9)/4 = 0.6. Without c, b has 3 in all, and mean and list would give b's
    figure: the mean is (0.5 + 0.9)/2 = 0.7."""
    metrics = {name: {"share": x} for name, x in {"a": 0.5, "b": 0.0, "c": 1.0, "d": 0.9}.items()}
    pairs, four = {"a": 4, "b": 3, "c": 2, "d": 9}, Privacy(minimum_pairs=4)
    figure = federated_metrics(metrics, pairs, four)["share"]
    assert figure == {
        "mean": pytest.approx(0.6), "worst": 0.5, "worst_decile": 0.5, "per_client": {"a": 0.5, "d": 0.9},
        "mean_alone": 2,
    }  # fmt: skip
    assert small_clients_note(figure).startswith(
        "2 clients have fewer pairs than [privacy] minimum_pairs: counted in means only"
    )
    del metrics["c"]
    figure = federated_metrics(metrics, pairs, four)["share"]
    assert figure == {
        "mean": pytest.approx(0.7), "worst": 0.5, "worst_decile": 0.5, "per_client": {"a": 0.5, "d": 0.9},
        "left_out": 1,
    }  # fmt: skip
    assert small_clients_note(figure) == "1 client has fewer pairs than [privacy] minimum_pairs: left out"
    figure = federated_metrics(metrics, pairs, Privacy())["share"]
    assert figure == federated_metric({"a": 0.5, "b": 0.0, "d": 0.9})
    assert small_clients_note(figure) == ""
    with pytest.raises(ValueError, match=r"minimum_pairs = 10: no client has that many evaluation pairs"):
        federated_metrics(metrics, pairs, Privacy(minimum_pairs=10))


@given(st.dictionaries(st.text(), st.floats(0, 1), min_size=1), st.randoms(use_true_random=False))
def test_the_order_of_clients_changes_nothing(values, draw):
    shuffled = list(values.items())
    draw.shuffle(shuffled)
    figure = federated_metric(values)
    assert figure == federated_metric(dict(shuffled))
    assert figure["worst"] <= figure["worst_decile"] <= figure["mean"] + 1e-15


def test_pairs_without_finite_log_probabilities_are_counted_and_wrong():
    """Of four pairs one is NaN on one side, one infinite on both; the other two are right. Where all are
    finite there is no such figure; the base model's numbers do not count."""
    nan, inf = math.nan, math.inf
    reference = [[-1, -2]] * 4
    figures = scores([[-1, -2], [nan, -2], [-inf, -inf], [-3, -4]], reference).metrics(0.1)
    assert figures["not_finite"] == 2
    assert figures["preference_accuracy"] == 0.5
    assert not_finite_counts({"a": figures, "b": scores(reference, reference).metrics(0.1)}) == {"a": 2}


@pytest.mark.parametrize(
    ("losses", "warned"),
    [
        # A thousandth of 0.6931 is 0.00069.
        ([0.6931, 0.6935, 0.6925], True),
        ([0.6931, None, 0.6935, 0.6931], True),
        ([0.6931, 0.6939, 0.6931], False),
        ([0.6931, 0.65, 0.6931], False),
        ([0.6931, 0.6931], False),
        ([None, None, None], False),
        ([0.6931, math.nan, 0.6931], False),
        ([-2.0, -2.001, -2.0], True),
        ([], False),
    ],
)
def test_a_loss_that_hardly_moves_is_warned_of(losses, warned):
    """Within a thousandth of its first value in all of three rounds or more; NaN is another matter."""
    assert bool(flat_loss_warning(losses)) is warned


def test_the_table_lists_what_the_functions_compute_and_whose_it_is():
    """Models of each kind have the rows of the table that name them, and no others."""
    orders = np.array([[1.0, 2.0], [3.0, -1.0]])
    pairs = scores([(-1, -2), (-2, -1)], [(-1, -2), (-2, -1)])
    pairs.rewards = orders
    jury = [ChoiceScores(orders, orders)] * 2
    found = {
        ("pairs", "reward heads"): pairs.metrics(0.1),
        ("thumbs", "some thumbs"): ThumbScores(orders, orders, np.array([True, False])).metrics(0.1),
        ("choices", "several selectors"): jury[0].metrics(jury=jury),
    }
    for whose, metrics in found.items():
        names = {name for name in metrics if not name.startswith("selector_")}
        assert names == {row.name for row in TABLE.values() if row.of in ("all", *whose)}
