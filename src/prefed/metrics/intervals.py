"""How sure an accuracy is that was measured on few pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prefed.metrics.winrate import CONFIDENCE


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
    from scipy.stats import binomtest

    below = above = 0.0
    for client, share in shares.items():
        count = pairs[client]
        interval = binomtest(round(share * count), count).proportion_ci(CONFIDENCE, method="wilson")
        below += (share - float(interval.low)) ** 2
        above += (float(interval.high) - share) ** 2
    mean = math.fsum(shares.values()) / len(shares)
    return mean - math.sqrt(below) / len(shares), mean + math.sqrt(above) / len(shares)
