"""Metrics of models on preference pairs and thumbs, per client and over clients."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.core.records import FederatedMetric
    from prefed.train.feedback.choices import ChoiceScores, jury_metrics, majority, selector_metrics
    from prefed.train.feedback.pairs import PairScores
    from prefed.train.feedback.thumbs import ThumbScores
    from prefed.train.metrics.clients import (
        Spread,
        federated_metric,
        federated_metrics,
        not_finite_counts,
        spread,
    )
    from prefed.train.metrics.intervals import error_of_mean, mean_interval, seed_interval
    from prefed.train.metrics.run_warnings import TEXT_REMEDY, falls
    from prefed.train.metrics.table import (
        ACCURACY_METRICS,
        COMPARED_METRICS,
        LEADING_METRICS,
        MEAN_METRICS,
        REWARD_SHARES,
        SHIFT_ERROR,
        SHIFT_METRICS,
        TABLE,
        TEXT_METRICS,
        Metric,
        find_metrics,
        lower_is_better,
        words_of,
    )
    from prefed.train.metrics.text import (
        WrittenAnswer,
        broken_text,
        health_line,
        health_sentence,
        last_health,
        text_health,
        text_warning,
    )

__all__ = [
    "ACCURACY_METRICS",
    "COMPARED_METRICS",
    "LEADING_METRICS",
    "MEAN_METRICS",
    "REWARD_SHARES",
    "SHIFT_ERROR",
    "SHIFT_METRICS",
    "TABLE",
    "TEXT_METRICS",
    "TEXT_REMEDY",
    "ChoiceScores",
    "FederatedMetric",
    "Metric",
    "PairScores",
    "Spread",
    "ThumbScores",
    "WrittenAnswer",
    "broken_text",
    "error_of_mean",
    "falls",
    "federated_metric",
    "federated_metrics",
    "find_metrics",
    "health_line",
    "health_sentence",
    "jury_metrics",
    "last_health",
    "lower_is_better",
    "majority",
    "mean_interval",
    "not_finite_counts",
    "seed_interval",
    "selector_metrics",
    "spread",
    "text_health",
    "text_warning",
    "words_of",
]

attach(__name__, __file__)
