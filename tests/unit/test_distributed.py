"""Distributed noise: exact draws, whole numbers that are never longer than the clip, and their ε."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

from prefed.core import Key, Privacy
from prefed.privacy import Grid, MetricSum, guarantee_of, source_of
from prefed.privacy.distributed import _Draws, discrete_gaussian

SOURCES = {"seed": source_of(Key(1)), "system": source_of(None)}


def private(clip=0.3, noise=2.0, colluders=0):
    fields = {"clip": clip, "noise_multiplier": noise, "colluders": colluders}
    return Privacy(kind="distributed", delta=1e-5, **fields)


def pmf(bits, width=None):
    """Whole numbers and their probabilities, up to 12 standard deviations by default."""
    numbers = np.arange(-(width or 12 << bits), (width or 12 << bits) + 1)
    weights = np.exp(-(numbers.astype(float) ** 2) / (2 * 4.0**bits))
    return numbers, weights / weights.sum()


# The sampler


@pytest.mark.sample
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bits", [0, 1, 3])
def test_draws_have_the_probabilities_of_the_discrete_gaussian(source, bits):
    """Each value that 100,000 draws should show five times; chi-squared fails once in a million times."""
    drawn = discrete_gaussian(100_000, bits, SOURCES[source])
    numbers, probabilities = pmf(bits)
    often = probabilities * len(drawn) >= 5
    seen = np.array([(drawn == number).sum() for number in numbers])
    seen, expected = (
        np.append(each[often], each[~often].sum()) for each in (seen, probabilities * len(drawn))
    )
    assert scipy.stats.chisquare(seen, expected).pvalue > 1e-6


@pytest.mark.parametrize("source", SOURCES)
def test_fine_draws_are_normal(source):
    """At 2^20 steps a standard deviation, steps do not show: Kolmogorov and Smirnov's test, as above."""
    drawn = discrete_gaussian(70_000, 20, SOURCES[source]) / 2**20
    assert scipy.stats.kstest(drawn, "norm").pvalue > 1e-6


def test_the_variance_of_the_sum_is_that_of_the_sites_and_they_are_independent():
    """Ten sites with 20,000 numbers each. The relative error of a variance from N normal draws is √(2/N), and
    a correlation of N pairs has deviation 1/√N: five of them."""
    count, size = 10, 20_000
    noise = np.array([discrete_gaussian(size, 12, source_of(Key(1).at("site", s))) for s in range(count)])
    assert (noise.sum(axis=0) / 2**12).var() == pytest.approx(count, rel=5 * math.sqrt(2 / size))
    apart = np.corrcoef(noise)[~np.eye(count, dtype=bool)]
    assert np.abs(apart).max() < 5 / math.sqrt(size)
    again = discrete_gaussian(size, 12, source_of(Key(1).at("site", 3)))
    assert (again == noise[3]).all()


@pytest.mark.parametrize(("numerator", "bits"), [(0, 3), (3, 3), (8, 3), (13, 3), (70, 4), (1, 0), (3, 0)])
def test_coins_have_exponential_probabilities(numerator, bits):
    """100,000 coins of probability p = exp(−numerator/2^bits): within five deviations √(p (1 − p)/N)."""
    count, p = 100_000, math.exp(-numerator / 2**bits)
    coins = _Draws(source_of(Key(2))).decays(np.full(count, numerator), bits)
    assert abs(coins.mean() - p) <= 5 * math.sqrt(p * (1 - p) / count)


