"""Agreement of two raters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from prefed.train.metrics.precision import wilson_interval


@dataclass(frozen=True)
class Agreement:
    """How far two raters agree on n ≥ 1 items.

    Attributes:
        agreed: number of items to which both give the same label.
        judged: n.
        share: ``agreed / judged``.
        low: lower end of the interval of ``share``: Wilson (1927), at 95%.
        high: its upper end.
        kappa: of :func:`cohen_kappa`.
    """

    agreed: int
    judged: int
    share: float
    low: float
    high: float
    kappa: float | None


def agreement(first: Sequence[Hashable], second: Sequence[Hashable]) -> Agreement:
    """Agreement of two raters, beyond chance too.

    Args:
        first: the labels of one rater.
        second: those of the other, of the same items in the same order.

    Raises:
        ValueError: there are no items, or the raters have not as many.
    """
    kappa = cohen_kappa(first, second)
    agreed, judged = _agreed(first, second), len(first)
    share = agreed / judged
    return Agreement(agreed, judged, share, *wilson_interval(share, judged), kappa)


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """κ = (p_o − p_e) / (1 − p_e) of two raters (Cohen 1960).

    p_o is the share of items with equal labels. p_e = Σ_c p₁(c) p₂(c) is what chance would give: each rater
    draws labels as often as they gave them.

    Returns:
        1 for full agreement, 0 for that of chance. ``None`` where both gave one label and no other: chance
        explains all of that.

    Raises:
        ValueError: as for :func:`agreement`.

    >>> cohen_kappa("LLLLRRRR", "LLLRRRRL")
    0.5
    """
    if not first or len(first) != len(second):
        raise ValueError(
            f"raters label the same items, at least one; these have {len(first)} and {len(second)}"
        )
    n, counts = len(first), (Counter(first), Counter(second))
    # In whole numbers, so that chance agreement of 1 is met exactly.
    chance = sum(count * counts[1][label] for label, count in counts[0].items())
    if chance == n * n:
        return None
    return (n * _agreed(first, second) - chance) / (n * n - chance)


def _agreed(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=True))
