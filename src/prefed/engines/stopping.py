"""Which round of a run is the best so far, and when the run stops: by one figure on validation pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prefed.train.metrics import FederatedMetric
from prefed.train.metrics.pairs import LOWER_IS_BETTER


@dataclass(frozen=True)
class Standing:
    """Early-stopping state after the last evaluation on validation pairs.

    Attributes:
        round: the best round so far; 0 before the first with a finite figure.
        value: its figure; ``None`` before there is one.
        last_round: the round of the last evaluation.
        last: its figure; ``None`` if that is not finite.
        since: evaluations since the best.
        stopped: whether the run ends here.
    """

    round: int
    value: float | None
    last_round: int
    last: float | None
    since: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class Stopping:
    """How rounds are judged.

    Attributes:
        metric: the name of a figure of an evaluation.
        over: the mean over clients, or the worst client's.
        patience: evaluations in a row without a better one, after which the run stops; ``None`` for any
            number.
        delta: how much better than the best a figure must be to count as better.
    """

    metric: str
    over: Literal["mean", "worst"] = "mean"
    patience: int | None = None
    delta: float = 0.0

    def judge(
        self, before: Mapping[str, Any] | None, number: int, metrics: Mapping[str, FederatedMetric]
    ) -> Standing:
        """Early-stopping state after round ``number``.

        Args:
            before: the fields of how it stood after the evaluation before; ``None`` if this is the first.
            metrics: metrics over clients on validation pairs.

        >>> rule, best = Stopping("preference_accuracy", patience=2), None
        >>> for number, share in enumerate((0.5, 0.7, 0.6, 0.7), 1):
        ...     best = vars(rule.judge(best, number, {"preference_accuracy": {"mean": share}}))
        >>> best["round"], best["since"], best["stopped"]
        (2, 2, True)
        """
        old = Standing(0, None, 0, None) if before is None else Standing(**before)
        value = metrics[self.metric][self.over]
        if not math.isfinite(value):
            return self._no_better(old, number, None)
        sign = -1 if self.metric in LOWER_IS_BETTER else 1
        if old.value is None or sign * (value - old.value) > self.delta:
            return Standing(number, value, number, value)
        return self._no_better(old, number, value)

    def _no_better(self, old: Standing, number: int, value: float | None) -> Standing:
        since = old.since + 1
        stopped = self.patience is not None and since >= self.patience
        return Standing(old.round, old.value, number, value, since, stopped)