class Twin:
    """Canonne, Kamath and Steinke's algorithms 1 to 3 in Python's integers, from the same bytes."""

    def __init__(self, source):
        self.source = source

    def uniform(self, count, most):
        """Numbers below a power of two, from the highest bits of eight bytes each."""
        data = self.source(8 * count) if most > 1 else b""
        return [int.from_bytes(data[8 * k : 8 * k + 8], "little") * most >> 64 for k in range(count)]

    def below(self, count, most):
        """Numbers below any other: those of 32 bits past its last multiple are drawn again."""
        numbers = self.uniform(count, 2**32) if most > 1 else [0] * count
        while again := [k for k in range(count) if numbers[k] >= 2**32 // most * most]:
            for k, number in zip(again, self.uniform(len(again), 2**32), strict=True):
                numbers[k] = number
        return [number % most for number in numbers]

    def coins(self, numerators, denominator):
        """exp(−γ) for γ of at most 1: the first K for which a coin of γ/K fails is odd."""
        heads, left, k = [True] * len(numerators), list(range(len(numerators))), 1
        while left:
            shares = self.uniform(len(left), denominator)
            left = [at for at, share in zip(left, shares, strict=True) if share < numerators[at]]
            left = [at for at, number in zip(left, self.below(len(left), k), strict=True) if number == 0]
            for at in left:
                heads[at] = not k % 2
            k += 1
        return heads

    def decays(self, numerators, denominator):
        """exp(−γ) for any γ: a coin for what is beyond a whole number, and one of exp(−1) for each of it."""
        heads = self.coins([each % denominator for each in numerators], denominator)
        whole = [each // denominator for each in numerators]
        left = [at for at in range(len(heads)) if heads[at] and whole[at]]
        while left:
            ones = self.coins([1] * len(left), 1)
            for at, one in zip(left, ones, strict=True):
                heads[at], whole[at] = one, whole[at] - 1
            left = [at for at in left if heads[at] and whole[at]]
        return heads

    def laplace(self, count, scale):
        rest = self.uniform(count, scale)
        rest = [each for each, head in zip(rest, self.decays(rest, scale), strict=True) if head]
        left = list(range(len(rest)))
        while left:
            left = [at for at, one in zip(left, self.decays([1] * len(left), 1), strict=True) if one]
            for at in left:
                rest[at] += scale
        signs = self.uniform(len(rest), 2)
        return [-each if sign else each for each, sign in zip(rest, signs, strict=True) if each or not sign]

    def gaussian(self, size, scale):
        found = []
        while missing := size - len(found):
            drawn = self.laplace(2 * missing + 64, scale)
            numerators = [(abs(each) - scale) ** 2 for each in drawn]
            kept = self.decays(numerators, 2 * scale**2)
            found += [each for each, head in zip(drawn, kept, strict=True) if head][:missing]
        return found


@pytest.mark.parametrize("bits", [0, 1, 7, 24])
def test_draws_are_those_of_the_twin(bits):
    drawn = discrete_gaussian(700, bits, Key(3).numpy().bytes)
    assert drawn.tolist() == Twin(Key(3).numpy().bytes).gaussian(700, 2**bits)


# The grid


@given(
    update=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9),
    clip=st.floats(1e-6, 1e3),
    noise=st.floats(0.05, 50),
    sites=st.integers(3, 100),
    clients=st.integers(3, 10_000),
)
def test_no_client_is_longer_than_the_clip(update, clip, noise, sites, clients):
    """In whole numbers: Σ q² ≤ (C/γ)². An update within the clip is at most a step off, towards 0."""
    grid = Grid.of(private(clip, noise), sites, clients)
    array = np.array(update)
    words = grid.words(array)
    assert sum(int(each) ** 2 for each in words) <= grid.length**2
    assert grid.length * grid.step == pytest.approx(clip)
    if np.linalg.norm(array) <= clip * (1 - 1e-9):
        off = np.abs(array) / grid.step - np.abs(words)
        assert (off > -1e-6 * (1 + np.abs(words))).all()
        assert (off < 1 + 1e-6 * (1 + np.abs(words))).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_has_no_words(broken):
    with pytest.raises(ValueError, match="NaN or infinite"):
        Grid.of(private(), 3, 3).words(np.array([broken, 1.0]))


def test_a_hundred_sites_have_the_step_that_arithmetic_gives():
    """n = m = 100, C = 0.3, z = 2, c = 0: C/γ = 5 · 2^k, and 100 · 5 · 2^k + 12 · 10 · 2^k < 2^31 for
    k = 21. A step is 0.6/(10 · 2^21), below 2^-24."""
    grid = Grid.of(private(), 100, 100)
    assert (grid.bits, grid.length) == (21, pytest.approx(5 * 2**21))
    assert grid.step == pytest.approx(0.06 / 2**21)
    assert grid.step < 2**-24


@given(sites=st.integers(3, 100), clients=st.integers(3, 10**6), noise=st.floats(0.1, 100))
def test_no_honest_sum_wraps_around(sites, clients, noise):
    """All clients move one number by all of C, and the noise of all sites is 12 of its deviations."""
    grid = Grid.of(private(noise=noise, colluders=min(2, sites - 2)), sites, clients)
    assert clients * grid.length + 12 * math.sqrt(sites) * 2**grid.bits < 2**31


def test_a_grid_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"would not fit into 32 bits with noise_multiplier = 0\.001"):
        Grid.of(private(noise=0.001), 10, 10**6)
    for sites, colluders in ((2, 0), (3, 2), (10, 9)):
        with pytest.raises(ValueError, match="fewer than two are honest, or"):
            Grid.of(private(colluders=colluders), sites, 10)


SHARES = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@given(st.lists(SHARES, min_size=1, max_size=20), st.integers(3, 50))
def test_a_client_moves_a_sum_of_metrics_by_at_most_the_clip(clients, sites):
    """C = √k/2, whatever its k shares are, and 2C if they are replaced. Without noise the means are exact but
    for the step."""
    metrics = MetricSum(("a", "b", "c"))
    grid = metrics.grid(private(), sites, len(clients))
    words = [grid.words(metrics.steps(dict(zip("abc", each, strict=True)))) for each in clients]
    assert all(math.sqrt(int(each @ each)) * grid.step <= math.sqrt(3) / 2 + 1e-12 for each in words)
    means = metrics.means(grid.numbers(sum(words)), len(clients))
    assert list(means.values()) == pytest.approx(np.mean(clients, axis=0), abs=grid.step)
    assert grid.deviation == pytest.approx(2 * math.sqrt(3) / 2)


