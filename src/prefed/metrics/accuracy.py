"""How well log-probabilities order pairs, per client and over clients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NotRequired, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from prefed.core import Privacy

__all__ = [
    "LOSSES",
    "MEANS",
    "SHARES",
    "Accuracy",
    "PairScores",
    "all_over_clients",
    "diverged",
    "measure",
    "not_finite",
    "over_clients",
    "unlisted",
    "unmoved",
]

SHARES = (
    "preference_accuracy",
    "reward_accuracy",
    "baseline_accuracy",
    "normalized_accuracy",
    "combined_accuracy",
    "explicit_accuracy",
    "agreement",
    "shared_accuracy",
)
"""A client's figures that are shares of its pairs; a run keeps every client's, see :class:`Accuracy`."""
MEANS = ("margin", "explicit_margin", "dpo_loss")
"""A client's figures that are no shares; a run keeps their means over clients."""
LOSSES = frozenset({"dpo_loss"})
"""The figures of which less is better: a client's is bad where it is high."""


class PairScores(Protocol):
    """Summed completion log-probabilities of n pairs, in nats; chosen in column 0, rejected in 1."""

    @property
    def policy(self) -> npt.NDArray[np.float32]:
        """``[n, 2]`` under the tensors that were scored."""

    @property
    def reference(self) -> npt.NDArray[np.float32]:
        """``[n, 2]`` under the untouched model."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """``[n, 2]`` completion tokens, end-of-text included."""

    @property
    def rewards(self) -> npt.NDArray[np.float32] | None:
        """``[n, 2]`` scores of an explicit reward head; ``None`` where the model has none."""


class Accuracy(TypedDict):
    """A figure over clients.

    ``worst`` is the worst client's: the lowest, of a loss the highest. ``worst_decile`` is the mean of the
    worst tenth of the clients (at least one of them), ``per_client`` every client's.

    Clients with fewer pairs than ``[privacy] minimum_pairs`` are in none of these three. ``mean_alone`` says
    how many of them the mean counts; ``left_out`` how many it does not count either, which is so where all of
    them together have too few pairs. Neither is there where no client has too few.
    """

    mean: float
    worst: float
    worst_decile: float
    per_client: dict[str, float]
    mean_alone: NotRequired[int]
    left_out: NotRequired[int]


def measure(scores: PairScores, beta: float, weight: float = 1.0) -> dict[str, float]:
    """One client's figures.

    Args:
        scores: of n ≥ 1 pairs.
        beta: of the DPO loss.
        weight: what the explicit margin Δ_er = r_w − r_l of a reward head counts beside the implicit one:
            w_r s of the PDPO loss (FedPDPO, arXiv:2603.19741, eqs. 4 to 8).

    Returns:
        ``preference_accuracy``: share of pairs with log π_θ(y_w|x) > log π_θ(y_l|x); ``reward_accuracy``:
        with Δ_ir > 0; ``baseline_accuracy``: with log π_ref(y_w|x) > log π_ref(y_l|x);
        ``normalized_accuracy``: as the first, per token; ``margin``: mean Δ_ir in nats; ``dpo_loss``: mean
        −log σ(β Δ_ir). Where there is a reward head also ``combined_accuracy``: with
        Δ_ir + weight · Δ_er > 0; ``explicit_accuracy``: with Δ_er > 0; ``agreement``: with both margins
        above 0 or both below; ``explicit_margin``: mean Δ_er. A tie counts as wrong, and so does a pair
        with a log-probability under π_θ that is not finite: where there are any, ``not_finite`` says how
        many.

    Raises:
        ValueError: there are no pairs.
    """
    if len(scores.policy) == 0:
        raise ValueError("no pairs to measure")
    policy, reference = scores.policy.astype(np.float64), scores.reference.astype(np.float64)
    per_token = policy / scores.lengths
    with np.errstate(invalid="ignore"):
        gain = policy - reference
        margin = gain[:, 0] - gain[:, 1]
        losses = np.logaddexp(0.0, -beta * margin)
    figures: dict[str, npt.NDArray[np.float64 | np.bool_]] = {
        "preference_accuracy": policy[:, 0] > policy[:, 1],
        "reward_accuracy": margin > 0,
        "baseline_accuracy": reference[:, 0] > reference[:, 1],
        "normalized_accuracy": per_token[:, 0] > per_token[:, 1],
        "margin": margin,
        "dpo_loss": losses,
    }
    if scores.rewards is not None:
        rewards = scores.rewards.astype(np.float64)
        explicit = rewards[:, 0] - rewards[:, 1]
        figures |= {
            "combined_accuracy": margin + weight * explicit > 0,
            "explicit_accuracy": explicit > 0,
            "agreement": margin * explicit > 0,
            "explicit_margin": explicit,
        }
    means = {name: float(values.mean()) for name, values in figures.items()}
    broken = float((~np.isfinite(policy).all(1)).sum())
    return means | ({"not_finite": broken} if broken else {})


def not_finite(figures: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    """Client → its pairs without a finite log-probability, of what :func:`measure` gave, where it has any."""
    return {
        client: int(figures[client]["not_finite"]) for client in figures if "not_finite" in figures[client]
    }


def diverged(broken: Mapping[str, int], pairs: Mapping[str, int]) -> str:
    """What to say of models that :func:`not_finite` found; ``pairs``: client → pairs it was judged on.

    >>> diverged({"b": 3, "a": 12}, {"a": 12, "b": 4})
    "12 of 12 pairs of client 'a' have no finite log-probability, and so it is with 1 more; lower method.lr"
    """
    first = min(broken)
    more = f", and so it is with {len(broken) - 1:,} more" if broken.keys() - {first} else ""
    start = f"{broken[first]} of {pairs[first]} pairs of client {first!r}"
    return f"{start} have no finite log-probability{more}; lower method.lr"


def unmoved(losses: Sequence[float | None]) -> str:
    """What to say of a run whose training loss is in all rounds within a thousandth of the first round's.

    Args:
        losses: the rounds' mean training losses, in order; ``None`` where a round merged nothing.

    Returns:
        The text; empty if the loss moved, and of fewer than three rounds, which are too few to tell.

    >>> unmoved([0.6931, 0.6930, 0.6931])[:76]
    'the training loss hardly moved, from 0.6931 in the first round to 0.6931 in '
    >>> unmoved([0.6931, 0.6901, 0.6931]), unmoved([0.6931, 0.6931])
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


