"""Cases over their seeds: mean and deviation, and how one differs from another seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prefed.runs.replicates import Case
from prefed.runs.seeds import by_seed, fold, holm, paired, reference_case
from prefed.ui.pages.tables import literal, new_table

if TYPE_CHECKING:
    from rich.table import Table

MEASURES: Mapping[str, tuple[str, str]] = {
    "preference accuracy": ("preference_accuracy", "mean"),
    "worst": ("preference_accuracy", "worst"),
    "worst tenth": ("preference_accuracy", "worst_decile"),
    "reward accuracy": ("reward_accuracy", "mean"),
    "worst reward accuracy": ("reward_accuracy", "worst"),
}
"""What is told of cases: heading → figure, and which of its values over clients."""
TESTED: Mapping[str, str] = {
    "preference accuracy": "preference_accuracy",
    "reward accuracy": "reward_accuracy",
}
"""What is tested seed by seed: heading → figure, its mean over clients."""


def seeds_tables(known: Sequence[Case], shown: Sequence[str]) -> list[Table]:
    """Means over seeds of each case, and tests seed by seed; none if every case has one seed.

    Args:
        shown: the cases' names.
    """
    if all(len(case.runs) < 2 for case in known):
        return []
    table = new_table("mean ± standard deviation over seeds", "case", "seeds", *MEASURES)
    for name, case in zip(shown, known, strict=True):
        cells = [plus_minus(by_seed(case, figure, of)) for figure, of in MEASURES.values()]
        table.add_row(literal(name), str(len(case.runs)), *cells)
    first = reference_case(known)
    others = [k for k in range(len(known)) if k != first]
    tests = new_table(
        f"seed by seed against {shown[first]}: mean difference, its 95% interval, p of paired t-tests "
        "(Holm), of Wilcoxon's",
        "case",
        *(head for figure in TESTED for head in ("seeds", figure, "t-test", "Wilcoxon")),
    )
    each = [rows_of_tests(known[first], [known[k] for k in others], name) for name in TESTED.values()]
    for k, *cells in zip(others, *each, strict=True):
        tests.add_row(literal(shown[k]), *(cell for test in cells for cell in test))
    return [table, tests] if tests.row_count else [table]


def plus_minus(values: Mapping[int, float]) -> str:
    """Mean ± sample standard deviation of a figure; the mean alone of one seed; empty without any.

    >>> plus_minus({1: 0.7, 2: 0.8, 3: 0.9}), plus_minus({1: 0.7}), plus_minus({})
    ('0.800 ± 0.100', '0.700', '')
    """
    if not values:
        return ""
    figure = fold(list(values.values()))
    return f"{figure.mean:.3f}" + ("" if figure.std is None else f" ± {figure.std:.3f}")


def rows_of_tests(first: Case, others: Sequence[Case], name: str) -> list[tuple[str, str, str, str]]:
    """For each case against the first: seeds in common, mean difference, p of the t-test, p of Wilcoxon's.

    The mean has its 95% interval over seeds.

    The t-tests are adjusted for their number by Holm's rule. A cell is empty where there is nothing to say.
    """
    found = [paired(case, first, name) for case in others]
    told = [each.t for each in found if each and each.t is not None]
    adjusted = iter(holm(told))
    rows = []
    for each in found:
        if each is None:
            rows.append(("0", "", "", ""))
            continue
        shown = f"{each.folded.mean:+.3f}"
        shown += " [{:+.3f}, {:+.3f}]".format(*each.interval) if each.interval else ""
        p = ("", "") if each.t is None else (f"{next(adjusted):.3f}", f"{each.wilcoxon:.3f}")
        rows.append((f"{each.folded.n}", shown, *p))
    return rows


def few_seeds(known: Sequence[Case]) -> str:
    """What a reader must know of tests over few seeds."""
    reference = reference_case(known)
    first = set(known[reference].seeds)
    counts = [len(first & set(case.seeds)) for k, case in enumerate(known) if k != reference]
    most = max(counts, default=len(first))
    if most < 2:
        return "One seed says little: what lies between two cases may be the seed's. Run several seeds."
    least = f"with {most} Wilcoxon's p cannot be below {2 / 2**most:.3g}"
    if most < 6:
        return f"{most} seeds say little: {least}, and the t-test takes the differences to be normal."
    return f"{most} seeds in common: {least}. The t-test takes the differences to be normal."
