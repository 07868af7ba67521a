r"""Closed forms for the log-linear softmax policy, π(u|s) ∝ exp(θᵀφ(s, u)) (arXiv:2605.20696, appendix A).

A trajectory is a sequence of steps. A step has the features of all actions in its state and the action that
was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Step:
    """A step of a trajectory.

    Attributes:
        features: ``[actions, d]``, φ(s, u) of each action u in the step's state s.
        action: the row of the action that was taken.
    """

    features: Array
    action: int


def log_probabilities(theta: Array, features: Array) -> Array:
    """``[actions]``: log π_θ(u|s)."""
    logits = features @ theta
    return np.asarray(logits - np.logaddexp.reduce(logits))


def probabilities(theta: Array, features: Array) -> Array:
    """``[actions]``: π_θ(u|s) (eq. 1).

    >>> probabilities(np.zeros(2), np.eye(2)).round(3).tolist()
    [0.5, 0.5]
    """
    return np.asarray(np.exp(log_probabilities(theta, features)))


def log_probability(theta: Array, steps: Sequence[Step]) -> float:
    """Log π_θ(τ), without the environment's part, which has no θ in it."""
    return float(sum(log_probabilities(theta, step.features)[step.action] for step in steps))


def score(theta: Array, steps: Sequence[Step]) -> Array:
    """``[d]``: ν_θ(τ) = ∇ log π_θ(τ), the sum of φ(s, u) − E_π φ(s, ·) over the steps."""
    parts = [
        step.features[step.action] - probabilities(theta, step.features) @ step.features for step in steps
    ]
    return np.asarray(np.sum(parts, axis=0))


def score_jacobian(theta: Array, steps: Sequence[Step]) -> Array:
    """``[d, d]``: ∇² log π_θ(τ), the sum of −Cov_π φ(s, ·) over the steps."""
    total = np.zeros((len(theta), len(theta)))
    for step in steps:
        weights = probabilities(theta, step.features)
        centred = step.features - weights @ step.features
        total -= centred.T @ (weights[:, None] * centred)
    return total


@dataclass(frozen=True, eq=False)
class Pair:
    """A chosen and a rejected trajectory under DPO.

    Attributes:
        reference: Δ_ref = log π_ref(τ⁺) − log π_ref(τ⁻).
    """

    chosen: Sequence[Step]
    rejected: Sequence[Step]
    beta: float
    reference: float = 0.0

    def logit(self, theta: Array) -> float:
        """ω = β(Δ_θ − Δ_ref)."""
        margin = log_probability(theta, self.chosen) - log_probability(theta, self.rejected)
        return self.beta * (margin - self.reference)

    def loss(self, theta: Array) -> float:
        """−log σ(ω) (eq. 2)."""
        return float(np.logaddexp(0.0, -self.logit(theta)))

    def gradient(self, theta: Array) -> Array:
        """``[d]``: −β σ(−ω) v with v = ν(τ⁺) − ν(τ⁻); eq. 6 prints it without the minus sign."""
        pull = self.beta * _sigmoid(-self.logit(theta))
        return np.asarray(pull * (score(theta, self.rejected) - score(theta, self.chosen)))

    def hessian(self, theta: Array) -> Array:
        """``[d, d]``: β² σ(ω) σ(−ω) v vᵀ − β σ(−ω) ∇v (eq. 7)."""
        omega = self.logit(theta)
        v = score(theta, self.chosen) - score(theta, self.rejected)
        bend = score_jacobian(theta, self.rejected) - score_jacobian(theta, self.chosen)
        curve = self.beta**2 * _sigmoid(omega) * _sigmoid(-omega)
        return np.asarray(curve * np.outer(v, v) + self.beta * _sigmoid(-omega) * bend)

    def score_bound(self) -> float:
        """ζ_φ² that no step's ‖ν‖² exceeds, whatever θ is, as small as it can be without looking at θ.

        It is the largest squared distance between the features of two actions of one state.
        """
        steps = [*self.chosen, *self.rejected]
        return max(
            float(((step.features[:, None] - step.features[None]) ** 2).sum(axis=2).max()) for step in steps
        )


def _sigmoid(x: float) -> float:
    return float(np.exp(-np.logaddexp(0.0, -x)))
