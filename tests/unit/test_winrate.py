"""Win rates: what counts, how sure they are, and what is left of them at equal lengths."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit
from scipy.stats import binom, binomtest, multinomial

from prefed.train.metrics.winrate import (
    NothingJudgedError,
    effective_share,
    length_controlled,
    score_interval,
    win_rate,
)

OUTCOMES = st.lists(st.sampled_from([1.0, 0.5, 0.0, None]), min_size=1, max_size=40)


def test_the_papers_figure_is_next_to_the_rate_with_halves():
    """FedBiscuit's first row: 4,408 wins and 28 ties of 6,553. Wins / judged is its 67.27%, and half of the
    ties add 14 / 6,553."""
    rate = win_rate([1.0] * 4408 + [0.5] * 28 + [0.0] * 2117)
    assert round(rate.wins, 4) == 0.6727
    assert rate.mean == (4408 + 14) / 6553
    assert (rate.ties, rate.judged, rate.failed) == (28, 6553, 0)


@pytest.mark.parametrize("outcomes", [[], [None], [None, None]])
def test_no_rate_over_nothing(outcomes):
    with pytest.raises(NothingJudgedError, match="nothing was judged"):
        win_rate(outcomes)
    with pytest.raises(NothingJudgedError, match="nothing was judged"):
        length_controlled(outcomes, [(1, 2)] * len(outcomes))


def test_an_outcome_is_one_of_three():
    with pytest.raises(ValueError, match=r"outcomes must be 1, 0\.5, 0 or None"):
        win_rate([1.0, 0.7])


@given(OUTCOMES.filter(lambda outcomes: any(value is not None for value in outcomes)))
def test_the_other_side_has_the_rest(outcomes):
    """Swapping the sides turns the rate into 1 − rate, leaves ties, and nothing hangs on the order."""
    swapped = [None if value is None else 1 - value for value in outcomes]
    rate, other = win_rate(outcomes), win_rate(swapped)
    assert rate.mean == pytest.approx(1 - other.mean)
    assert (rate.ties, rate.judged, rate.failed) == (other.ties, other.judged, other.failed)
    assert rate.wins + other.wins == pytest.approx(1 - rate.ties / rate.judged)
    assert rate.low <= rate.mean <= rate.high
    assert win_rate(outcomes[::-1]) == rate


def counted(won, tied, lost):
    return [1.0] * won + [0.5] * tied + [0.0] * lost


@given(st.integers(0, 300), st.integers(0, 300))
def test_without_ties_the_interval_is_wilsons(won, lost):
    if won + lost:
        expected = binomtest(won, won + lost).proportion_ci(method="wilson")
        assert score_interval(won, 0, lost) == pytest.approx((expected.low, expected.high), abs=1e-8)


@pytest.mark.parametrize("counts", [(12, 5, 3), (3, 40, 9), (1, 8, 0), (30, 1, 20), (0, 6, 0), (0, 3, 11)])
def test_the_ends_solve_the_score_equation(counts):
    """At an end the score test is at its critical value. The oracle finds the likeliest probability of a loss
    given the difference by a search, and takes the variance of an outcome from its definition."""
    won, tied, lost = counts
    n = sum(counts)
    for end in score_interval(*counts):
        d = 2 * end - 1

        def worse(q, d=d):
            parts = (won, q + d), (tied, 1 - 2 * q - d), (lost, q)
            return -sum(count * math.log(max(p, 1e-300)) for count, p in parts if count)

        bounds = (max(0.0, -d), (1 - d) / 2)
        q = minimize_scalar(worse, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        q = min((q, *bounds), key=worse)
        variance = (q + d) * (1 - d) ** 2 + (1 - 2 * q - d) * d**2 + q * (1 + d) ** 2
        assert ((won - lost) / n - d) ** 2 == pytest.approx(1.959964**2 * variance / n, rel=1e-4)


def covered(n, p, ties):
    """How likely it is that the interval of n outcomes holds the win rate: the sum over all counts of wins,
    ties and losses. ``p`` is the probability of a win where there is no tie."""
    win, lose = p * (1 - ties), (1 - p) * (1 - ties)
    found = 0.0
    for counts, (low, high) in intervals(n).items():
        if low <= win + ties / 2 <= high:
            found += float(multinomial.pmf(counts, n, [win, ties, lose]))
    return found


@cache
def intervals(n):
    return {
        (w, t, n - w - t): score_interval(w, t, n - w - t) for w in range(n + 1) for t in range(n + 1 - w)
    }


@pytest.mark.parametrize("n", [10, 20, 40])
def test_the_interval_covers(n):
    """95% but for what the discreteness of so few outcomes costs: over win rates from a half to 0.95, never
    below 0.91, and on the mean 0.95."""
    found = [covered(n, p, ties) for p in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95) for ties in (0.0, 0.1, 0.3, 0.6)]
    assert min(found) > 0.91
    assert 0.945 < float(np.mean(found)) < 0.975


@pytest.mark.parametrize("n", [50, 100, 200])
def test_the_interval_covers_near_the_edge(n):
    """Without ties, where percentiles of resamples hold a rate of 0.95 in 0.84 of all cases (n = 50)."""
    k = np.arange(n + 1)
    ends = np.array([score_interval(int(won), 0, int(n - won)) for won in k])
    for p in (0.5, 0.8, 0.9, 0.95):
        inside = (ends[:, 0] <= p) & (p <= ends[:, 1])
        assert binom.pmf(k, n, p)[inside].sum() > 0.93


def test_prompts_that_differ_count_in_full():
    outcomes = counted(7, 2, 4)
    assert win_rate(outcomes, list("abcdefghijklm")) == win_rate(outcomes)
    assert effective_share([(1.0, "a"), (0.5, "b"), (0.0, "c")]) == 1.0


def test_prompts_that_are_repeated_count_less():
    """G = 3 prompts twice each, and twice the same verdict. The sums of a prompt are twice as far from their
    mean, so D = 2 · (3/2) / (6/5) = 2.5; t has its 97.5% points at 2.5706 (5) and 4.3027 (2)."""
    usable = [(value, prompt) for value, prompt in zip((1.0, 1.0, 0.0), "abc", strict=True) for _ in range(2)]
    assert effective_share(usable) == pytest.approx((2.5706 / 4.3027) ** 2 / 2.5, rel=1e-4)
    rate = win_rate([value for value, _ in usable], [prompt for _, prompt in usable])
    assert (rate.judged, rate.distinct, rate.mean) == (6, 3, pytest.approx(2 / 3))
    assert (rate.low, rate.high) != win_rate([value for value, _ in usable])


def test_one_prompt_is_one_outcome_however_often_it_is_judged():
    rate = win_rate([1.0, 1.0, 0.0, 0.0], ["a"] * 4)
    assert (rate.low, rate.high) == score_interval(0.5, 0.0, 0.5)


def test_verdicts_that_contradict_each_other_on_every_prompt_are_worth_no_more():
    """A win and a loss on each prompt: the prompts do not differ at all, and still no verdict counts as more
    than one."""
    usable = [(float(value), prompt) for prompt in range(9) for value in (0, 1)]
    assert 0 < effective_share(usable) < 1


@pytest.mark.parametrize("p", [0.5, 0.7, 0.9])
def test_the_interval_covers_where_prompts_are_repeated(p):
    """25 prompts, four equal verdicts on each: as many prompts are won as a binomial variable says. Taken as
    100 prompts, the interval would hold p in no more than 0.75 of all cases."""
    count, times = 25, 4
    prompts = [prompt for prompt in range(count) for _ in range(times)]
    weights = binom.pmf(np.arange(count + 1), count, p)
    held = {True: 0.0, False: 0.0}
    for won, weight in enumerate(weights):
        outcomes = [float(prompt < won) for prompt in prompts]
        for known in held:
            rate = win_rate(outcomes, prompts if known else None)
            held[known] += float(weight) * (rate.low <= p <= rate.high)
    assert held[True] > 0.92
    assert held[False] < 0.75


def test_length_control_finds_a_planted_preference():
    """Outcomes drawn from σ(a + b·tanh(d/std)) with a = logit 0.3 and a strong taste for length: the plain
    rate is far above 0.3, because our texts are longer; the rate at equal lengths is 0.3 within its noise."""
    draw = np.random.default_rng(5)
    own, other = draw.integers(80, 400, 6000), draw.integers(20, 220, 6000)
    d = own - other
    p = expit(logit(0.3) + 3 * np.tanh(d / d.std()))
    outcomes = list((draw.random(6000) < p).astype(float))
    assert win_rate(outcomes).mean > 0.6
    fit = length_controlled(outcomes, list(zip(own.tolist(), other.tolist(), strict=True)))
    assert fit.rate == pytest.approx(0.3, abs=0.03)
    assert "difficulty" in fit.note
    assert "without AlpacaEval's term for prompt difficulty" in fit.note


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
    assert fit.note.startswith("length-controlled: ")
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
        ([1, 1, 1], [(1, 2), (5, 2), (9, 9)], 1.0, "equal to the win rate, because all outcomes are equal"),
        ([0.5, 0.5], [(1, 2), (5, 2)], 0.5, "equal to the win rate, because all outcomes are equal"),
        ([1, 0, 0.5, 1], [(3, 3)] * 4, 0.625, "equal to the win rate, because both texts always have equal"),
        ([1, 0, 0.5, 1], [(3, 2)] * 4, None, "the same amount"),
        ([1, 1, 0, 0], [(9, 1), (8, 1), (1, 2), (1, 9)], None, "a length threshold separates all wins"),
        ([1, 0.5, 0], [(9, 1), (5, 5), (1, 9)], None, "a length threshold separates all wins from all"),
    ],
)
def test_cases_without_a_fit(outcomes, lengths, rate, reason):
    """One length apart is separation too: with a tie between wins and losses, wins ≥ 0 ≥ losses touch at 0,
    and the likelihood grows with b for ever."""
    fit = length_controlled(outcomes, lengths)
    assert fit.rate == rate
    assert reason in fit.note
