"""How evenly a figure is spread over clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefed.metrics.accuracy import Accuracy

__all__ = ["Spread", "spread"]


@dataclass(frozen=True)
class Spread:
    """A figure of which more is better over n clients in six numbers, each client counting alike.

    Attributes:
        mean: over clients, those included that are not listed one by one.
        worst: the lowest client's.
        worst_decile: mean of the lowest tenth of the clients, at least one of them.
        best: the highest client's.
        std: standard deviation over clients, Σ(x − mean)²/n under the root.
        jain: Jain's index (Σx)² / (n Σx²), from 1/n where one client has everything to 1 where all have
            the same (Jain, Chiu and Hawe 1984); 1 where all have nothing.
    """

    mean: float
    worst: float
    worst_decile: float
    best: float
    std: float
    jain: float


def spread(figure: Accuracy) -> Spread:
    """How a figure is spread over clients.

    >>> from prefed.metrics.accuracy import over_clients
    >>> even = spread(over_clients({"a": 0.5, "b": 0.5}))
    >>> even.std, even.jain
    (0.0, 1.0)
    >>> spread(over_clients({"a": 1.0, "b": 0.0})).jain
    0.5
    """
    values = np.array(list(figure["per_client"].values()), dtype=np.float64)
    square = float((values**2).sum())
    return Spread(
        mean=figure["mean"],
        worst=figure["worst"],
        worst_decile=figure["worst_decile"],
        best=float(values.max()),
        std=float(values.std()),
        jain=float(values.sum() ** 2 / (len(values) * square)) if square else 1.0,
    )
