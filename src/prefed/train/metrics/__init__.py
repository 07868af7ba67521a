"""Metrics of models on preference pairs, per client and over clients."""

from prefed.train.metrics.choices import (
    ChoiceScores,
    choice_metrics,
    jury_metrics,
    majority,
    selector_metrics,
)
from prefed.train.metrics.clients import (
    FederatedMetric,
    Spread,
    federated_metric,
    federated_metrics,
    not_finite_counts,
    spread,
)
from prefed.train.metrics.messages import (
    COLLAPSE_REMEDY,
    collapse_warning,
    divergence_warning,
    flat_loss_warning,
    small_clients_note,
)
from prefed.train.metrics.pairs import (
    ACCURACY_METRICS,
    CHOICE_METRICS,
    MEAN_METRICS,
    POLICY_METRICS,
    REWARD_METRICS,
    PairScores,
    client_metrics,
)
from prefed.train.metrics.precision import mean_interval, seed_interval

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
