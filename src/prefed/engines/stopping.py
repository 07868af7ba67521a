"""Early stopping: selects the best round by a metric on validation pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefed.engines.config import StopConfig
from prefed.train.metrics import FederatedMetric, lower_is_better


@dataclass(frozen=True)
class Standing:
    """Early-stopping state after the last evaluation on validation pairs.

    Attributes:
        round: the best round; 0 if no metric has been finite.
        value: the metric after the best round; ``None`` if there is none.
        last_round: the round of the last evaluation.
        last: the metric after it; ``None`` if not finite.
        since: number of evaluations since the best round.
        stopped: whether the run ends here.
    """

    round: int
    value: float | None
    last_round: int
    last: float | None
    since: int = 0
    stopped: bool = False


def judge(
    stop: StopConfig,
    before: Mapping[str, Any] | None,
    number: int,
    metrics: Mapping[str, FederatedMetric],
    *,
    healthy: bool = True,
) -> Standing:
    """The early-stopping state after round ``number``.

    Args:
        before: fields of the previous :class:`Standing`; ``None`` at the first evaluation.
        metrics: metrics over clients on validation pairs.
        healthy: whether text is no worse than the base model's. A round of which it is worse is not the
            best one.

    >>> rule, best = StopConfig(patience=2), None
    >>> for number, share in enumerate((0.5, 0.7, 0.6, 0.7), 1):
    ...     best = vars(judge(rule, best, number, {"preference_accuracy": {"mean": share}}))
    >>> best["round"], best["since"], best["stopped"]
    (2, 2, True)
    """
    old = Standing(0, None, 0, None) if before is None else Standing(**before)
    metric = stop.measured(metrics)
    value = metrics[metric][stop.over]
    if not math.isfinite(value):
        return _no_better(stop, old, number, None)
    sign = -1 if lower_is_better(metric) else 1
    if healthy and (old.value is None or sign * (value - old.value) > stop.delta):
        return Standing(number, value, number, value)
    return _no_better(stop, old, number, value)


def _no_better(stop: StopConfig, old: Standing, number: int, value: float | None) -> Standing:
    since = old.since + 1
    stopped = stop.patience is not None and since >= stop.patience
    return Standing(old.round, old.value, number, value, since, stopped)
