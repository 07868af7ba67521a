"""Warnings and notes about a run, from its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefed.core.text import pluralize
from prefed.train.metrics.intervals import Z
from prefed.train.metrics.table import SHIFT_ERROR

if TYPE_CHECKING:
    from prefed.core.records import FederatedMetric

COLLAPSE_REMEDY = (
    "if clients want different things, try fewer method.local_steps, a lower method.beta, a higher "
    'method.lr, model.variational.pool = "mean" and more rounds'
)
"""Advice for collapsed latent tastes: local steps let clients learn their taste without z."""
TEXT_REMEDY = (
    'try method.objective = "rpo" or a larger method.objective_settings.alpha, a lower method.lr or fewer '
    "rounds"
)
"""Advice for broken text."""
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
    learned = (record.get("preference_accuracy") or 0.0) >= SHARED_FROM
    if record["round"] != half or active is None or active >= ACTIVE_AT_LEAST or learned:
        return ""
    units = "1 unit is" if active == 1 else f"{active} units are"
    says = f"{units} active, so z probably carries no information yet"
    return f"the latent tastes have not separated: {says}; {COLLAPSE_REMEDY}"


def small_clients_note(metric: FederatedMetric) -> str:
    """Return the note about clients that ``metric`` does not list, or ``""``.

    >>> metric = {"mean": 1, "worst": 1, "worst_decile": 1, "per_client": {"a": 1}, "mean_alone": 2}
    >>> small_clients_note(metric)
    '2 clients have fewer pairs than [privacy] minimum_pairs: counted in means only'
    >>> small_clients_note({"mean": 0.5, "per_client": {}, "mean_alone": 200, "noise": 0.0123})
    'means over 200 clients, with noise of standard deviation 0.012; each site has its own clients in its log'
    """
    if "noise" in metric:
        who = pluralize(metric["mean_alone"], "client", "clients")
        return (
            f"means over {who}, with noise of standard deviation {metric['noise']:.2g}; each site has its "
            "own clients in its log"
        )
    for key, treatment in (("mean_alone", "counted in means only"), ("left_out", "left out")):
        count = metric.get(key)
        if isinstance(count, int):
            who = pluralize(count, "client has", "clients have")
            return f"{who} fewer pairs than [privacy] minimum_pairs: {treatment}"
    return ""
