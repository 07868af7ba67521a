"""How far a share of a few pairs may be from the share of all pairs like them."""

from __future__ import annotations

import math
from collections.abc import Mapping


def standard_error(share: float, pairs: float) -> float:
    """Standard error of the share of n pairs that are ordered rightly.

    A model orders each pair of a client rightly with the same probability p, one pair independent of the
    others. Then the number of right pairs X is binomial: Var X = n p (1 − p). The share X/n has the variance
    p (1 − p) / n, and its root with the share in the place of p is the standard error. Where the share is 0
    or 1 this root is 0, and four right pairs of four would look certain. There (X + 1)/(n + 2), the mean of
    p under a uniform prior, takes the place of p.

    Args:
        share: between 0 and 1.
        pairs: n, at least 1.

    >>> standard_error(0.5, 4), round(standard_error(0.25, 12), 4)
    (0.25, 0.125)
    >>> round(standard_error(1.0, 4), 4) == round((5 / 6 * 1 / 6 / 4) ** 0.5, 4)
    True
    """
    p = share if 0 < share < 1 else (share * pairs + 1) / (pairs + 2)
    return math.sqrt(p * (1 - p) / pairs)


def mean_error(shares: Mapping[str, float], pairs: Mapping[str, float]) -> float:
    """Standard error of the mean over k clients, each client counted alike.

    Clients' pairs are independent, so the variance of the mean is the sum of the clients' variances over k².
    It says how the mean would change with other pairs of the same clients, not with other clients or another
    seed.

    Args:
        shares: client → its share, of at least one client.
        pairs: client → the number of its pairs.

    >>> mean_error({"ann": 0.5, "bob": 0.5}, {"ann": 4, "bob": 4}) == (2 * 0.25**2) ** 0.5 / 2
    True
    """
    return math.sqrt(sum(standard_error(p, pairs[client]) ** 2 for client, p in shares.items())) / len(shares)
