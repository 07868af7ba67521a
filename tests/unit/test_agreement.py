"""Agreement of two raters: a worked table, the definition by brute force, and the interval's equation."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefed.train.metrics.intervals import agreement, cohen_kappa

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
