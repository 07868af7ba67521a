"""Win rates: what counts, how sure they are, and what is left of them at equal lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit
from scipy.stats import bootstrap

from prefed.core import Key
from prefed.metrics.winrate import RESAMPLES, NothingJudgedError, length_controlled, win_rate

OUTCOMES = st.lists(st.sampled_from([1.0, 0.5, 0.0, None]), min_size=1, max_size=40)


def test_the_papers_figure_stands_beside_the_rate_with_halves():
    """FedBiscuit's first row: 4,408 wins and 28 ties of 6,553. Wins / judged is its 67.27%, and half of the
    ties add 14 / 6,553."""
    rate = win_rate([1.0] * 4408 + [0.5] * 28 + [0.0] * 2117, Key(0))
    assert round(rate.wins, 4) == 0.6727
    assert rate.mean == (4408 + 14) / 6553
    assert (rate.ties, rate.judged, rate.failed) == (28, 6553, 0)


@pytest.mark.parametrize("outcomes", [[], [None], [None, None]])
def test_no_rate_over_nothing(outcomes):
    with pytest.raises(NothingJudgedError, match="nothing was judged"):
        win_rate(outcomes, Key(0))
    with pytest.raises(NothingJudgedError, match="nothing was judged"):
        length_controlled(outcomes, [(1, 2)] * len(outcomes))


def test_an_outcome_is_one_of_three():
    with pytest.raises(ValueError, match="an outcome is 1"):
        win_rate([1.0, 0.7], Key(0))


@given(OUTCOMES.filter(lambda outcomes: any(value is not None for value in outcomes)))
def test_the_other_side_has_the_rest(outcomes):
    """Swapping the sides turns the rate into 1 − rate, leaves ties, and nothing hangs on the order."""
    swapped = [None if value is None else 1 - value for value in outcomes]
    rate, other = win_rate(outcomes, Key(1)), win_rate(swapped, Key(1))
    assert rate.mean == pytest.approx(1 - other.mean)
    assert (rate.ties, rate.judged, rate.failed) == (other.ties, other.judged, other.failed)
    assert rate.wins + other.wins == pytest.approx(1 - rate.ties / rate.judged)
    assert rate.low <= rate.mean <= rate.high
    assert win_rate(outcomes[::-1], Key(1)) == rate


def test_the_interval_is_scipys():
    """The same percentile bootstrap over lists: both ends differ by the noise of resampling alone. Of a
    quantile at 2.5% of 10,000 draws the standard error is √(0.025·0.975/10⁴)/f, f = 0.0584/σ: 0.027 σ."""
    values = np.array([1.0] * 70 + [0.5] * 10 + [0.0] * 40)
    rate = win_rate(list(values), Key(2))
    oracle = bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    sigma = values.std() / np.sqrt(len(values))
    assert rate.low == pytest.approx(oracle.low, abs=0.15 * sigma + 0.5 / 120)
    assert rate.high == pytest.approx(oracle.high, abs=0.15 * sigma + 0.5 / 120)


def test_the_interval_covers():
    """Of 400 binomial samples of 100 at p = 0.6, a 95% interval holds p in 95%: the number of misses is
    binomial(400, 0.05), below 38 but once in ten thousand; the discreteness of k/100 costs 1% more."""
    draw = np.random.default_rng(3).binomial(100, 0.6, size=400)
    rates = [
        win_rate([1.0] * int(k) + [0.0] * int(100 - k), Key(4).at("sample", n)) for n, k in enumerate(draw)
    ]
    misses = sum(not rate.low <= 0.6 <= rate.high for rate in rates)
    assert 5 <= misses <= 40


def test_length_control_finds_a_planted_preference():
    """Outcomes drawn from σ(a + b·tanh(d/std)) with a = logit 0.3 and a strong taste for length: the plain
    rate is far above 0.3, because our texts are longer; the rate at equal lengths is 0.3 within its noise."""
    draw = np.random.default_rng(5)
    own, other = draw.integers(80, 400, 6000), draw.integers(20, 220, 6000)
    d = own - other
    p = expit(logit(0.3) + 3 * np.tanh(d / d.std()))
    outcomes = list((draw.random(6000) < p).astype(float))
    assert win_rate(outcomes, Key(0)).mean > 0.6
    fit = length_controlled(outcomes, list(zip(own.tolist(), other.tolist(), strict=True)))
    assert fit.rate == pytest.approx(0.3, abs=0.03)
    assert "difficulty" in fit.note
    assert "left out" in fit.note


def test_the_fit_solves_the_likelihoods_equations():
    """With x ∈ {−t, t} the fit is exact: σ(a ± bt) are the two groups' rates 1/4 and 3/4 (a tie is half a
    win), so a = (logit 1/4 + logit 3/4) / 2 = 0; with rates 1/2 and 3/4, σ(a) = σ(logit(3/4) / 2)."""
    lengths = [(1, 2)] * 4 + [(2, 1)] * 4
    rate = length_controlled([0, 0, 0.5, 0.5, 1, 1, 0.5, 0.5], lengths).rate
    assert rate == pytest.approx(0.5, abs=1e-9)
    rate = length_controlled([1, 1, 0, 0, 1, 1, 1, 0], lengths).rate
    assert rate == pytest.approx(expit(logit(0.75) / 2), abs=1e-9)


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 0.5, 0.0]), st.integers(0, 9), st.integers(0, 9)), min_size=1)
)
def test_every_case_has_an_answer_or_a_reason(rows):
    """Whatever the data, a finite rate or a reason; and the other side has the rest."""
    outcomes, own, other = (list(column) for column in zip(*rows, strict=True))
    fit = length_controlled(outcomes, list(zip(own, other, strict=True)))
    mirror = length_controlled([1 - value for value in outcomes], list(zip(other, own, strict=True)))
    assert fit.note.startswith("length_controlled: ")
    if fit.rate is None:
        assert mirror.rate is None
        assert "none, because" in fit.note
    else:
        assert 0 <= fit.rate <= 1
        assert mirror.rate is not None
        assert fit.rate == pytest.approx(1 - mirror.rate, abs=1e-6)


@pytest.mark.parametrize(
    ("outcomes", "lengths", "rate", "reason"),
    [
        ([1, 1, 1], [(1, 2), (5, 2), (9, 9)], 1.0, "all outcomes are equal"),
        ([0.5, 0.5], [(1, 2), (5, 2)], 0.5, "all outcomes are equal"),
        ([1, 0, 0.5, 1], [(3, 3)] * 4, 0.625, "equally long"),
        ([1, 0, 0.5, 1], [(3, 2)] * 4, None, "the same amount"),
        ([1, 1, 0, 0], [(9, 1), (8, 1), (1, 2), (1, 9)], None, "separates"),
        ([1, 0.5, 0], [(9, 1), (5, 5), (1, 9)], None, "separates"),
    ],
)
def test_cases_without_a_fit(outcomes, lengths, rate, reason):
    """One length apart is separation too: with a tie between wins and losses, wins ≥ 0 ≥ losses touch at 0,
    and the likelihood grows with b for ever."""
    fit = length_controlled(outcomes, lengths)
    assert fit.rate == rate
    assert reason in fit.note
