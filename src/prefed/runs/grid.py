"""A sweep of one experiment file over a grid of settings and several seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Literal

from prefed.config import ConfigError
from prefed.config.grid import Combination
from prefed.core.text import pluralize
from prefed.runs.child import CommandError, SweepRun, in_turn, run_in_process

Judge = Literal["preference_accuracy", "reward_accuracy"]


@dataclass(frozen=True)
class Chosen:
    """What was chosen among combinations of the same data.

    Attributes:
        among: they, the best first, each with its figure on validation pairs: seed → mean over clients.
    """

    among: tuple[tuple[Combination, dict[int, float]], ...]

    @property
    def combination(self) -> Combination:
        """The one that is chosen."""
        return self.among[0][0]

    @property
    def at_end_of(self) -> list[str]:
        """Keys whose chosen number is the lowest or the highest that was tried."""
        keys = []
        for key, value in self.combination.values.items():
            tried = {each.values[key] for each, _ in self.among if isinstance(each.values[key], int | float)}
            if len(tried) > 1 and value in (min(tried), max(tried)):
                keys.append(key)
        return keys


@dataclass
class GridSweep:
    """Carries out every combination with every seed, and chooses on validation pairs alone.

    Attributes:
        path: the experiment file.
        folder: runs lie in ``FOLDER/COMBINATION-seedSEED``.
        overrides: ``KEY=VALUE`` for every run.
        judge: the figure that chooses, its mean over clients and seeds.
        failed: the runs that failed, each with its log if there is one.
    """

    path: Path
    combinations: Sequence[Combination]
    seeds: Sequence[int]
    folder: Path
    overrides: tuple[str, ...] = ()
    judge: Judge = "preference_accuracy"
    tell: Callable[[str], None] = print
    do: Callable[[SweepRun], Awaitable[None]] = run_in_process
    failed: list[str] = field(default_factory=list)

    @cached_property
    def groups(self) -> list[list[Combination]]:
        """The combinations, those of the same data together: among these is chosen."""
        groups: dict[tuple[str, ...], list[Combination]] = {}
        for each in self.combinations:
            groups.setdefault(each.of_data, []).append(each)
        return list(groups.values())

    @cached_property
    def chooses(self) -> bool:
        """Whether there is anything to choose. Otherwise runs are judged as their file says."""
        return any(len(group) > 1 for group in self.groups)

    def run_of(self, combination: Combination, seed: int, *, test: bool = False) -> SweepRun:
        """The run of a combination with a seed.

        Raises:
            ConfigError: its settings are not valid.
        """
        own = [f"seed={seed}", "engine.threads=1"]
        own += ["evaluate.split=validation"] if self.chooses else []
        experiment = combination.experiment(self.path, self.overrides, own)
        return SweepRun(experiment, self.folder / f"{combination.name}-seed{seed}", test)

    def check(self) -> None:
        """See that every combination is valid, and fits what is there already.

        Raises:
            ConfigError: a combination is not valid, or there are no validation pairs to choose on.
            ValueError: a run directory holds a run of other settings, or a file or folder is missing.
        """
        runs = [self.run_of(each, seed) for each in self.combinations for seed in self.seeds]
        # Imported here: invalid settings are found before the data's libraries are loaded.
        from prefed.runs.sweep_check import may_have_validation_pairs, missing_paths

        for override in self.overrides:
            key = override.partition("=")[0].strip()
            if key == "seed" or (key == "evaluate.split" and self.chooses):
                raise ConfigError(f"--set {override}: a sweep sets {key} itself: see --seeds and --grid")
        missing = {path for run in runs for path in missing_paths(run.experiment, self.path.parent)}
        if missing:
            raise ValueError(
                f"{self.path}: there is no {', '.join(sorted(missing))}; say with --set where it lies"
            )
        if self.chooses and not all(may_have_validation_pairs(run.experiment.data) for run in runs):
            raise ConfigError(
                f"{self.path}: a sweep chooses on validation pairs, and there are none: set data.validation "
                "or data.validation_fraction, in the file or with --set"
            )
        for run in runs:
            run.check()

    async def carry_out(self, jobs: int) -> list[Chosen]:
        """Carry out what is not finished, ``jobs`` runs at a time; judge what is chosen on test pairs.

        A run that fails is told and left out, and nothing is chosen then.
        """
        runs = [self.run_of(each, seed) for each in self.combinations for seed in self.seeds]
        counts = (
            pluralize(len(self.combinations), "combination", "combinations"),
            pluralize(len(self.seeds), "seed", "seeds"),
            pluralize(len(runs), "run", "runs"),
        )
        self.tell(f"{', '.join(counts)}, {sum(run.finished for run in runs)} finished already")
        await self._all(runs, jobs)
        if self.failed or not self.chooses:
            return []
        chosen = [self._choose(group) for group in self.groups]
        for each in chosen:
            self.tell(f"chosen on validation pairs: {each.combination.name}")
        await self._all(
            [self.run_of(each.combination, seed, test=True) for each in chosen for seed in self.seeds], jobs
        )
        return chosen

    async def _all(self, runs: Sequence[SweepRun], jobs: int) -> None:
        slots = asyncio.Semaphore(jobs)

        async def one(run: SweepRun) -> None:
            try:
                await in_turn(run, slots, self.folder, self.tell, self.do)
            except Exception as error:
                log = f": {error.log}" if isinstance(error, CommandError) else ""
                self.failed.append(f"{run.out.name}{log}")
                self.tell(f"FAILED {run.out.name}: {error}")

        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(one(run))

    def _choose(self, group: Sequence[Combination]) -> Chosen:
        """The best of a group by its mean over seeds; of equal ones the first."""
        figures = []
        for each in group:
            runs = {seed: self.run_of(each, seed) for seed in self.seeds}
            figures.append((each, {s: float(run.summary[self.judge]["mean"]) for s, run in runs.items()}))
        return Chosen(tuple(sorted(figures, key=lambda pair: -fmean(pair[1].values()))))