@pytest.mark.parametrize(("sites", "clients"), [(3, 3), (10, 200), (100, 10_000)])
def test_random_words_are_no_sum_of_metrics(sites, clients):
    """With the fewest words that a sum has; with one word a metric, most would be plausible."""
    metrics = MetricSum(("preference_accuracy",))
    grid, rng = metrics.grid(private(), sites, clients), np.random.default_rng(0)
    random = rng.integers(-(2**31), 2**31, (500, metrics.size))
    assert not any(map(grid.plausible, random))
    if clients == 10_000:
        assert sum(grid.plausible(each[:1]) for each in random) > 250


def test_sums_that_cannot_be_are_found_and_sums_that_can_be_are_not():
    """Uniform words are found, also of a single number in all; the largest honest sum is not."""
    grid, size = Grid.of(private(), 10, 200), 5000
    draw = np.random.default_rng(0)
    uniform = draw.integers(-(2**31), 2**31, size)
    honest = sum(grid.noise(size, source_of(Key(s))) for s in range(10))
    honest[0] += int(200 * grid.length)
    assert grid.plausible(honest)
    assert not grid.plausible(uniform)


# ε


def renyi(p, q, order):
    return float(scipy.special.logsumexp(order * np.log(p) + (1 - order) * np.log(q))) / (order - 1)


@pytest.mark.sample
@pytest.mark.parametrize("bits", [0, 1])
@pytest.mark.parametrize("honest", [2, 3])
@pytest.mark.parametrize("shift", [1, 2])
def test_the_bound_covers_the_exact_divergence_of_coarse_noise(bits, honest, shift):
    """The convolution of the sites' probabilities, number by number, against the bound of the docstring, with
    noise so coarse that the second term counts: D_α ≤ α/2 (Δ²/(n σ²) + τ/2)."""
    _, single = pmf(bits, 40)
    total = single
    for _ in range(honest - 1):
        total = np.convolve(total, single)
    p, q = total[shift:], total[:-shift]
    inside = (p > 1e-290) & (q > 1e-290)
    tau = 10 * sum(math.exp(-2 * math.pi**2 * 4.0**bits * j / (j + 1)) for j in range(1, honest))
    for order in (1.5, 2, 4, 8):
        bound = order / 2 * (shift**2 / (honest * 4.0**bits) + tau / 2)
        assert renyi(p[inside], q[inside], order) <= bound + 1e-12


def test_fine_noise_is_gaussian_for_any_number_of_sites_and_numbers():
    """The docstring's 10^-1000 with k = 4, a million sites and 10^12 numbers."""
    sites, size = mpf(10) ** 6, mpf(10) ** 12
    tau = 10 * sites * mp.exp(-(mp.pi**2) * 4**4)  # j = 1 is the largest of its terms
    assert tau * size / 2 < mpf(10) ** -1000
    assert Grid.of(private(noise=0.05), 100, 10**5).bits >= 4


@pytest.mark.parametrize(("noise", "colluders"), [(1.0, 0), (2.0, 1), (2.0, 3)])
def test_epsilon_covers_the_exact_loss_of_a_release(noise, colluders):
    """Ten sites, one number that a client moves by all of its clip: δ(ε) of the honest sites' noise, summed
    number by number on a grid of 64 steps, is below δ at the reported ε, and above it at 0.8 of it."""
    privacy = private(noise=noise, colluders=colluders)
    promised = guarantee_of(privacy, 10, 10)
    delta = 1e-5
    pytest.importorskip("dp_accounting")
    epsilon = promised.epsilon(1, delta)
    assert promised.colluders == colluders
    honest, bits = 10 - colluders, 6
    shift = round(2**bits * math.sqrt(honest) / noise)
    _, single = pmf(bits)
    total = single
    for _ in range(honest - 1):
        total = np.convolve(total, single)
    p, q = np.pad(total, (shift, 0)), np.pad(total, (0, shift))
    assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= delta
    assert np.maximum(p - math.exp(0.8 * epsilon) * q, 0).sum() > delta


def test_a_collusion_costs_what_the_docs_say():
    """The noise of all n sites over that of n − c: 10 sites and c = 0, 2, 3 give 1, 1.118 and 1.195."""
    for colluders, price in ((0, 1.0), (2, 1.118), (3, 1.195)):
        grid = Grid.of(private(colluders=colluders), 10, 200)
        assert grid.step * 2**grid.bits * math.sqrt(10) == pytest.approx(0.6 * price, abs=0.6e-3)
