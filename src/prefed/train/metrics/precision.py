"""Intervals of shares of a few pairs, and of means over a few seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
"""The level of every interval."""


def seed_interval(
    values: Sequence[float], within: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float] | None:
    r"""The 95% interval of a mean over seeds: $\bar x \pm t_{n-1}\, s / \sqrt n$ (Student 1908).

    A value is what one seed came to, say its mean over prompts. What differs between seeds is then in $s$;
    a bootstrap of the prompts of all seeds together leaves it out, and is too narrow.

    Args:
        values: of each seed.
        within: the range that a value can have; the interval is cut to it.

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
    """The 95% interval of a share of pairs (Wilson 1927), in closed form: a page has thousands of them.

    Args:
        share: between 0 and 1.
        pairs: at least 1.

    >>> low, high = wilson_interval(0.5, 4)
    >>> round(low, 3), round(high, 3)
    (0.15, 0.85)
    """
    z2 = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2
    middle, scale = share + z2 / (2 * pairs), 1 + z2 / pairs
    half = math.sqrt(z2 * (share * (1 - share) / pairs + z2 / (4 * pairs**2)))
    # Of a share of 0 or 1 one end is the share itself, which rounding may miss on either side.
    low, high = (middle - half) / scale, (middle + half) / scale
    return (0.0 if share == 0 else low), (1.0 if share == 1 else high)


def mean_interval(shares: Mapping[str, float], pairs: Mapping[str, int]) -> tuple[float, float]:
    r"""The 95% interval of a mean of accuracies over given clients, each measured on pairs of its own.

    The clients stay those that they are: only their pairs are a sample. Each accuracy has Wilson's interval
    $[l_i, u_i]$, and the mean of N has

    $$\bar p - \sqrt{\textstyle\sum_i (p_i - l_i)^2}\,/\,N, \qquad
      \bar p + \sqrt{\textstyle\sum_i (u_i - p_i)^2}\,/\,N.$$

    Of one client it is Wilson's own interval.

    Source: Zou, Huang and Zhang, A note on confidence interval estimation for a linear function of binomial
    proportions, Computational Statistics and Data Analysis 53 (2009).

    Args:
        shares: client → share of its pairs that are right.
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
