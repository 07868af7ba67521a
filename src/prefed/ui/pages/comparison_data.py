"""Comparison of runs: names, differing settings, cases over seeds, gains, and JSON output."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prefed.core.strict_settings import flatten
from prefed.runs.finished_run import RunRecord
from prefed.runs.seed_groups import (
    Case,
    by_client,
    by_seed,
    cases,
    fixed_clients,
    fold,
    gains,
    reference_case,
)
from prefed.runs.significance import Paired, holm, paired
from prefed.train.metrics import LEADING_METRICS
from prefed.ui.pages.tables import setting

OF = ("mean", "worst", "worst_decile")
"""Statistics over clients."""


@dataclass(frozen=True)
class ChosenCase:
    """A case selected by a sweep.

    Attributes:
        text: description of the selection.
        runs: directories of its runs.
        test: metric → seed → mean over clients on test pairs.
    """

    text: str
    runs: Sequence[Path]
    test: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Compared:
    """Runs to compare. Cases are in the order of their first runs, with those not comparable last."""

    runs: tuple[RunRecord, ...]

    @cached_property
    def cases(self) -> list[Case]:
        """Groups of runs that differ only in their seed."""
        return [*self.comparable, *cases([self.runs[index] for index in self.disagreements])]

    @cached_property
    def comparable(self) -> list[Case]:
        """The cases comparable with the first run; they come first in ``cases``."""
        return cases([run for index, run in enumerate(self.runs) if index not in self.disagreements])

    @cached_property
    def labels(self) -> list[str]:
        """The runs' names."""
        return labels(self.runs)

    @cached_property
    def disagreements(self) -> dict[int, str]:
        """Index of a run not comparable with the first → why."""
        return disagreements(self.runs)

    @cached_property
    def several_seeds(self) -> bool:
        """Whether any case has more than one run."""
        return any(len(case.runs) > 1 for case in self.cases)

    @cached_property
    def names(self) -> list[str]:
        """The cases' names."""
        return case_names(self.cases)

    @cached_property
    def keys(self) -> list[str]:
        """The cases' letters."""
        return letters(len(self.cases))

    @cached_property
    def reference(self) -> int:
        """Index of the case that others are compared with."""
        return reference_case(self.comparable)

    @cached_property
    def fixed(self) -> bool:
        """Whether a client's name means the same pairs in all runs."""
        return fixed_clients(self.cases)

    @cached_property
    def selectors(self) -> list[bool]:
        """For each case, whether its models are selectors."""
        return ["choice_loss" in case.runs[0].summary for case in self.cases]

    @cached_property
    def marked(self) -> dict[str, str]:
        """Name of a run not comparable with the first → why."""
        return {self.labels[index]: why for index, why in self.disagreements.items()}

    @cached_property
    def settings(self) -> dict[str, list[str | None]]:
        """Differing settings: dotted name → each case's value."""
        found = differences([case.runs[0] for case in self.cases])
        found.pop("seed", None)
        return found

    def values(self, name: str) -> list[dict[str, float]]:
        """For each case: client → metric, a mean over seeds if all seeds have the same clients."""
        return [by_client(case, name, fixed=self.fixed) for case in self.cases]

    def gains(self, name: str) -> list[dict[str, float]]:
        """For each comparable case: client → metric minus its value in the reference case."""
        first = self.cases[self.reference]
        return [gains(case, first, name, fixed=self.fixed) for case in self.comparable]

    def own_gains(self) -> list[dict[str, float]]:
        """For each case: client → accuracy of its own model minus that of the shared model of the run."""
        name, against = LEADING_METRICS[0], "shared_accuracy"
        return [gains(case, case, name, fixed=self.fixed, against=against) for case in self.cases]

    def paired(self, name: str) -> list[Paired | None]:
        """Each comparable case paired by seed with the reference case; ``None`` for that case itself."""
        first = self.cases[self.reference]
        return [None if case is first else paired(case, first, name) for case in self.comparable]

    def plain(self) -> dict[str, Any]:
        """The comparison as JSON."""
        of_run = {run.path: name for run, name in zip(self.runs, self.labels, strict=True)}
        return {
            "reference": self.names[self.reference],
            "differences": {
                name: dict(zip(self.names, values, strict=True)) for name, values in self.settings.items()
            },
            "not_comparable": self.marked,
            "cases": [
                {
                    "name": name,
                    "method": case.runs[0].method,
                    "seeds": list(case.seeds),
                    "runs": [of_run[run.path] for run in case.runs],
                    "figures": _folded(case),
                    "bytes": {
                        way: statistics.fmean(run.summary["bytes"][way] for run in case.runs)
                        for way in ("up", "down")
                    },
                    "seconds": statistics.fmean(run.summary["seconds"] for run in case.runs),
                }
                for name, case in zip(self.names, self.cases, strict=True)
            ],
            "paired": [
                {
                    "figure": figure,
                    "case": name,
                    "against": self.names[self.reference],
                    "seeds": [*each.differences],
                    "differences": [*each.differences.values()],
                    "mean": each.folded.mean,
                    "std": each.folded.std,
                    "interval": each.interval,
                    "t_test": each.t,
                    "wilcoxon": each.wilcoxon,
                }
                for figure in LEADING_METRICS
                for name, each in zip(self.names, self.paired(figure), strict=False)
                if each is not None
            ],
            "runs": [
                {
                    "name": name,
                    "path": str(run.path),
                    "method": run.method,
                    "seed": run.seed,
                    "rounds": run.summary["rounds"],
                    "split": run.split,
                    "bytes": dict(run.summary["bytes"]),
                    "seconds": run.summary["seconds"],
                    **{figure: each.values for figure, each in run.figures.items()},
                }
                for name, run in zip(self.labels, self.runs, strict=True)
            ],
        }


