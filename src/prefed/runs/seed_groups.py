"""Group runs that differ only in their seed into cases, and compare cases by seed and by client."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prefed.core.strict_settings import flatten
from prefed.runs.finished_run import RunRecord

_UNLIKE = ("seed", "engine.")
"""Settings that may differ within a case."""


@dataclass(frozen=True)
class Case:
    """Runs that differ only in their seed."""

    runs: tuple[RunRecord, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs."""
        return tuple(run.seed for run in self.runs)

    def over_rounds(
        self, name: str, of: str = "mean"
    ) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
        """Return the rounds in which all runs have a metric, and its values, ``[runs, rounds]``.

        The arguments are those of :meth:`~prefed.runs.finished_run.RunRecord.curve`.
        """
        values_of = [dict(zip(*run.curve(name, of), strict=True)) for run in self.runs]
        rounds = sorted(set.intersection(*map(set, values_of)))
        return rounds, np.array([[values[r] for r in rounds] for values in values_of], dtype=np.float64)


def cases(runs: Sequence[RunRecord]) -> list[Case]:
    """Group runs into cases, in the order of their first runs.

    Two runs with the same settings and the same seed are in different cases.
    """
    found: dict[tuple[str, int], list[RunRecord]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for run in runs:
        tables = {n: v for n, v in flatten(run.config).items() if not n.startswith(_UNLIKE)}
        settings = json.dumps(tables, sort_keys=True, default=str)
        found.setdefault((settings, seen[settings, run.seed]), []).append(run)
        seen[settings, run.seed] += 1
    return [Case(tuple(some)) for some in found.values()]


FIXED = ("column", "source", "file")
"""Partitions in which the pairs of a client do not depend on the seed."""


@dataclass(frozen=True)
class Folded:
    """A metric over the runs of a case.

    Attributes:
        std: sample standard deviation; ``None`` for one run.
        n: number of runs.
    """

    mean: float
    std: float | None
    n: int


def fold(values: Sequence[float]) -> Folded:
    """Compute mean and sample standard deviation.

    >>> fold([0.7, 0.8, 0.9])
    Folded(mean=0.8, std=0.1, n=3)
    >>> fold([0.7]).std is None
    True
    """
    std = round(statistics.stdev(values), 12) if len(values) > 1 else None
    return Folded(round(statistics.fmean(values), 12), std, len(values))


def by_seed(case: Case, name: str, of: str = "mean") -> dict[int, float]:
    """Return seed → a metric after the last round, for the runs that have it.

    Args:
        of: ``"mean"``, ``"worst"`` or ``"worst_decile"`` over clients.
    """
    figures = ((run.seed, run.summary.get(name)) for run in case.runs)
    return {
        seed: float(figure[of]) for seed, figure in figures if isinstance(figure, Mapping) and of in figure
    }


def spent(case: Case, what: str) -> dict[int, float]:
    """Return round → cost up to its end, mean over the runs; empty if a run did not record it.

    Args:
        what: ``"bytes"`` in both directions, ``"seconds"`` of computation, or ``"time"``, the virtual seconds
            of a simulated fleet.
    """
    columns = []
    for run in case.runs:
        if what == "bytes":
            values = np.cumsum([record["bytes_up"] + record["bytes_down"] for record in run.rounds])
        elif what == "seconds":
            values = np.cumsum([record.get(what, math.nan) for record in run.rounds])
        else:
            values = np.array([record.get(what, math.nan) for record in run.rounds], dtype=np.float64)
        columns.append(
            dict(zip((int(record["round"]) for record in run.rounds), values.tolist(), strict=True))
        )
    rounds = sorted(set.intersection(*map(set, columns)))
    means = {number: statistics.fmean(column[number] for column in columns) for number in rounds}
    return means if all(map(math.isfinite, means.values())) else {}


def reference_case(known: Sequence[Case]) -> int:
    """Return the index of the case that others are compared with.

    It is the case with most seeds among those without personal models, or among all if there is none.
    """
    personal = ["shared_accuracy" in case.runs[0].figures for case in known]
    return min(range(len(known)), key=lambda k: (personal[k], -len(known[k].runs)))


def fixed_clients(known: Sequence[Case]) -> bool:
    """Whether clients of the same name have the same pairs in all runs."""
    seeds = {seed for case in known for seed in case.seeds}
    partitions = {run.config["data"].get("partition", {}).get("by") for case in known for run in case.runs}
    return len(seeds) == 1 or partitions <= set(FIXED)


def by_client(case: Case, name: str, *, fixed: bool) -> dict[str, float]:
    """Return client → a metric after the last round.

    Args:
        fixed: average a client over seeds. Otherwise, clients of different seeds are different clients.
    """
    return _means(_each(case, name), fixed)


def gains(case: Case, other: Case, name: str, *, fixed: bool, against: str | None = None) -> dict[str, float]:
    """Return client → difference of a metric between ``case`` and ``other`` on their common seeds.

    Args:
        fixed: as for :func:`by_client`.
        against: the metric of ``other``; defaults to ``name``.
    """
    mine, theirs = _each(case, name), _each(other, against or name)
    return _means({key: mine[key] - theirs[key] for key in mine if key in theirs}, fixed)


def _each(case: Case, name: str) -> dict[tuple[str, int], float]:
    return {
        (client, run.seed): value
        for run in case.runs
        if name in run.figures
        for client, value in run.figures[name].values["per_client"].items()
    }


def _means(each: Mapping[tuple[str, int], float], fixed: bool) -> dict[str, float]:
    if not fixed:
        return {f"{client}, seed {seed}": value for (client, seed), value in each.items()}
    values: dict[str, list[float]] = {}
    for (client, _), value in each.items():
        values.setdefault(client, []).append(value)
    return {client: statistics.fmean(each) for client, each in values.items()}
