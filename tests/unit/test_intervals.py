"""Intervals of shares of pairs and of means over seeds; agreement of two raters."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, ttest_1samp

from prefed.train.metrics import mean_interval, seed_interval
from prefed.train.metrics.intervals import agreement, cohen_kappa, wilson_interval

PAIRS = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(PAIRS)
def test_one_share_has_wilsons_interval(counts):
    """As scipy has it, and never beyond 0 and 1, and it contains the share."""
    right, pairs = counts
    low, high = wilson_interval(right / pairs, pairs)
    assert 0 <= low <= right / pairs <= high <= 1
    assert (low, high) == pytest.approx(binomtest(right, pairs).proportion_ci(method="wilson"), abs=1e-12)


@pytest.mark.parametrize("pairs", [1, 4, 100])
def test_all_right_is_not_certain(pairs):
    """Of n right pairs of n the interval starts at n / (n + z²), z = 1.95996; of none it ends at the rest."""
    low, high = wilson_interval(1.0, pairs)
    assert (low, high) == (pytest.approx(pairs / (pairs + 1.959964**2)), 1.0)
    assert wilson_interval(0.0, pairs) == (0.0, pytest.approx(1 - low))


@given(st.lists(PAIRS, min_size=1, max_size=6))
def test_the_interval_of_a_mean_adds_squared_arms(clients):
    """Each client's interval has an arm below its share and one above; the mean's arms are their lengths as
    vectors over N (Zou, Huang and Zhang 2009). Never beyond 0 and 1."""
    shares = {str(k): right / pairs for k, (right, pairs) in enumerate(clients)}
    pairs = {str(k): pairs for k, (_, pairs) in enumerate(clients)}
    own = [binomtest(right, pairs).proportion_ci(method="wilson") for right, pairs in clients]
    mean, n = math.fsum(shares.values()) / len(clients), len(clients)
    below = math.hypot(*(share - each.low for share, each in zip(shares.values(), own, strict=True))) / n
    above = math.hypot(*(each.high - share for share, each in zip(shares.values(), own, strict=True))) / n
    low, high = mean_interval(shares, pairs)
    assert (low, high) == pytest.approx((mean - below, mean + above), abs=1e-12)
    assert -1e-12 <= low <= mean <= high <= 1 + 1e-12


def test_a_share_is_not_rounded_to_whole_pairs_from_below():
    """0.29 · 100 is 28.999999999999996 in binary: the interval is that of 29 pairs of 100, not of 28."""
    expected = binomtest(29, 100).proportion_ci(method="wilson")
    assert mean_interval({"ann": 0.29}, {"ann": 100}) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(("clients", "pairs"), [(3, 4), (4, 10), (2, 25)])
def test_the_interval_of_a_mean_covers(clients, pairs):
    """Every outcome of every client, weighed by its probability, where the clients' p are evenly spread."""
    p = np.linspace(0.6, 0.9, clients)
    names = [str(k) for k in range(clients)]
    outcomes = np.stack(np.meshgrid(*[np.arange(pairs + 1)] * clients), -1).reshape(-1, clients)
    covered = 0.0
    for right in outcomes:
        low, high = mean_interval(
            dict(zip(names, (right / pairs).tolist(), strict=True)), dict.fromkeys(names, pairs)
        )
        covered += float(np.prod(binom.pmf(right, pairs, p))) * (low <= p.mean() <= high)
    assert 0.93 <= covered <= 0.98


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6).filter(lambda values: np.std(values) > 1e-3))
def test_the_interval_over_seeds_is_students(values):
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert seed_interval(values) == pytest.approx((expected.low, expected.high))


def test_two_seeds_are_twelve_times_as_unsure_as_they_look():
    """With one degree of freedom t is Cauchy's: its 97.5% point is tan(0.475 π) = 12.706. Of 0.6 and 0.7 the
    deviation over √2 is 0.05, so the ends are 0.65 ± 0.635; a win rate ends at 1."""
    arm = math.tan(0.475 * math.pi) * 0.05
    assert seed_interval([0.6, 0.7]) == pytest.approx((0.65 - arm, 0.65 + arm))
    assert seed_interval([0.6, 0.7], within=(0.0, 1.0)) == (pytest.approx(0.65 - arm), 1.0)


@pytest.mark.parametrize("values", [[], [0.7]])
def test_one_seed_has_no_interval(values):
    assert seed_interval(values) is None


LABELS = st.lists(st.tuples(st.sampled_from("LR0"), st.sampled_from("LR0")), min_size=1, max_size=12)


def test_a_worked_table():
    """20 both yes, 5 yes and no, 10 no and yes, 15 both no. p_o = 35/50 = 0.7. They say yes in 25 and in 30
    of 50, so p_e = 0.5 · 0.6 + 0.5 · 0.4 = 0.5, and κ = 0.2 / 0.5 = 0.4."""
    first, second = "y" * 25 + "n" * 25, "y" * 20 + "n" * 5 + "y" * 10 + "n" * 15
    result = agreement(first, second)
    assert result.kappa == 0.4
    assert (result.agreed, result.judged, result.share) == (35, 50, 0.7)


@given(LABELS)
def test_kappa_is_what_its_definition_says(pairs):
    """Chance agreement is that of one rater's label with the other's label of any item, over all n² pairs."""
    first, second = zip(*pairs, strict=True)
    observed = sum(a == b for a, b in pairs) / len(pairs)
    chance = sum(a == b for a, b in product(first, second)) / len(pairs) ** 2
    kappa = cohen_kappa(first, second)
    if chance == 1:
        assert kappa is None
    else:
        assert kappa == pytest.approx((observed - chance) / (1 - chance), abs=1e-12)
        assert kappa == cohen_kappa(second, first)


@given(LABELS)
def test_the_interval_is_wilsons(pairs):
    """Its ends solve (p̂ − p)² = z² p (1 − p) / n, with z the 97.5% point of the normal distribution."""
    first, second = zip(*pairs, strict=True)
    result, z = agreement(first, second), 1.959963984540054
    for p in (result.low, result.high):
        assert math.isclose((result.share - p) ** 2, z**2 * p * (1 - p) / len(pairs), abs_tol=1e-9)
    assert 0 <= result.low <= result.share <= result.high <= 1


@pytest.mark.parametrize(("first", "second"), [("", ""), ("LR", "L")])
def test_raters_of_nothing_or_of_other_items_are_refused(first, second):
    with pytest.raises(ValueError, match="the same items"):
        agreement(first, second)