def over_clients(
    values: Mapping[str, float],
    *,
    loss: bool = False,
    small: Collection[str] = (),
    counted: bool = True,
) -> Accuracy:
    """Mean, worst, worst decile and each client's value.

    Args:
        values: client → value.
        loss: less is better.
        small: clients of ``values`` that are not listed.
        counted: they count in the mean, which is all that they count in.

    Raises:
        ValueError: there is no client, or none that may be listed.

    >>> figure = over_clients({"a": 0.5, "b": 1.0, "c": 0.75})
    >>> figure["mean"], figure["worst"], figure["worst_decile"]
    (0.75, 0.5, 0.5)
    """
    listed = {client: values[client] for client in sorted(values) if client not in small}
    if not listed:
        raise ValueError("no client to average over")
    mean = list(values.values()) if counted else list(listed.values())
    ordered = sorted(listed.values(), reverse=loss)
    worst = ordered[: math.ceil(len(ordered) / 10)]
    figure: Accuracy = {
        "mean": math.fsum(mean) / len(mean),
        "worst": ordered[0],
        "worst_decile": math.fsum(worst) / len(worst),
        "per_client": listed,
    }
    if small:
        figure["mean_alone" if counted else "left_out"] = len(small)
    return figure


def all_over_clients(
    found: Mapping[str, Mapping[str, float]], pairs: Mapping[str, int], privacy: Privacy
) -> dict[str, Accuracy]:
    """Every figure over clients, with those that are too small for a figure of their own in the mean alone.

    Where the small clients together have fewer than the pairs that one client needs, the mean leaves them
    out too: it and the listed clients' values would give their sum.

    Args:
        found: client → figure → value, as :func:`measure` gives it.
        pairs: client → pairs that its figures are over.
        privacy: how many pairs it takes for a figure of one client.

    Raises:
        ValueError: no client has so many.
    """
    small = [client for client in found if not privacy.tells(pairs[client])]
    if found and len(small) == len(found):
        raise ValueError(
            f"[privacy] minimum_pairs = {privacy.minimum_pairs}: no client is judged on so many pairs "
            f"(the most are {max(pairs[client] for client in found)}), and no client's figures can be told"
        )
    counted = privacy.tells(sum(pairs[client] for client in small))
    names = [name for name in next(iter(found.values()), {}) if name != "not_finite"]
    return {
        name: over_clients(
            {client: own[name] for client, own in found.items()},
            loss=name in LOSSES,
            small=small,
            counted=counted,
        )
        for name in names
    }


def unlisted(figure: Accuracy) -> str:
    """What to say of the clients that a figure does not list; empty if it lists all.

    >>> unlisted({"mean": 1, "worst": 1, "worst_decile": 1, "per_client": {"a": 1}, "mean_alone": 2})
    '2 clients have fewer pairs than [privacy] minimum_pairs: they count in means alone'
    """
    for key, how in (("mean_alone", "count in means alone"), ("left_out", "are left out")):
        count = figure.get(key)
        if isinstance(count, int):
            who = "1 client has" if count == 1 else f"{count:,} clients have"
            they = "it is left out" if (count, key) == (1, "left_out") else f"they {how}"
            return f"{who} fewer pairs than [privacy] minimum_pairs: {they}"
    return ""
