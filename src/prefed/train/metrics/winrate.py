"""Win rates: how often a judge prefers one model's texts to another's."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefed.train.metrics.intervals import CONFIDENCE

LENGTH_NOTE = (
    "length-controlled: a logistic fit on tanh(length difference / its standard deviation), evaluated at "
    "equal lengths, without AlpacaEval's term for prompt difficulty"
)


class NothingJudgedError(ValueError):
    """There are no verdicts."""


@dataclass(frozen=True)
class WinRate:
    """A win rate over prompts.

    Attributes:
        mean: (wins + ties / 2) / judged.
        low: lower end of the 95% interval of ``mean``, see :func:`score_interval`.
        high: upper end.
        wins: wins / judged, with ties as no wins (the metric of FedBiscuit, Wu et al. 2025, table 1).
        ties: number of ties.
        judged: number of prompts with a verdict.
        failed: number of prompts without a usable verdict, excluded from all rates.
        distinct: number of distinct prompts among those judged.
    """

    mean: float
    low: float
    high: float
    wins: float
    ties: int
    judged: int
    failed: int
    distinct: int


def win_rate(outcomes: Sequence[float | None], prompts: Sequence[Hashable] | None = None) -> WinRate:
    """Return the win rate of one run, with its interval over prompts.

    The interval does not cover variation between training seeds; see
    :func:`~prefed.train.metrics.intervals.seed_interval`. Verdicts on a repeated prompt are not independent;
    they count as :func:`effective_share` of their number.

    Args:
        outcomes: per prompt: 1 for a win, 0.5 for a tie, 0 for a loss, ``None`` without a usable verdict.
        prompts: prompt of each outcome; by default all are distinct.

    Raises:
        NothingJudgedError: all outcomes are ``None``.
        ValueError: an outcome has another value.

    >>> rate = win_rate([1, 1, 0.5, 0, None])
    >>> rate.mean, rate.wins, rate.ties, rate.judged, rate.failed
    (0.625, 0.5, 1, 4, 1)
    """
    named = range(len(outcomes)) if prompts is None else prompts
    usable = [(o, prompt) for o, prompt in zip(outcomes, named, strict=True) if o is not None]
    judged, failed = len(usable), len(outcomes) - len(usable)
    if not judged:
        raise NothingJudgedError(
            f"nothing was judged: {failed:,} of {len(outcomes):,} prompts have no usable verdict"
            if outcomes
            else "nothing was judged: there are no prompts"
        )
    won, tied, lost = (sum(outcome == value for outcome, _ in usable) for value in (1.0, 0.5, 0.0))
    if won + tied + lost != judged:
        raise ValueError("outcomes must be 1, 0.5, 0 or None")
    share = effective_share(usable)
    low, high = score_interval(won * share, tied * share, lost * share)
    distinct = len({prompt for _, prompt in usable})
    return WinRate((won + tied / 2) / judged, low, high, won / judged, tied, judged, failed, distinct)


def score_interval(won: float, tied: float, lost: float) -> tuple[float, float]:
    r"""Return the 95% score interval of a win rate with ties.

    With probabilities $p$ of a win and $q$ of a loss the win rate is $(1 + d)/2$, $d = p - q$. The interval
    contains all $d$ that the score test does not reject:

    $$n\,(\hat d - d)^2 \le z^2\,(2\tilde q + d(1 - d)), \qquad
      \tilde q = \bigl(\sqrt{b^2 - 8nc} - b\bigr) / 4n,$$

    with $b = (2n - won + lost)\,d - won - lost$ and $c = -lost\; d(1 - d)$. $\tilde q$ is the
    maximum-likelihood $q$ given $d$, and $2\tilde q + d(1 - d)$ the variance per outcome of $\hat d$. Without
    ties it is Wilson's interval.

    Source: Tango, Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design, Statistics in Medicine 17 (1998), with the ties as the concordant pairs.

    Args:
        won, tied, lost: numbers of outcomes, possibly fractional, with a positive sum.

    >>> low, high = score_interval(2, 0, 2)
    >>> round(low, 3), round(high, 3)
    (0.15, 0.85)
    """
    return 1 - _highest(lost, tied, won), _highest(won, tied, lost)


def _highest(won: float, tied: float, lost: float) -> float:
    """Return the upper end of the interval."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    if not tied + lost:
        return 1.0
    judged, z = won + tied + lost, norm.ppf((1 + CONFIDENCE) / 2)
    found = (won - lost) / judged

    def excess(d: float) -> float:
        b, c = (2 * judged - won + lost) * d - won - lost, -lost * d * (1 - d)
        q = (math.sqrt(max(0.0, b * b - 8 * judged * c)) - b) / (4 * judged)
        return float(judged * (found - d) ** 2 - z * z * (2 * q + d * (1 - d)))

    # If all outcomes are equal, ``found`` is a root too, because the variance is 0 there.
    return (1 + float(brentq(excess, found + 1e-9, 1.0))) / 2


