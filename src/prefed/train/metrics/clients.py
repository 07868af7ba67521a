"""Metrics over clients (each client's value, mean, worst and spread), and warnings based on them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefed.core import Privacy
from prefed.core.records import FederatedMetric
from prefed.core.text import pluralize
from prefed.train.metrics.intervals import Z
from prefed.train.metrics.table import SHIFT_ERROR, lower_is_better
from prefed.train.metrics.text import TEXT_REMEDY


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
    """Return the statistics of one metric.

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


COLLAPSE_REMEDY = (
    "if clients want different things, try fewer method.local_steps, a lower method.beta, a higher "
    'method.lr, model.variational.pool = "mean" and more rounds'
)
"""Advice for collapsed latent tastes: local steps let clients learn their taste without z."""
GAINS_FROM = 0.02
"""Tastes are informative if the accuracy with a client's own z exceeds that with other z by this or more."""
SHARED_FROM = 0.9
"""Preference accuracy from which one taste for all is no collapse: there is one taste, and it is learned."""
ACTIVE_AT_LEAST = 2
"""Warn if fewer units are active halfway through a run: z probably carries no information yet."""
FALL = 1.0
"""Nats by which chosen responses must become less likely for a warning; less does not break text."""
FIRST_ROUNDS = 5
"""Do not warn before this round, even in short runs."""


def divergence_warning(broken: Mapping[str, int], pairs: Mapping[str, int]) -> str:
    """Return the warning about log-probabilities that are not finite.

    Args:
        broken: from :func:`prefed.train.metrics.not_finite_counts`; at least one client.
        pairs: client → number of evaluated pairs.

    >>> divergence_warning({"b": 3, "a": 12}, {"a": 12, "b": 4})
    "12 of 12 pairs of client 'a' have no finite log-probability, as have 1 more; lower method.lr"
    """
    first = min(broken)
    more = f", as have {len(broken) - 1:,} more" if broken.keys() - {first} else ""
    start = f"{broken[first]} of {pairs[first]} pairs of client {first!r}"
    return f"{start} have no finite log-probability{more}; lower method.lr"


def error_of_mean(errors: FederatedMetric) -> float:
    """Return the standard error of a mean over clients, from each client's standard error.

    >>> error_of_mean(federated_metric({"a": 3.0, "b": 4.0}))
    2.5
    """
    each = errors["per_client"].values()
    return math.sqrt(math.fsum(error**2 for error in each)) / len(each)


def shift_warning(evaluation: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return the warning about chosen responses that have become less likely beyond noise, or ``""``.

    Args:
        evaluation: metrics of a round.
        before: metrics of the previous round, of which the warning is not repeated; may be empty.

    >>> shift_warning({"chosen_shift": -4.2, "chosen_shift_error": 0.5}, {})[:71]
    'training makes even the chosen responses less likely: their log-probabi'
    >>> shift_warning({"chosen_shift": -4.2, "chosen_shift_error": 2.5}, {})
    ''
    """
    if not falls(evaluation) or falls(before):
        return ""
    shift = evaluation["chosen_shift"]
    return (
        f"training makes even the chosen responses less likely: their log-probability is {shift:+.1f} nats "
        f"from the base model's, so the text may break; {TEXT_REMEDY}"
    )


def falls(evaluation: Mapping[str, Any]) -> bool:
    """Whether the chosen shift is below −1 nat, and its 95% interval below 0; ``False`` if not measured."""
    shift, error = evaluation.get("chosen_shift"), evaluation.get(SHIFT_ERROR)
    return shift is not None and error is not None and shift < -FALL and shift + Z * error < 0


def flat_loss_warning(losses: Sequence[float | None]) -> str:
    """Return the warning about a training loss that stays within 0.1% of the first round's, or ``""``.

    Args:
        losses: mean training loss per round, at least three; ``None`` for a round that merged nothing.

    >>> flat_loss_warning([0.6931, 0.6930, 0.6931])[:76]
    'the training loss hardly moved, from 0.6931 in the first round to 0.6931 in '
    >>> flat_loss_warning([0.6931, 0.6901, 0.6931]), flat_loss_warning([0.6931, 0.6931])
    ('', '')
    """
    known = [loss for loss in losses if loss is not None]
    if len(known) < 3 or not all(abs(loss - known[0]) <= 1e-3 * abs(known[0]) for loss in known):
        return ""
    return (
        f"the training loss hardly moved, from {known[0]:.4f} in the first round to {known[-1]:.4f} in the "
        "last: method.lr may be too low for the optimiser (SGD needs much higher rates than AdamW), or the "
        "clients' updates cancel each other out in the shared model"
    )


def collapse_warning(record: Mapping[str, Any], rounds: int) -> str:
    """Return the warning, halfway through a run, about latent tastes that have not separated, or ``""``.

    Clients with the same taste have nothing to separate: one taste for all then serves them
    (:data:`SHARED_FROM`). No unit is active until they separate, which may take a third of a successful run.
    The final result is in ``tastes.json``.

    Args:
        record: record of a round, with ``active_units`` if the method has a latent taste.
        rounds: number of rounds of the run.

    >>> collapse_warning({"round": 10, "active_units": 0}, 20)[:79]
    'the latent tastes have not separated: 0 units are active, so z probably carries'
    >>> [collapse_warning({"round": at, "active_units": 0}, 20) for at in (9, 11)]
    ['', '']
    >>> collapse_warning({"round": 10, "active_units": 0, "preference_accuracy": 0.95}, 20)
    ''
    """
    half, active = max(FIRST_ROUNDS, rounds // 2), record.get("active_units")
    if record["round"] != half or active is None or active >= ACTIVE_AT_LEAST:
        return ""
    if (record.get("preference_accuracy") or 0.0) >= SHARED_FROM:
        return ""
    units = "1 unit is" if active == 1 else f"{active} units are"
    says = f"{units} active, so z probably carries no information yet"
    return f"the latent tastes have not separated: {says}; {COLLAPSE_REMEDY}"


def small_clients_note(metric: FederatedMetric) -> str:
    """Return the note about clients that ``metric`` does not list, or ``""``.

    >>> metric = {"mean": 1, "worst": 1, "worst_decile": 1, "per_client": {"a": 1}, "mean_alone": 2}
    >>> small_clients_note(metric)
    '2 clients have fewer pairs than [privacy] minimum_pairs: counted in means only'
    """
    for key, treatment in (("mean_alone", "counted in means only"), ("left_out", "left out")):
        count = metric.get(key)
        if isinstance(count, int):
            who = pluralize(count, "client has", "clients have")
            return f"{who} fewer pairs than [privacy] minimum_pairs: {treatment}"
    return ""
