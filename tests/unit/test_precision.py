"""Standard errors of shares of pairs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefed.metrics import mean_error, standard_error


@given(st.integers(1, 40), st.floats(0.05, 0.95))
def test_the_error_of_a_share_is_its_deviation_over_samples(pairs, p):
    """Over all numbers k of right pairs, weighed by their binomial probabilities, the share k/n has the
    deviation √(p(1 − p)/n)."""
    k = np.arange(pairs + 1)
    weights = np.array([math.comb(pairs, int(n)) * p**n * (1 - p) ** (pairs - n) for n in k])
    mean = float(weights @ (k / pairs))
    deviation = math.sqrt(float(weights @ (k / pairs - mean) ** 2))
    assert standard_error(p, pairs) == pytest.approx(deviation)


@pytest.mark.parametrize("pairs", [1, 4, 100])
def test_all_right_is_not_certain(pairs):
    """(n + 1)/(n + 2) in the place of 1, which is as far from 1 as 1/(n + 2) is from 0."""
    p = (pairs + 1) / (pairs + 2)
    assert standard_error(1.0, pairs) == pytest.approx(math.sqrt(p * (1 - p) / pairs))
    assert standard_error(0.0, pairs) == pytest.approx(standard_error(1.0, pairs))


@given(st.lists(st.tuples(st.floats(0.05, 0.95), st.integers(1, 50)), min_size=1, max_size=6))
def test_the_error_of_a_mean_adds_variances(clients):
    """Of k clients that are alike it is that of one over √k; in general Var(Σ X_i / k) = Σ Var X_i / k²."""
    shares = {str(k): share for k, (share, _) in enumerate(clients)}
    pairs = {str(k): count for k, (_, count) in enumerate(clients)}
    variance = sum(share * (1 - share) / count for share, count in clients) / len(clients) ** 2
    assert mean_error(shares, pairs) == pytest.approx(math.sqrt(variance))
