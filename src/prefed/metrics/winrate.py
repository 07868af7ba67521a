"""Win rates: how often a judge finds one model's texts better than another's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefed.core import Key
from prefed.metrics.precision import CONFIDENCE

RESAMPLES = 10_000
"""From so many resamples the interval of a win rate is taken."""

LENGTH_NOTE = (
    "length_controlled: a logistic fit on tanh(length difference / its standard deviation), read at equal "
    "lengths; AlpacaEval's term for the difficulty of each prompt is left out"
)


class NothingJudgedError(ValueError):
    """There is no verdict to take a rate over."""


@dataclass(frozen=True)
class WinRate:
    """A win rate over prompts.

    Attributes:
        mean: (wins + ties / 2) / judged.
        low: lower end of the bootstrap interval of ``mean``.
        high: its upper end.
        wins: wins / judged: a tie counts as no win (the figure of FedBiscuit, Wu et al. 2025, table 1).
        ties: number of ties.
        judged: number of prompts with a verdict.
        failed: number of prompts without a usable one; they are in none of the rates.
    """

    mean: float
    low: float
    high: float
    wins: float
    ties: int
    judged: int
    failed: int


def win_rate(outcomes: Sequence[float | None], key: Key) -> WinRate:
    """The win rate with a bootstrap interval (percentiles, Efron 1979).

    An outcome has one of three values. So a resample of the prompts is a draw of three numbers from the
    multinomial distribution, and no list is drawn. If all outcomes are equal, the interval is a point: a
    resample cannot hold what was never seen.

    Args:
        outcomes: of each prompt: 1 a win, 0.5 a tie, 0 a loss, ``None`` no usable verdict.
        key: the randomness of the resamples.

    Raises:
        NothingJudgedError: there is no outcome but ``None``.
        ValueError: an outcome is no such value.

    >>> rate = win_rate([1, 1, 0.5, 0, None], Key(0))
    >>> rate.mean, rate.wins, rate.ties, rate.judged, rate.failed
    (0.625, 0.5, 1, 4, 1)
    """
    values = np.array([outcome for outcome in outcomes if outcome is not None], dtype=np.float64)
    failed = len(outcomes) - len(values)
    if not len(values):
        raise NothingJudgedError(
            f"nothing was judged: {failed:,} of {len(outcomes):,} prompts have no usable verdict"
            if outcomes
            else "nothing was judged: there are no prompts"
        )
    won, tied, lost = (int((values == value).sum()) for value in (1.0, 0.5, 0.0))
    judged = len(values)
    if won + tied + lost != judged:
        raise ValueError("an outcome is 1, 0.5, 0 or None")
    draws = key.numpy().multinomial(judged, np.array([won, tied, lost]) / judged, size=RESAMPLES)
    means = (draws[:, 0] + draws[:, 1] / 2) / judged
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return WinRate(
        mean=(won + tied / 2) / judged,
        low=float(low),
        high=float(high),
        wins=won / judged,
        ties=tied,
        judged=judged,
        failed=failed,
    )


@dataclass(frozen=True)
class LengthControlled:
    """A win rate at equal lengths.

    Attributes:
        rate: between 0 and 1; ``None`` if the outcomes do not determine it.
        note: what it is, or why there is none.
    """

    rate: float | None
    note: str


def length_controlled(
    outcomes: Sequence[float | None], lengths: Sequence[tuple[int, int]]
) -> LengthControlled:
    """The win rate that is left if both texts are equally long.

    P(win) = σ(a + b·tanh(d / std(d))), with d the length of the own text minus that of the other, is fitted
    to the outcomes by maximum likelihood. A tie is half a win and half a loss. The rate is σ(a). This is the
    length-controlled win rate of AlpacaEval (Dubois et al. 2024, arXiv:2404.04475, eq. 2) without its term
    for the difficulty of a prompt, which is fitted to many models' outcomes on the same prompts.

    Three cases need no fit, or have none. If all outcomes are equal, or both texts are equally long
    everywhere, length explains nothing and the plain rate is given. If length differs by the same amount
    everywhere, or one length separates all wins from all losses, no finite fit exists: there is no rate.

    Args:
        outcomes: as for :func:`win_rate`.
        lengths: of each prompt: characters of the own text and of the other one.

    Raises:
        NothingJudgedError: there is no outcome but ``None``.
    """
    rows = [
        (value, own - other)
        for value, (own, other) in zip(outcomes, lengths, strict=True)
        if value is not None
    ]
    if not rows:
        raise NothingJudgedError("nothing was judged: no prompt has a usable verdict")
    wins, differences = np.array(rows, dtype=np.float64).T
    if not differences.any() or (wins == wins[0]).all():
        why = "both texts are equally long everywhere" if not differences.any() else "all outcomes are equal"
        return LengthControlled(math.fsum(wins) / len(wins), f"length_controlled: {why}; it is the win rate")
    deviation = differences.std()
    if deviation == 0:
        return LengthControlled(
            None, "length_controlled: none, because the lengths differ by the same amount for every prompt"
        )
    x = np.tanh(differences / deviation)
    won, lost = x[wins > 0], x[wins < 1]
    # The likelihood has a maximum just if no threshold separates wins from losses (Albert and Anderson 1984).
    if lost.max() <= won.min() or won.max() <= lost.min():
        return LengthControlled(
            None, "length_controlled: none, because a length separates all wins from all losses"
        )
    return LengthControlled(_fit_at_zero(x, wins), LENGTH_NOTE)


def _fit_at_zero(x: npt.NDArray[np.float64], wins: npt.NDArray[np.float64]) -> float:
    """σ(a) of the fit P(win) = σ(a + b·x)."""
    from scipy.optimize import minimize
    from scipy.special import expit

    design = np.stack([np.ones_like(x), x], axis=1)

    def loss(theta: npt.NDArray[np.float64]) -> Any:
        z = design @ theta
        return np.mean(np.logaddexp(0, z) - wins * z)

    def gradient(theta: npt.NDArray[np.float64]) -> Any:
        return design.T @ (expit(design @ theta) - wins) / len(x)

    def curvature(theta: npt.NDArray[np.float64]) -> Any:
        p = expit(design @ theta)
        return (design.T * (p * (1 - p))) @ design / len(x)

    fit = minimize(
        loss, np.zeros(2), jac=gradient, hess=curvature, method="trust-exact", options={"gtol": 1e-10}
    )
    return float(expit(fit.x[0]))
