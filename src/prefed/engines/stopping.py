"""Early stopping: selects the best round by a metric on validation pairs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from prefed.core.strict_settings import StrictModel
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


class StopConfig(StrictModel):
    """Selection of the best round, and early stopping, both on clients' validation pairs."""

    patience: int | None = Field(
        None,
        ge=1,
        description="stop after this many evaluations without improvement; default: run to the last "
        "round, and keep the best",
    )
    metric: Literal[
        "preference_accuracy", "reward_accuracy", "combined_accuracy", "majority_accuracy", "loss"
    ] = Field(
        "preference_accuracy",
        description="the metric to select by: an accuracy (higher is better) or the loss (lower is better)",
    )
    over: Literal["mean", "worst"] = Field("mean", description="the mean over clients, or the worst client")
    delta: float = Field(0.0, ge=0, description="minimum improvement over the best round")

    def measured(self, metrics: Collection[str]) -> str:
        """The name of the metric: of ``"loss"``, that of the loss in an evaluation."""
        losses = (name for name in ("dpo_loss", "choice_loss") if name in metrics)
        return next(losses) if self.metric == "loss" else self.metric

    def judge(
        self,
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
        ...     best = vars(rule.judge(best, number, {"preference_accuracy": {"mean": share}}))
        >>> best["round"], best["since"], best["stopped"]
        (2, 2, True)
        """
        old = Standing(0, None, 0, None) if before is None else Standing(**before)
        metric = self.measured(metrics)
        value = metrics[metric][self.over]
        if not math.isfinite(value):
            return self._no_better(old, number, None)
        sign = -1 if lower_is_better(metric) else 1
        if healthy and (old.value is None or sign * (value - old.value) > self.delta):
            return Standing(number, value, number, value)
        return self._no_better(old, number, value)

    def _no_better(self, old: Standing, number: int, value: float | None) -> Standing:
        since = old.since + 1
        stopped = self.patience is not None and since >= self.patience
        return Standing(old.round, old.value, number, value, since, stopped)
