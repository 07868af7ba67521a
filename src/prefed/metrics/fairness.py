"""How evenly a metric is spread over clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefed.metrics.clients import FederatedMetric

__all__ = ["Spread", "spread"]


@dataclass(frozen=True)
class Spread:
    """Six numbers about a metric over n clients. Each client counts alike; the lowest value is the worst.

    Attributes:
        mean: over clients, also over those that are not listed one by one.
        worst: the lowest client's.
        worst_decile: mean of the lowest tenth of the clients, at least one of them.
        best: the highest client's.
        std: standard deviation over clients, √(Σ(x − mean)²/n).
        jain: Jain's index (Σx)² / (n Σx²) (Jain, Chiu and Hawe 1984). It is 1/n if one client has everything
            and 1 if all have the same; also 1 if all have 0.
    """

    mean: float
    worst: float
    worst_decile: float
    best: float
    std: float
    jain: float


def spread(metric: FederatedMetric) -> Spread:
    """The six numbers of one metric.

    >>> from prefed.metrics import federated_metric
    >>> even = spread(federated_metric({"a": 0.5, "b": 0.5}))
    >>> even.std, even.jain
    (0.0, 1.0)
    >>> spread(federated_metric({"a": 1.0, "b": 0.0})).jain
    0.5
    """
    values = np.array(list(metric["per_client"].values()), dtype=np.float64)
    square = float((values**2).sum())
    return Spread(
        mean=metric["mean"],
        worst=metric["worst"],
        worst_decile=metric["worst_decile"],
        best=float(values.max()),
        std=float(values.std()),
        jain=float(values.sum() ** 2 / (len(values) * square)) if square else 1.0,
    )