def effective_share(usable: Sequence[tuple[float, Hashable]]) -> float:
    r"""Return the number of independent outcomes that the given outcomes are worth, per outcome.

    $n$ outcomes on $G$ distinct prompts have the design effect $D$: the variance of their mean when sampling
    prompts, divided by the variance when sampling outcomes, at least 1. The share is $\bigl(t_{n-1} /
    t_{G-1}\bigr)^2 / D$, with the 97.5% points of Student's t. If all outcomes are equal, $D = n / G$. A
    single repeated prompt counts as one outcome.

    Source: Korn and Graubard, Confidence intervals for proportions with small expected number of positive
    counts estimated from survey data, Survey Methodology 24 (1998).

    >>> effective_share([(1.0, "a"), (0.0, "b")]), effective_share([(1.0, "a"), (0.0, "a")])
    (1.0, 0.5)
    """
    values = np.array([outcome for outcome, _ in usable], dtype=np.float64)
    numbers: dict[Hashable, int] = {}
    places = [numbers.setdefault(prompt, len(numbers)) for _, prompt in usable]
    n, distinct = len(values), len(numbers)
    if distinct in (1, n):
        return distinct / n
    from scipy.stats import t

    away = values - values.mean()
    between = np.sum(np.bincount(places, weights=away) ** 2) * distinct / (distinct - 1)
    alone = np.sum(away**2) * n / (n - 1)
    design = between / alone if alone else n / distinct
    point = (1 + CONFIDENCE) / 2
    return float((t.ppf(point, n - 1) / t.ppf(point, distinct - 1)) ** 2 / max(1.0, design))


@dataclass(frozen=True)
class LengthControlled:
    """A length-controlled win rate.

    Attributes:
        rate: between 0 and 1; ``None`` if the outcomes do not determine it.
        note: explanation of the rate, or why there is none.
    """

    rate: float | None
    note: str


def length_controlled(
    outcomes: Sequence[float | None], lengths: Sequence[tuple[int, int]]
) -> LengthControlled:
    """Estimate the win rate for texts of equal length.

    P(win) = σ(a + b·tanh(d / std(d))) is fitted by maximum likelihood, where d is the length of a model's
    text minus that of the other text. A tie is half a win and half a loss. The rate is σ(a). This is
    AlpacaEval's length-controlled win rate (Dubois et al. 2024, arXiv:2404.04475, eq. 2) without the term for
    prompt difficulty, which requires outcomes of many models on the same prompts.

    If all outcomes are equal or all texts are equally long, length explains nothing, and the plain rate is
    returned. If the length differs by the same amount everywhere, or a length threshold separates wins from
    losses, no finite fit exists, and there is no rate.

    Args:
        outcomes: as for :func:`win_rate`.
        lengths: number of characters of the model's text and of the other text, per prompt.

    Raises:
        NothingJudgedError: all outcomes are ``None``.
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
        why = "both texts always have equal length" if not differences.any() else "all outcomes are equal"
        rate = math.fsum(wins) / len(wins)
        return LengthControlled(rate, f"length-controlled: equal to the win rate, because {why}")
    deviation = differences.std()
    if deviation == 0:
        return LengthControlled(
            None, "length-controlled: none, because the lengths differ by the same amount for every prompt"
        )
    x = np.tanh(differences / deviation)
    won, lost = x[wins > 0], x[wins < 1]
    # The likelihood has a maximum iff no threshold separates wins from losses (Albert and Anderson 1984).
    if lost.max() <= won.min() or won.max() <= lost.min():
        return LengthControlled(
            None, "length-controlled: none, because a length threshold separates all wins from all losses"
        )
    return LengthControlled(_fit_at_zero(x, wins), LENGTH_NOTE)


def _fit_at_zero(x: npt.NDArray[np.float64], wins: npt.NDArray[np.float64]) -> float:
    """Return σ(a) of the fit P(win) = σ(a + b·x)."""
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
