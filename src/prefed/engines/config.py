"""The tables ``[cohort]``, ``[evaluate]``, ``[stop]`` and ``[fleet]``: who takes part in a round, how
models are evaluated, and when a run ends.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field, field_validator, model_validator

from prefed.core.strict_settings import StrictModel

DIAGNOSE = "diagnose"
"""Name of the exchange of ``[evaluate] diagnose``."""


class CohortConfig(StrictModel):
    """Number and sampling of the clients that take part in a round.

    >>> CohortConfig(fraction=0.1).of(53), CohortConfig().of(53)
    (5, None)
    """

    size: int | None = Field(None, ge=1, description="clients per round; default without fraction: all")
    fraction: float | None = Field(None, gt=0, le=1, description="share of the clients, instead of size")
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed",
        description="fixed: exactly size clients, sampled without replacement; poisson: each client "
        "independently, all with the same probability, so that size is the expected number",
    )
    offences: int | None = Field(
        None,
        ge=1,
        description="invalid uploads after which the server excludes a client; default: no limit",
    )

    @model_validator(mode="after")
    def _one(self) -> CohortConfig:
        if self.size is not None and self.fraction is not None:
            raise ValueError("give size or fraction, not both")
        if self.sampling == "poisson" and self.size is None and self.fraction is None:
            raise ValueError("sampling = 'poisson' requires size or fraction: set one of them")
        return self

    def of(self, clients: int) -> int | None:
        """Clients per round out of ``clients`` in total; at least one, ``None`` for all."""
        return self.size if self.fraction is None else max(1, round(self.fraction * clients))


class EvaluateConfig(StrictModel):
    """Evaluation of the clients' models on their own pairs."""

    every: int = Field(1, ge=0, description="rounds between evaluations; 0: only after the last round")
    split: Literal["test", "validation"] = Field(
        "test", description="the pairs that clients are evaluated on"
    )
    clients: int | None = Field(
        None, ge=1, description="maximum number of clients to evaluate, the same ones each time; default: all"
    )
    beta: float | None = Field(
        None, gt=0, description="beta of the reported DPO loss; default: the method's, else 0.1"
    )
    text: int | None = Field(
        None,
        ge=0,
        description="held-out prompts that the base model, the shared one and clients' own answer at every "
        "evaluation, to measure the health of their text; default: with a chat model 10, and only after the "
        "last round (with [stop]: at every evaluation), else 0",
    )
    diagnose: int | None = Field(
        None,
        ge=1,
        description="rounds between diagnostics: the global objective's loss and gradient, how "
        "much clients' gradients differ, their variance; default: none",
    )
    diagnostic_pairs: int | None = Field(
        None, ge=2, description="training pairs per client for diagnostics; default: all"
    )
    metrics: list[str] = Field(
        [], description="additional metrics, from outside prefed; see the page on adding a method"
    )
    unseen: int | list[str] = Field(
        0, description="clients that never train, by number or by id; evaluated separately, as newcomers"
    )
    unseen_steps: list[int] = Field(
        [0],
        description="numbers of local steps of a newcomer on its own pairs before its evaluation; one "
        "metric each, of methods that train newcomers; 0 for all methods",
    )
    unseen_pairs: list[int] = Field(
        [],
        description="for methods that adapt to a newcomer from a few pairs: numbers of pairs to infer its "
        "taste from (fedvpl, fedvpa) or to fit its weights to (lore, pal); one metric each",
    )

    @field_validator("metrics")
    @classmethod
    def _found(cls, value: list[str]) -> list[str]:
        if value:
            from prefed.train.metrics import find_metrics

            find_metrics(value)
        return value

    def due(self, number: int, rounds: int) -> bool:
        """Return whether round ``number`` of ``rounds`` ends with an evaluation."""
        return number == rounds or (self.every > 0 and number % self.every == 0)

    @model_validator(mode="after")
    def _newcomers(self) -> EvaluateConfig:
        if isinstance(self.unseen, int) and self.unseen < 0:
            raise ValueError("unseen must be a number of clients, 0 or more, or a list of their ids")
        if not self.unseen_steps or min(self.unseen_steps) < 0:
            raise ValueError("unseen_steps must list numbers of local steps, 0 or more")
        if any(pairs < 1 for pairs in self.unseen_pairs):
            raise ValueError("unseen_pairs must list numbers of pairs, 1 or more")
        return self


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


class FleetConfig(StrictModel):
    """``[fleet]``: a simulated fleet. By default all clients are equally fast, always online and never late.

    Raises:
        ValueError: two keys cannot be combined.
    """

    server: Literal["synchronous", "buffered"] = Field(
        "synchronous",
        description="synchronous: wait for the whole cohort; buffered: keep one cohort of clients busy, and "
        "merge when enough replies have arrived",
    )
    max_delay: int = Field(
        0,
        ge=0,
        description="synchronous: maximum age in rounds of the model that a client starts from, drawn for "
        "each client and round",
    )
    buffer: int | None = Field(
        None, ge=1, description="buffered: number of replies per merge; default: the size of a cohort"
    )
    seconds: float = Field(1.0, gt=0, description="mean duration of a visit in seconds")
    speeds: Literal["equal", "uniform", "lognormal", "exponential"] = Field(
        "equal", description="distribution of clients' mean durations around `seconds`"
    )
    spread: float | None = Field(
        None,
        gt=0,
        description="uniform: half width relative to the mean; lognormal: sigma",
    )
    jitter: float = Field(
        0.0, ge=0, description="sigma of a lognormal factor with mean 1 on the duration of each visit"
    )
    network: float = Field(0.0, ge=0, description="seconds for the messages of a visit, in both directions")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that a visit ends without a reply, at a random time"
    )
    online: float | None = Field(
        None, gt=0, description="mean seconds that a client stays online; default: always online"
    )
    offline: float | None = Field(None, gt=0, description="mean seconds that a client stays offline")
    trace: str | None = Field(
        None,
        description="a CSV or JSON lines file with the times when each client is online, and its speed",
    )
    period: float | None = Field(None, gt=0, description="seconds after which the trace repeats")

    @model_validator(mode="after")
    def _coherent(self) -> FleetConfig:
        if self.server == "buffered" and self.max_delay:
            raise ValueError("max_delay is only for server = 'synchronous': remove it")
        if self.server == "synchronous" and self.buffer is not None:
            raise ValueError("buffer is only for server = 'buffered': remove it, or set server")
        if (self.speeds in ("uniform", "lognormal")) != (self.spread is not None):
            raise ValueError("spread is required for speeds 'uniform' and 'lognormal', and only for these")
        if self.speeds == "uniform" and self.spread is not None and self.spread >= 1:
            raise ValueError("spread of uniform speeds must be below 1")
        if (self.online is None) != (self.offline is None):
            raise ValueError("online and offline must be set together: add the other, or remove both")
        if self.trace is not None and self.online is not None:
            raise ValueError("the trace defines when clients are online: remove online and offline")
        if self.period is not None and self.trace is None:
            raise ValueError("period is only for a trace: set trace, or remove period")
        return self
