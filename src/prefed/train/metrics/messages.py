"""Sentences about metrics: a diverged model, a flat training loss, clients that are not listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefed.train.metrics.clients import FederatedMetric

COLLAPSE_REMEDY = (
    "if clients want different things, try fewer method.local_steps, a lower method.beta, a higher "
    'method.lr, model.variational.pool = "mean" and more rounds'
)
"""What helps latent tastes that collapse: a client's own steps learn its taste without z."""
ACTIVE_AT_LEAST = 2
"""With fewer active units halfway through a run, a latent taste probably carries no information yet."""
FIRST_ROUNDS = 5
"""Until this round no unit need be active, however few rounds a run has."""


def divergence_warning(broken: Mapping[str, int], pairs: Mapping[str, int]) -> str:
    """The warning about models with log-probabilities that are not finite.

    Args:
        broken: from :func:`prefed.train.metrics.not_finite_counts`; at least one client.
        pairs: client → number of pairs that it was judged on.

    >>> divergence_warning({"b": 3, "a": 12}, {"a": 12, "b": 4})
    "12 of 12 pairs of client 'a' have no finite log-probability, as have 1 more; lower method.lr"
    """
    first = min(broken)
    more = f", as have {len(broken) - 1:,} more" if broken.keys() - {first} else ""
    start = f"{broken[first]} of {pairs[first]} pairs of client {first!r}"
    return f"{start} have no finite log-probability{more}; lower method.lr"


def flat_loss_warning(losses: Sequence[float | None]) -> str:
    """The warning about a run whose training loss stays within a thousandth of the first round's.

    Args:
        losses: mean training losses of the rounds, in order; ``None`` for a round that merged nothing.

    Returns:
        The text. It is empty if the loss moved, or if there are fewer than three rounds.

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
        "last: method.lr may be too low for the optimiser (plain SGD takes rates far above AdamW's), or what "
        "clients learn cancels out in the shared model"
    )


def collapse_warning(record: Mapping[str, Any], rounds: int) -> str:
    """The warning, halfway through a run, about latent tastes that have not separated.

    Until they separate no unit is active. That may take a third of a run that ends well.
    Whether they have collapsed is in ``tastes.json``, after the last round.

    Args:
        record: a round's record. Methods with a latent taste have ``active_units`` in it.
        rounds: of the run.

    Returns:
        The text. It is empty in any other round, so a run warns once; and where enough units are active.

    >>> collapse_warning({"round": 10, "active_units": 0}, 20)[:79]
    'the latent tastes have not separated: 0 units are active, so z probably carries'
    >>> [collapse_warning({"round": at, "active_units": 0}, 20) for at in (9, 11)]
    ['', '']
    """
    half, active = max(FIRST_ROUNDS, rounds // 2), record.get("active_units")
    if record["round"] != half or active is None or active >= ACTIVE_AT_LEAST:
        return ""
    units = "1 unit is" if active == 1 else f"{active} units are"
    says = f"{units} active, so z probably carries no information yet"
    return f"the latent tastes have not separated: {says}; {COLLAPSE_REMEDY}"


def small_clients_note(metric: FederatedMetric) -> str:
    """The note about clients that ``metric`` does not list; empty if it lists all.

    >>> metric = {"mean": 1, "worst": 1, "worst_decile": 1, "per_client": {"a": 1}, "mean_alone": 2}
    >>> small_clients_note(metric)
    '2 clients have fewer pairs than [privacy] minimum_pairs: they count in means alone'
    """
    for key, how in (("mean_alone", "count in means alone"), ("left_out", "are left out")):
        count = metric.get(key)
        if isinstance(count, int):
            who = "1 client has" if count == 1 else f"{count:,} clients have"
            they = "it is left out" if (count, key) == (1, "left_out") else f"they {how}"
            return f"{who} fewer pairs than [privacy] minimum_pairs: {they}"
    return ""
