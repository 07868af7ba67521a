"""Runs next to each other: their names, what differs, cases over seeds, who gains, and all of it as JSON."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prefed.core.strict_settings import flatten
from prefed.runs.record import RunRecord
from prefed.runs.seed_groups import (
    ACCURACIES,
    Case,
    Paired,
    by_client,
    by_seed,
    cases,
    fixed_clients,
    fold,
    gains,
    holm,
    paired,
    reference_case,
)
from prefed.ui.pages.tables import setting

OF = ("mean", "worst", "worst_decile")
"""Values of a figure over clients."""


@dataclass(frozen=True)
class ChosenCase:
    """The case that a sweep chose.

    Attributes:
        text: a sentence about it.
        runs: the directories of its runs.
        test: figure → seed → its mean over clients on test pairs.
    """

    text: str
    runs: Sequence[Path]
    test: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Compared:
    """Runs side by side. Cases have the order of their first runs; those not comparable come last."""

    runs: tuple[RunRecord, ...]

    @cached_property
    def cases(self) -> list[Case]:
        """Runs that differ only in their seed, together."""
        comparable, others = cases_apart(self.runs)
        return [*comparable, *others]

    @cached_property
    def comparable(self) -> int:
        """How many cases can be compared with the first run: so many of the first."""
        return len(cases_apart(self.runs)[0])

    @cached_property
    def labels(self) -> list[str]:
        """The runs' names."""
        return labels(self.runs)

    @cached_property
    def disagreements(self) -> dict[int, str]:
        """The runs that are not comparable with the first: index → why."""
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
        """The number of the case that others are compared with."""
        return reference_case(self.cases[: self.comparable])

    @cached_property
    def fixed(self) -> bool:
        """Whether a client's name means the same pairs in all runs."""
        return fixed_clients(self.cases)

    @cached_property
    def selectors(self) -> list[bool]:
        """Of each case, whether its models are selectors, which choose between responses and write none."""
        return ["choice_loss" in case.runs[0].summary for case in self.cases]

    @cached_property
    def one_accuracy(self) -> bool:
        """Whether both accuracies are one: a selector's score is its only reward."""
        return all(self.selectors)

    @cached_property
    def accuracies(self) -> dict[str, str]:
        """The two accuracies → their names in words."""
        return {name: name.replace("_", " ") for name in ACCURACIES}

    @cached_property
    def marked(self) -> dict[str, str]:
        """The runs that are not comparable with the first: name → why."""
        return {self.labels[index]: why for index, why in self.disagreements.items()}

    @cached_property
    def settings(self) -> dict[str, list[str | None]]:
        """The settings in which cases differ: dotted name → each case's value."""
        found = differences([case.runs[0] for case in self.cases])
        found.pop("seed", None)
        return found

    def values(self, name: str) -> list[dict[str, float]]:
        """Of each case: client → a figure, mean over seeds where a name means the same client."""
        return [by_client(case, name, fixed=self.fixed) for case in self.cases]

    def gains(self, name: str) -> list[dict[str, float]]:
        """Of each comparable case: client → how much higher its figure is than in the reference case."""
        first = self.cases[self.reference]
        return [gains(case, first, name, fixed=self.fixed) for case in self.cases[: self.comparable]]

    def own_gains(self) -> list[dict[str, float]]:
        """Of each case: client → its own model's accuracy less that of the shared model of the same run."""
        name, against = ACCURACIES[0], "shared_accuracy"
        return [gains(case, case, name, fixed=self.fixed, against=against) for case in self.cases]

    def paired(self, name: str) -> list[Paired | None]:
        """Each comparable case against the reference case, seed by seed; ``None`` for that case itself."""
        first, others = self.cases[self.reference], self.cases[: self.comparable]
        return [None if case is first else paired(case, first, name) for case in others]

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
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
                for figure in ACCURACIES
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
    """Figure → value over clients → its mean and deviation over the seeds."""
    told: dict[str, dict[str, dict[str, float | None]]] = {}
    for name in case.runs[0].figures:
        for of in OF:
            figure = fold(list(by_seed(case, name, of).values()))
            told.setdefault(name, {})[of] = {"mean": figure.mean, "std": figure.std}
    return told


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A short name for each run, no two alike: the directory's, with as many parents as it takes."""
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def case_names(known: Sequence[Case]) -> list[str]:
    """A short name for each case, no two alike: its first run's without the seed."""
    whole = labels([case.runs[0] for case in known])
    names = [
        re.sub(rf"[-_./ ]*seed[-_=]?{case.seeds[0]}$", "", name)
        for case, name in zip(known, whole, strict=True)
    ]
    return [own if own and names.count(own) == 1 else name for own, name in zip(names, whole, strict=True)]


def letters(count: int) -> list[str]:
    """Short names instead of long ones.

    >>> letters(3), letters(28)[-2:]
    (['A', 'B', 'C'], ['AA', 'AB'])
    """
    alphabet = [chr(ord("A") + number) for number in range(26)]
    return [*alphabet, *(first + second for first in alphabet for second in alphabet)][:count]


def disagreements(runs: Sequence[RunRecord]) -> dict[int, str]:
    """The runs whose figures cannot be compared with the first run's: index → why.

    They had other data, were judged on other pairs or clients, or began at another base model. A seed may
    decide who has which pairs, so each run is compared with the first one of its own seed.
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
            why.append(f"judged on {run.split} pairs, not {first.split} pairs")
        elif not why and peer and run.clients != peer.clients:
            why.append("evaluated on other clients")
        if run.config["model"]["name"] != first.config["model"]["name"]:
            why.append("another base model")
        if why:
            reasons[index] = ", ".join(why)
        else:
            of_seed.setdefault(run.seed, run)
    return reasons


def cases_apart(runs: Sequence[RunRecord]) -> tuple[list[Case], list[Case]]:
    """The cases that can be compared with the first run, and those that cannot: no case has runs of both."""
    marked = disagreements(runs)
    fine = [run for index, run in enumerate(runs) if index not in marked]
    return cases(fine), cases([runs[index] for index in marked])


def differences(runs: Sequence[RunRecord]) -> dict[str, list[str | None]]:
    """The settings in which runs differ: dotted name → each run's value, ``None`` where it has none.

    A method's own settings are compared between the runs of methods that have them. ``[engine]`` says where
    the work was done and decides nothing, so it is left out.
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


def plus_minus(values: Mapping[int, float]) -> str:
    """Mean ± sample standard deviation of a metric; only the mean of one seed; empty without any.

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
    """What a reader must know of tests over few seeds."""
    reference = reference_case(known)
    first = set(known[reference].seeds)
    counts = [len(first & set(case.seeds)) for k, case in enumerate(known) if k != reference]
    most = max(counts, default=len(first))
    if most < 2:
        return "One seed shows little: differences between cases may be due to the seed. Run several seeds."
    least = f"with {most} Wilcoxon's p cannot be below {2 / 2**most:.3g}"
    if most < 6:
        return f"{most} seeds show little: {least}, and the t-test assumes normal differences."
    return f"{most} seeds in common: {least}. The t-test assumes normal differences."
