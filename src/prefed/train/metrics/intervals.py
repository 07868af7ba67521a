"""Standard errors and confidence intervals of shares and means, and agreement of two raters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
"""Level of all intervals."""
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Half the width of an interval of a normal distribution, in standard deviations."""


def seed_interval(
    values: Sequence[float], within: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float] | None:
    r"""Return the 95% interval of a mean over seeds: $\bar x \pm t_{n-1}\, s / \sqrt n$ (Student 1908).

    The interval includes the variation between seeds, which a bootstrap of the prompts of all seeds misses.

    Args:
        values: result of each seed, such as its mean over prompts.
        within: range of possible values; the interval is clipped to it.

    Returns:
        ``None`` for fewer than two seeds.

    >>> low, high = seed_interval([0.6, 0.7, 0.8])
    >>> round(low, 3), round(high, 3)
    (0.452, 0.948)
    """
    n = len(values)
    if n < 2:
        return None
    from scipy.stats import t

    mean = fmean(values)
    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * stdev(values) / math.sqrt(n)
    return max(within[0], mean - half), min(within[1], mean + half)


def wilson_interval(share: float, pairs: float) -> tuple[float, float]:
    """Return the 95% interval of a share of pairs (Wilson 1927), in closed form for speed.

    Args:
        share: between 0 and 1.
        pairs: at least 1.

    >>> low, high = wilson_interval(0.5, 4)
    >>> round(low, 3), round(high, 3)
    (0.15, 0.85)
    """
    z2 = Z**2
    middle, scale = share + z2 / (2 * pairs), 1 + z2 / pairs
    half = math.sqrt(z2 * (share * (1 - share) / pairs + z2 / (4 * pairs**2)))
    # For a share of 0 or 1 one end is the share itself, which rounding may miss on either side.
    low, high = (middle - half) / scale, (middle + half) / scale
    return (0.0 if share == 0 else low), (1.0 if share == 1 else high)


def mean_interval(shares: Mapping[str, float], pairs: Mapping[str, int]) -> tuple[float, float]:
    r"""Return the 95% interval of a mean of accuracies over fixed clients, each measured on its own pairs.

    Only the pairs are a sample. Each accuracy has Wilson's interval $[l_i, u_i]$, and the mean of N has

    $$\bar p - \sqrt{\textstyle\sum_i (p_i - l_i)^2}\,/\,N, \qquad
      \bar p + \sqrt{\textstyle\sum_i (u_i - p_i)^2}\,/\,N.$$

    For one client it is Wilson's interval.

    Source: Zou, Huang and Zhang, A note on confidence interval estimation for a linear function of binomial
    proportions, Computational Statistics and Data Analysis 53 (2009).

    Args:
        shares: client → its accuracy.
        pairs: client → its number of pairs, at least 1.

    >>> low, high = mean_interval({"ann": 0.5}, {"ann": 4})
    >>> round(low, 3), round(high, 3)
    (0.15, 0.85)
    """
    below = above = 0.0
    for client, share in shares.items():
        low, high = wilson_interval(share, pairs[client])
        below += (share - low) ** 2
        above += (high - share) ** 2
    mean = math.fsum(shares.values()) / len(shares)
    return mean - math.sqrt(below) / len(shares), mean + math.sqrt(above) / len(shares)


def error_of_mean(errors: Mapping[str, float]) -> float:
    """Return the standard error of a mean over clients, from each client's standard error.

    >>> error_of_mean({"a": 3.0, "b": 4.0})
    2.5
    """
    return math.sqrt(math.fsum(error**2 for error in errors.values())) / len(errors)


@dataclass(frozen=True)
class Agreement:
    """Agreement of two raters on n ≥ 1 items.

    Attributes:
        agreed: number of items with equal labels.
        judged: n.
        share: ``agreed / judged``.
        low: lower end of the 95% interval of ``share`` (Wilson 1927).
        high: upper end.
        kappa: see :func:`cohen_kappa`.
    """

    agreed: int
    judged: int
    share: float
    low: float
    high: float
    kappa: float | None


def agreement(first: Sequence[Hashable], second: Sequence[Hashable]) -> Agreement:
    """Compute the agreement of two raters, including agreement beyond chance.

    Args:
        first: labels of one rater.
        second: labels of the other rater for the same items, in the same order.

    Raises:
        ValueError: there are no items, or different numbers of labels.
    """
    kappa = cohen_kappa(first, second)
    agreed, judged = _agreed(first, second), len(first)
    share = agreed / judged
    return Agreement(agreed, judged, share, *wilson_interval(share, judged), kappa)


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """Return κ = (p_o − p_e) / (1 − p_e) of two raters (Cohen 1960).

    p_o is the share of items with equal labels. p_e = Σ_c p₁(c) p₂(c) is the share expected by chance, if
    each rater draws labels with their own frequencies.

    Returns:
        1 for full agreement, 0 for chance agreement; ``None`` if both raters only gave one and the same
        label.

    Raises:
        ValueError: as for :func:`agreement`.

    >>> cohen_kappa("LLLLRRRR", "LLLRRRRL")
    0.5
    """
    if not first or len(first) != len(second):
        raise ValueError(
            f"raters must label the same items, at least one, but have {len(first)} and {len(second)} labels"
        )
    n, counts = len(first), (Counter(first), Counter(second))
    # Integer arithmetic detects a chance agreement of 1 exactly.
    chance = sum(count * counts[1][label] for label, count in counts[0].items())
    if chance == n * n:
        return None
    return (n * _agreed(first, second) - chance) / (n * n - chance)


def _agreed(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=True))
