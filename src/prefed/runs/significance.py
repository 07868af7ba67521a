"""Significance tests of differences between cases: paired t-test, Wilcoxon's test, and Holm's adjustment."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefed.runs.seed_groups import Case, Folded, by_seed, fold
from prefed.train.metrics import seed_interval


@dataclass(frozen=True)
class Paired:
    """Difference of a metric between two cases, paired by seed.

    Attributes:
        differences: seed → difference.
        t: p-value of the two-sided paired t-test.
        wilcoxon: p-value of Wilcoxon's two-sided signed-rank test.

    Both p-values are ``None`` for fewer than two seeds and for equal differences.
    """

    differences: Mapping[int, float]
    t: float | None
    wilcoxon: float | None

    @property
    def folded(self) -> Folded:
        """Mean and standard deviation of the differences."""
        return fold(list(self.differences.values()))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% confidence interval of the mean difference; ``None`` without a t-test."""
        return None if self.t is None else seed_interval(list(self.differences.values()))


def paired(case: Case, other: Case, name: str, of: str = "mean") -> Paired | None:
    """Compare two cases on their common seeds; ``None`` without any.

    A seed gives both cases the same splits, cohorts and initial values, so its effect on both cancels out.
    """
    mine, theirs = by_seed(case, name, of), by_seed(other, name, of)
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds:
        return None
    differences = {seed: mine[seed] - theirs[seed] for seed in seeds}
    if max(differences.values()) - min(differences.values()) < 1e-12:
        return Paired(differences, None, None)
    from scipy import stats  # takes half a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few seeds, which pages report
        first, second = ([values[seed] for seed in seeds] for values in (mine, theirs))
        t, signed = stats.ttest_rel(first, second).pvalue, stats.wilcoxon(first, second).pvalue
    return Paired(differences, float(t), float(signed))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p-values of several tests with Holm's method, which controls the family-wise error rate.

    Source: Holm, A simple sequentially rejective multiple test procedure (1979).

    >>> [round(each, 12) for each in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        highest = max(highest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = highest
    return adjusted
