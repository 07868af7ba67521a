"""Metrics over clients: each client's value, mean, worst and spread."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prefed.core import Privacy
from prefed.train.metrics.table import lower_is_better

if TYPE_CHECKING:
    from prefed.core.records import FederatedMetric


def federated_metric(
    values: Mapping[str, float],
    *,
    loss: bool = False,
    small: Collection[str] = (),
    include_small: bool = True,
) -> FederatedMetric:
    """Return mean, worst, worst decile and each client's value.

    Args:
        loss: the highest value is the worst.
        small: clients that must not be listed individually.
        include_small: include the small clients in the mean.

    Raises:
        ValueError: there are no clients, or all are small.

    >>> metric = federated_metric({"a": 0.5, "b": 1.0, "c": 0.75})
    >>> metric["mean"], metric["worst"], metric["worst_decile"]
    (0.75, 0.5, 0.5)
    """
    listed = {client: values[client] for client in sorted(values) if client not in small}
    if not listed:
        raise ValueError("there are no clients to average over")
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
    """Return every metric over clients. Clients with too few pairs count in the mean only.

    If these small clients together have fewer pairs than required for one client, the mean excludes them too.
    Otherwise the mean and the listed values would reveal their sum.

    Args:
        metrics: client → metric → value, from :meth:`prefed.train.feedback.kind.Scores.metrics`.
        pairs: client → number of pairs behind its metrics.
        privacy: minimum number of pairs for a client's value.

    Raises:
        ValueError: no client has enough pairs.
    """
    small = [client for client in metrics if not privacy.may_report(pairs[client])]
    if metrics and len(small) == len(metrics):
        raise ValueError(
            f"[privacy] minimum_pairs = {privacy.minimum_pairs}: no client has that many evaluation pairs "
            f"(the most are {max(pairs[client] for client in metrics)}), so no metric can be reported"
        )
    include_small = privacy.may_report(sum(pairs[client] for client in small))
    names = dict.fromkeys(name for own in metrics.values() for name in own if name != "not_finite")
    # Some metrics of thumbs are not defined for every client.
    by_name = {name: {client: own[name] for client, own in metrics.items() if name in own} for name in names}
    return {
        name: federated_metric(
            values,
            loss=lower_is_better(name),
            small=[client for client in small if client in values],
            include_small=include_small,
        )
        for name, values in by_name.items()
        if not values.keys() <= set(small)
    }


def not_finite_counts(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    """Return client → number of pairs without a finite log-probability, for clients that have any.

    ``metrics`` is client → metric → value, from :meth:`prefed.train.feedback.kind.Scores.metrics`.
    """
    return {client: int(own["not_finite"]) for client, own in metrics.items() if "not_finite" in own}


@dataclass(frozen=True)
class Spread:
    """Statistics of a metric over n equally weighted clients; the lowest value is the worst.

    Attributes:
        mean: over clients, including those that are not listed individually.
        worst: lowest value.
        worst_decile: mean of the lowest tenth of the clients, at least one of them.
        best: highest value.
        std: standard deviation, √(Σ(x − mean)²/n).
        jain: Jain's index (Σx)² / (n Σx²) (Jain, Chiu and Hawe 1984): 1/n if one client has everything, 1 if
            all have the same, also if all have 0.
    """

    mean: float
    worst: float
    worst_decile: float
    best: float
    std: float
    jain: float


def spread(metric: FederatedMetric) -> Spread:
    """Return the statistics of one metric; those that need single clients are NaN without any.

    >>> even = spread(federated_metric({"a": 0.5, "b": 0.5}))
    >>> even.std, even.jain
    (0.0, 1.0)
    >>> spread(federated_metric({"a": 1.0, "b": 0.0})).jain
    0.5
    """
    values = np.array(list(metric["per_client"].values()), dtype=np.float64)
    if not len(values):
        return Spread(metric["mean"], *5 * (math.nan,))
    square = float((values**2).sum())
    return Spread(
        mean=metric["mean"],
        worst=metric["worst"],
        worst_decile=metric["worst_decile"],
        best=float(values.max()),
        std=float(values.std()),
        jain=float(values.sum() ** 2 / (len(values) * square)) if square else 1.0,
    )
