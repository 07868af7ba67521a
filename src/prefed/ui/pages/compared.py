"""Runs side by side, as the page and ``--json`` have them: cases, what differs, who gains, seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prefed.runs.record import RunRecord
from prefed.runs.replicates import Case
from prefed.runs.seeds import (
    ACCURACIES,
    Paired,
    by_client,
    by_seed,
    fixed_clients,
    fold,
    gains,
    paired,
    reference_case,
)
from prefed.ui.pages.differences import case_names, cases_apart, differences, disagreements, labels, letters

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
        """Runs that differ in their seed alone, together."""
        comparable, others = cases_apart(self.runs)
        return [*comparable, *others]

    @cached_property
    def comparable(self) -> int:
        """How many cases can be compared with the first run: so many of the first."""
        return len(cases_apart(self.runs)[0])

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
        names = labels(self.runs)
        return {names[index]: why for index, why in disagreements(self.runs).items()}

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
        names = labels(self.runs)
        of_run = {run.path: name for run, name in zip(self.runs, names, strict=True)}
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
                for name, run in zip(names, self.runs, strict=True)
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
