"""Labels by several selectors, each of a group of clients."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog

from prefed.align.labels import leads


def gains(scores: np.ndarray, rule: str) -> np.ndarray:
    """The mean over pairs of 2 P − 1, for each group; P is the logistic function at a label's log-odds."""
    labels = np.sign(leads(scores, rule))
    return (labels * (2 / (1 + np.exp(-scores)) - 1)).mean(1)


@pytest.mark.parametrize("seed", range(5))
def test_adaptive_labels_serve_the_worst_group_as_well_as_any_labels_can(seed):
    """The largest v with mean_i d_i t_ui ≥ v for all groups u and some −1 ≤ d ≤ 1 is a linear program. Hedge
    comes within √(2 ln U / n) of it; the majority, and the mean, leave a small group far behind."""
    draw = np.random.default_rng(seed)
    groups, pairs = 4, 600
    common, apart = draw.normal(size=pairs), draw.normal(size=(groups, pairs))
    scores = 0.5 * common + np.stack([apart[0], apart[0], apart[0], -2 * apart[0] + 0.3 * apart[3]])
    tastes = 2 / (1 + np.exp(-scores)) - 1
    program = linprog(
        np.append(np.zeros(pairs), -1.0),
        A_ub=np.hstack([-tastes / pairs, np.ones((groups, 1))]),
        b_ub=np.zeros(groups),
        bounds=[*([(-1, 1)] * pairs), (None, None)],
    )
    best, slack = -program.fun, math.sqrt(2 * math.log(groups) / pairs)
    worst = {rule: gains(scores, rule).min() for rule in ("majority", "mean", "minimum", "adaptive")}
    assert best - slack <= worst["adaptive"] <= best + 1e-9
    assert worst["majority"] < best - 2 * slack
    assert worst["adaptive"] > max(worst["majority"], worst["mean"])


def test_minimum_opposes_nobody_strongly():
    """The objection of the group most against a label is max_u −d s_u; the other label has a larger one."""
    scores = np.random.default_rng(0).normal(size=(5, 200))
    labels = np.sign(leads(scores, "minimum"))
    objections = [(-sign * scores).max(0) for sign in (labels, -labels)]
    assert (objections[0] < objections[1]).all()


@pytest.mark.parametrize("rule", ["majority", "mean", "minimum", "adaptive"])
def test_a_group_alone_gets_its_labels(rule):
    """And a tie of its own is a tie. A selector by its number, or a judge, is a group alone."""
    scores = np.array([[0.3, -2.0, 0.0, 1e-6]])
    assert np.sign(leads(scores, rule)).tolist() == [1, -1, 0, 1]
