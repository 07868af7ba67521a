"""Metrics of models on preference pairs, per client and over clients."""

from prefed.core.records import FederatedMetric
from prefed.train.metrics.clients import (
    COLLAPSE_REMEDY,
    Spread,
    collapse_warning,
    divergence_warning,
    federated_metric,
    federated_metrics,
    flat_loss_warning,
    not_finite_counts,
    small_clients_note,
    spread,
)
from prefed.train.metrics.intervals import mean_interval, seed_interval
from prefed.train.metrics.pairs import (
    ACCURACY_METRICS,
    CHOICE_METRICS,
    MEAN_METRICS,
    POLICY_METRICS,
    REWARD_METRICS,
    ChoiceScores,
    PairScores,
    choice_metrics,
    client_metrics,
    jury_metrics,
    majority,
    selector_metrics,
)

__all__ = [
    "ACCURACY_METRICS",
    "CHOICE_METRICS",
    "COLLAPSE_REMEDY",
    "MEAN_METRICS",
    "POLICY_METRICS",
    "REWARD_METRICS",
    "ChoiceScores",
    "FederatedMetric",
    "PairScores",
    "Spread",
    "choice_metrics",
    "client_metrics",
    "collapse_warning",
    "divergence_warning",
    "federated_metric",
    "federated_metrics",
    "flat_loss_warning",
    "jury_metrics",
    "majority",
    "mean_interval",
    "not_finite_counts",
    "seed_interval",
    "selector_metrics",
    "small_clients_note",
    "spread",
]
