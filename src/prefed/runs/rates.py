"""The choice of a learning rate by what each came to on validation pairs."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["best", "flat", "following"]


def best(figures: Mapping[float, float]) -> float:
    """The rate with the highest figure, the smaller one on a tie.

    >>> best({1e-3: 0.5, 3e-3: 0.6, 9e-3: 0.6})
    0.003
    """
    return max(sorted(figures), key=lambda lr: figures[lr])


def flat(figures: Mapping[float, float]) -> bool:
    """Whether every rate comes to the same figure, so that no other rate would be better.

    So it is with one model for clients who want opposite things: it gets one of every two right.
    """
    return len(figures) > 1 and max(figures.values()) - min(figures.values()) < 1e-9


def following(figures: Mapping[float, float], most: int) -> float | None:
    """The rate to try next: beyond the best one if that lies at an end, as far again as its neighbour.

    >>> following({1e-3: 0.5, 3e-3: 0.6}, most=9), following({3e-3: 0.5, 9e-3: 0.6}, most=9)
    (0.009, 0.03)

    Args:
        figures: rate → figure, for each rate that was tried.
        most: how many rates may be tried in all.

    Returns:
        The rate, of one digit; ``None`` if the best one lies inside, all are alike, or ``most`` are tried.
    """
    rates, top = sorted(figures), best(figures)
    if flat(figures) or not 2 <= len(rates) < most or top not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if top == rates[0] else rates[-2]
    return float(f"{top * top / neighbour:.1g}")