def _folded(case: Case) -> dict[str, dict[str, dict[str, float | None]]]:
    """Metric → statistic over clients → its mean and standard deviation over seeds."""
    folded: dict[str, dict[str, dict[str, float | None]]] = {}
    for name in case.runs[0].figures:
        for of in OF:
            over_seeds = fold(list(by_seed(case, name, of).values()))
            folded.setdefault(name, {})[of] = {"mean": over_seeds.mean, "std": over_seeds.std}
    return folded


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Short unique names of runs: the directory's name, with as many parents as necessary."""
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def case_names(known: Sequence[Case]) -> list[str]:
    """Short unique names of cases: the name of the first run, without the seed if possible."""
    whole = labels([case.runs[0] for case in known])
    names = [
        re.sub(rf"[-_./ ]*seed[-_=]?{case.seeds[0]}$", "", name)
        for case, name in zip(known, whole, strict=True)
    ]
    return [own if own and names.count(own) == 1 else name for own, name in zip(names, whole, strict=True)]


def letters(count: int) -> list[str]:
    """The first ``count`` names of A, B, …, Z, AA, AB, …

    >>> letters(3), letters(28)[-2:]
    (['A', 'B', 'C'], ['AA', 'AB'])
    """
    alphabet = [chr(ord("A") + number) for number in range(26)]
    return [*alphabet, *(first + second for first in alphabet for second in alphabet)][:count]


def disagreements(runs: Sequence[RunRecord]) -> dict[int, str]:
    """Index of each run not comparable with the first → why.

    Such runs have other data, evaluation pairs, clients or another base model. As a seed may determine the
    clients' pairs, data are compared with the first run of the same seed.
    """
    first, reasons = runs[0], {}
    of_seed: dict[int, RunRecord] = {}
    for index, run in enumerate(runs):
        peer = of_seed.get(run.seed)
        mine, theirs = (each.fingerprint.get("data") for each in (run, peer or first))
        why = []
        if mine and theirs and (peer or mine == theirs):
            if mine != theirs:
                why.append("other data")
        elif run.config["data"] != first.config["data"]:
            why.append("other [data] settings")
        if run.split != first.split:
            why.append(f"evaluated on {run.split} pairs, not {first.split} pairs")
        elif not why and peer and run.clients != peer.clients:
            why.append("evaluated on other clients")
        mine, theirs = (each.fingerprint.get("model") for each in (run, first))
        # A model that was moved has another name, but the same digest.
        moved = mine is not None and mine == theirs
        if run.config["model"]["name"] != first.config["model"]["name"] and not moved:
            why.append("another base model")
        if why:
            reasons[index] = ", ".join(why)
        else:
            of_seed.setdefault(run.seed, run)
    return reasons


def differences(runs: Sequence[RunRecord]) -> dict[str, list[str | None]]:
    """Differing settings: dotted name → each run's value, ``None`` if unset.

    A setting in ``[method]`` is compared only between methods that have it. ``[engine]`` does not affect
    results and is left out.
    """
    settings = [{name: setting(value) for name, value in flatten(run.config).items()} for run in runs]
    methods: dict[str, set[str]] = {}
    for run, own in zip(runs, settings, strict=True):
        methods.setdefault(run.method, set()).update(own)
    result = {}
    for name in dict.fromkeys(name for own in settings for name in own):
        values = [own.get(name) for own in settings]
        compared = {
            value
            for value, run in zip(values, runs, strict=True)
            if not name.startswith("method.") or name in methods[run.method]
        }
        if len(compared) > 1 and not name.startswith("engine."):
            result[name] = values
    return result


def plus_minus(values: Iterable[float]) -> str:
    """Format mean ± sample standard deviation over seeds; with one seed, only the mean.

    >>> plus_minus([0.7, 0.8, 0.9]), plus_minus([0.7]), plus_minus([])
    ('0.800 ± 0.100', '0.700', '')
    """
    if not (known := list(values)):
        return ""
    figure = fold(known)
    return f"{figure.mean:.3f}" + ("" if figure.std is None else f" ± {figure.std:.3f}")


def rows_of_tests(found: Sequence[Paired | None]) -> list[tuple[str, str, str, str]]:
    """For each pair of cases: seeds in common, mean difference, p of the t-test, p of Wilcoxon's test.

    The mean difference has its 95% interval over seeds. The p-values of the t-tests are adjusted by Holm's
    method. Undefined cells are empty.
    """
    known = [each.t for each in found if each and each.t is not None]
    adjusted = iter(holm(known))
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
    """A note on the power of tests with the given number of seeds."""
    reference = reference_case(known)
    first = set(known[reference].seeds)
    counts = [len(first & set(case.seeds)) for k, case in enumerate(known) if k != reference]
    most = max(counts, default=len(first))
    if most < 2:
        return "With a single seed, differences between cases may be due to chance. Run several seeds."
    seeds = f"With {'only ' if most < 6 else ''}{most} seeds in common"
    least = f"{seeds}, Wilcoxon's p cannot be below {2 / 2**most:.3g}"
    return f"{least}. The t-test assumes normally distributed differences."
