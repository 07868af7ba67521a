"""The metrics of a federation: each client's value, their mean, the worst, and how evenly they are spread."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np

from prefed.core import Privacy
from prefed.train.metrics.pairs import LOWER_IS_BETTER


class FederatedMetric(TypedDict):
    """A metric over clients.

    ``worst`` is the worst client's value: the lowest, for a loss the highest. ``worst_decile`` is the mean of
    the worst tenth of the clients (at least one of them). ``per_client`` has every client's value.

    Clients with fewer pairs than ``[privacy] minimum_pairs`` are in none of these three. The mean includes
    them, and ``mean_alone`` is their number. But if all of them together have fewer than ``minimum_pairs``
    pairs, the mean leaves them out too, and ``left_out`` is their number. If there are no such clients, both
    keys are absent.
    """

    mean: float
    worst: float
    worst_decile: float
    per_client: dict[str, float]
    mean_alone: NotRequired[int]
    left_out: NotRequired[int]


def federated_metric(
    values: Mapping[str, float],
    *,
    loss: bool = False,
    small: Collection[str] = (),
    include_small: bool = True,
) -> FederatedMetric:
    """Mean, worst, worst decile and each client's value.

    Args:
        loss: the highest value is the worst.
        small: clients that may not be listed one by one.
        include_small: the mean includes the small clients.

    Raises:
        ValueError: there is no client, or none that may be listed.

    >>> metric = federated_metric({"a": 0.5, "b": 1.0, "c": 0.75})
    >>> metric["mean"], metric["worst"], metric["worst_decile"]
    (0.75, 0.5, 0.5)
    """
    listed = {client: values[client] for client in sorted(values) if client not in small}
    if not listed:
        raise ValueError("no client to average over")
    averaged = list(values.values()) if include_small else list(listed.values())
    ordered = sorted(listed.values(), reverse=loss)
    worst = ordered[: math.ceil(len(ordered) / 10)]
    metric: FederatedMetric = {
        "mean": math.fsum(averaged) / len(averaged),
        "worst": ordered[0],
        "worst_decile": math.fsum(worst) / len(worst),
        "per_client": listed,
    }
    if small:
        metric["mean_alone" if include_small else "left_out"] = len(small)
    return metric


def federated_metrics(
    metrics: Mapping[str, Mapping[str, float]], pairs: Mapping[str, int], privacy: Privacy
) -> dict[str, FederatedMetric]:
    """Every metric over clients. Clients with too few pairs count in the mean only.

    If these small clients together have fewer pairs than one client needs, the mean leaves them out too.
    Otherwise the mean and the other clients' values would reveal the sum over them.

    Args:
        metrics: client → metric → value, from :func:`prefed.train.metrics.client_metrics`.
        pairs: client → number of pairs that its metrics are taken over.
        privacy: gives the least number of pairs for a value of one client.

    Raises:
        ValueError: no client has so many.
    """
    small = [client for client in metrics if not privacy.may_report(pairs[client])]
    if metrics and len(small) == len(metrics):
        raise ValueError(
            f"[privacy] minimum_pairs = {privacy.minimum_pairs}: no client is judged on so many pairs "
            f"(the most are {max(pairs[client] for client in metrics)}), and no client's figures can be told"
        )
    include_small = privacy.may_report(sum(pairs[client] for client in small))
    names = [name for name in next(iter(metrics.values()), {}) if name != "not_finite"]
    return {
        name: federated_metric(
            {client: own[name] for client, own in metrics.items()},
            loss=name in LOWER_IS_BETTER,
            small=small,
            include_small=include_small,
        )
        for name in names
    }


def not_finite_counts(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    """Client → its number of pairs without a finite log-probability, for clients that have any.

    ``metrics`` is client → metric → value, from :func:`prefed.train.metrics.client_metrics`.
    """
    return {client: int(own["not_finite"]) for client, own in metrics.items() if "not_finite" in own}


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
