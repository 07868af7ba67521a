"""Sweeps: run the cells of a table, or a grid over one experiment, each run in a separate process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from prefed.config import ConfigError, Experiment
from prefed.config.table import Cell, Combination, Judge, Table, grid_table, load_table
from prefed.core.text import pluralize
from prefed.data import DataConfig, DataError
from prefed.runs.sweep_child import KEPT, CommandError, SweepRun, commits, in_turn, run_in_process


@dataclass(frozen=True)
class SweepCell:
    """A cell of a table, and the folder of its runs.

    Attributes:
        folder: runs are in ``FOLDER/CELL-lrRATE-seedSEED``; without ``-lrRATE`` if no rate is selected.
        overrides: ``KEY=VALUE`` for every run.
        validation: evaluate on validation pairs, to select one of several cells.
    """

    definition: Cell
    table: Table
    folder: Path
    overrides: tuple[str, ...] = ()
    validation: bool = False

    @property
    def name(self) -> str:
        """The table and the cell, for messages."""
        return f"{self.folder.name} {self.definition.name}"

    def run_of(self, seed: int, lr: float | None = None, *, test: bool = False) -> SweepRun:
        """Return the run with this seed, and with this learning rate if one is selected.

        Raises:
            ConfigError: its settings are not valid.
        """
        name, first, last = self.definition.name, "engine.threads=1", [f"seed={seed}"]
        if lr is not None:
            last.append(f"method.lr={lr!r}")
            name += f"-lr{lr:g}"
        if lr is not None or self.validation:
            last.append("evaluate.split=validation")
        experiment = self.definition.experiment(first, *self.overrides, *last, own=(first, *last))
        return SweepRun(experiment, self.folder / f"{name}-seed{seed}", test)

    def planned(self) -> list[SweepRun]:
        """Return the initial runs: each rate with the first seed, or every seed if there are no rates."""
        first, rates = self.table.seeds[0], dict.fromkeys(self.definition.rates)
        return [self.run_of(first, lr) for lr in rates] or [self.run_of(seed) for seed in self.table.seeds]

    def count(self) -> tuple[int, int]:
        """Return the number of runs, without rates beyond those of the table, and of finished runs."""
        first, *others = self.table.seeds
        rates: list[float | None] = [*dict.fromkeys(self.definition.rates)] or [None]
        finished = sum(self.run_of(first, lr).finished for lr in rates)
        finished += sum(any(self.run_of(seed, lr).finished for lr in rates) for seed in others)
        return len(rates) + len(others), finished

    def best_rate_outcome(self, validation: Mapping[float, float]) -> dict[str, Any]:
        """Return the row of a cell with a selected rate, once the runs of the best rate are evaluated.

        Args:
            validation: rate → metric on validation pairs.
        """
        lr, seeds = _best(validation), self.table.seeds
        runs = [self.run_of(seed, lr) for seed in seeds]
        outcome = {**self._about(), "lr": lr, "validation": dict(sorted(validation.items()))}
        tests = [run.figures or {} for run in runs]
        for name in KEPT:
            for figure in ("mean", "worst"):
                outcome[f"{name}.{figure}"] = [test[name][figure] for test in tests if name in test]
        outcome["bytes"] = [_sent(run) for run in runs]
        outcome["seconds"] = [run.summary["seconds"] for run in runs]
        outcome["commits"] = _commits([*runs, *(self.run_of(seeds[0], rate) for rate in validation)])
        return outcome

    def own_rate_outcome(self) -> dict[str, Any]:
        """Return the row of a cell without rates to select, once its runs are finished."""
        runs = [self.run_of(seed) for seed in self.table.seeds]
        rounds = [_evaluations(run, self.table.judge) for run in runs]
        tops = [max(figures, key=lambda figure: figure["mean"]) for figures in rounds]
        return {
            **self._about(),
            "runs": [
                {
                    "seed": seed,
                    "last": figures[-1]["mean"],
                    "best": top["mean"],
                    "worst": top["worst"],
                    "clients": top.get("per_client", {}),
                    "bytes": _sent(run),
                    "seconds": run.summary["seconds"],
                }
                for seed, run, figures, top in zip(self.table.seeds, runs, rounds, tops, strict=True)
            ],
            "commits": _commits(runs),
        }

    def _about(self) -> dict[str, Any]:
        cell = self.definition
        paper = {"figure": cell.paper, "clients": dict(cell.clients)}
        return {
            "method": cell.name,
            "text": cell.text,
            "judge": self.table.judge,
            "seeds": list(self.table.seeds),
            **({"paper": paper} if cell.paper else {}),
        }


def _evaluations(run: SweepRun, figure: str) -> list[dict[str, Any]]:
    lines = (run.out / "rounds.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record["evaluation"][figure] for record in records if "evaluation" in record]


def _sent(run: SweepRun) -> int:
    sent = run.summary["bytes"]
    return int(sent["up"] + sent["down"])


def sweep_cells(path: Path, out: Path, overrides: Sequence[str] = ()) -> list[SweepCell]:
    """Return the cells of a table.

    Args:
        path: the file of the table.
        out: the folder of all tables.

    Raises:
        ConfigError: the table is not valid.
    """
    table = load_table(path)
    folder, values = out / path.stem, tuple(overrides)
    return [SweepCell(cell, table, folder, values) for cell in table.cells(path).values()]


def _commits(runs: Sequence[SweepRun]) -> list[str]:
    return sorted({commit for run in runs for commit in commits(run.out)})


def _best(figures: Mapping[float, float]) -> float:
    """Return the rate with the highest metric; on a tie, the smaller rate.

    >>> _best({1e-3: 0.5, 3e-3: 0.6, 9e-3: 0.6})
    0.003
    """
    return max(sorted(figures), key=lambda lr: figures[lr])


def all_equal(figures: Mapping[float, float]) -> bool:
    """Whether the metric is the same for every rate, e.g. a shared model for clients with opposite tastes."""
    return len(figures) > 1 and max(figures.values()) - min(figures.values()) < 1e-9


def next_rate(figures: Mapping[float, float], most: int) -> float | None:
    """Extrapolate the next rate to try if the best one is the lowest or the highest so far.

    >>> next_rate({1e-3: 0.5, 3e-3: 0.6}, most=9), next_rate({3e-3: 0.5, 9e-3: 0.6}, most=9)
    (0.009, 0.03)

    Args:
        figures: rate → metric, for each rate that was tried.
        most: maximal number of rates.

    Returns:
        The rate, rounded to one digit; ``None`` if the best rate is in the interior, all rates give the same
        metric, or ``most`` rates were tried.
    """
    rates, top = sorted(figures), _best(figures)
    if all_equal(figures) or not 2 <= len(rates) < most or top not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if top == rates[0] else rates[-2]
    return float(f"{top * top / neighbour:.1g}")


@dataclass
class Sweep:
    """Runs cells, with at most ``jobs`` runs and ``jobs`` cells at a time.

    Attributes:
        done: called with each finished cell and its row for the table.
        tell: called with each line of progress.
        do: runs or resumes one run.
        failed: the cells that failed, each with the log file of the failed run if there is one.
    """

    jobs: int
    done: Callable[[SweepCell, dict[str, Any]], None]
    tell: Callable[[str], None] = print
    do: Callable[[SweepRun], Awaitable[None]] = run_in_process
    failed: list[str] = field(default_factory=list)

    async def carry_out(self, cells: Sequence[SweepCell]) -> None:
        """Run everything that is not finished. If a cell fails, the others continue."""
        counts = [cell.count() for cell in cells]
        runs, finished = (sum(each) for each in zip(*counts, strict=True))
        further = " or more" if any(cell.definition.rates and cell.table.further for cell in cells) else ""
        listed = (pluralize(len(cells), "cell", "cells"), pluralize(runs, "run", "runs") + further)
        self.tell(f"{', '.join(listed)}, {finished} already finished")
        cell_slots, run_slots = asyncio.Semaphore(self.jobs), asyncio.Semaphore(self.jobs)
        count = 0

        async def one(cell: SweepCell) -> None:
            nonlocal count
            async with cell_slots:
                try:
                    outcome = await self._cell(cell, run_slots)
                except Exception as error:
                    reason = error
                    while isinstance(reason, ExceptionGroup):
                        reason = reason.exceptions[0]
                    log = f": {reason.log}" if isinstance(reason, CommandError) else ""
                    self.failed.append(f"{cell.name}{log}")
                    self.tell(f"FAILED {cell.name}: {reason}")
                    return
            self.done(cell, outcome)
            count += 1
            self.tell(f"finished {cell.name}, {count} of {len(cells)} cells")

        async with asyncio.TaskGroup() as group:
            for cell in cells:
                group.create_task(one(cell))

    async def _cell(self, cell: SweepCell, run_slots: asyncio.Semaphore) -> dict[str, Any]:
        async def carry_out(run: SweepRun) -> None:
            await in_turn(run, run_slots, cell.folder, self.tell, self.do)

        async def all_seeds(lr: float | None) -> None:
            async with asyncio.TaskGroup() as group:
                for seed in cell.table.seeds:
                    group.create_task(carry_out(cell.run_of(seed, lr, test=lr is not None)))

        rates = cell.definition.rates
        if not rates:
            await all_seeds(None)
            return cell.own_rate_outcome()
        validation: dict[float, float] = {}

        async def try_rate(lr: float) -> None:
            run = cell.run_of(cell.table.seeds[0], lr)
            await carry_out(run)
            validation[lr] = float(run.summary[cell.table.judge]["mean"])
            self.tell(f"{cell.name} lr {lr:g}: validation {validation[lr]:.3f}")

        async with asyncio.TaskGroup() as group:
            for lr in dict.fromkeys(rates):
                group.create_task(try_rate(lr))
        while (further := next_rate(validation, len(set(rates)) + cell.table.further)) is not None:
            await try_rate(further)
        await all_seeds(_best(validation))
        return cell.best_rate_outcome(validation)


def check_cells(cells: Sequence[SweepCell]) -> None:
    """Check settings, files and existing run directories of all cells.

    Raises:
        ConfigError: settings are not valid, an override sets a key that the sweep sets, or there are no
            validation pairs for the selection.
        ValueError: a run directory contains a run with other settings, or a file or folder is missing.
    """
    planned = [(cell, cell.planned()) for cell in cells]
    missing: dict[str, str] = {}
    for cell, runs in planned:
        _check_overrides(cell)
        path = cell.definition.path
        for name in missing_paths(runs[0].experiment, path.parent):
            where = str(path) if cell.definition.grid is not None else f"{path}, cell {cell.definition.name}"
            if not Path(name).is_absolute():
                folders = dict.fromkeys((path.parent.resolve(), Path.cwd()))
                where += f"; looked in {' and '.join(map(str, folders))}"
            missing.setdefault(name, f"{name} ({where})")
    if missing:
        raise ValueError(
            f"not found: {', '.join(missing.values())}; set the path with --set, or prepare the files as "
            "described in the README of the experiment"
        )
    for cell, runs in planned:
        chooses = cell.definition.rates or cell.validation
        if chooses and not may_have_validation_pairs(runs[0].experiment.data):
            raise ConfigError(
                f"{cell.definition.path}: {cell.definition.name!r} has no validation pairs, which a sweep "
                "needs for its selection: set data.validation or data.validation_fraction"
            )
    for _, runs in planned:
        for run in runs:
            run.check()


def _check_overrides(cell: SweepCell) -> None:
    sets = {"seed"}
    sets |= {"method.lr", "evaluate.split"} if cell.definition.rates else set()
    sets |= {"evaluate.split"} if cell.validation else set()
    for override in cell.overrides:
        key = override.partition("=")[0].strip()
        if key in sets:
            where = "use --seeds or --grid" if cell.definition.grid is not None else "change it in the table"
            raise ConfigError(f"--set {override}: {key} is set by the sweep; {where}")


def missing_paths(experiment: Experiment, beside: Path) -> Iterator[str]:
    """Yield the paths in an experiment that do not exist.

    Args:
        beside: the folder of the experiment file.
    """
    from prefed.data.sources.huggingface import looks_like_hub_name

    reward = getattr(experiment.method.settings, "reward_model", None)
    fleet, graph = experiment.fleet, experiment.whole_graph
    named = [reward, fleet.trace if fleet else None, graph.file if graph else None]
    for path in [*(source.path for _, _, source in experiment.data.sources()), *filter(None, named)]:
        if not looks_like_hub_name(path) and not Path(path).exists():
            yield path
    model = Path(experiment.model.name).expanduser()
    folders = [Path(), beside]
    # NAME and OWNER/NAME are hub names, unless the parent folder exists here.
    local = len(model.parts) != 1 and any((folder / model).parent.is_dir() for folder in folders)
    if not model.exists() and (local or model.is_absolute() or len(model.parts) > 2):
        yield experiment.model.name


def may_have_validation_pairs(data: DataConfig) -> bool:
    """Whether the settings, or the first rows of local files, allow for validation pairs."""
    from prefed.data.errors import ErrorCollector
    from prefed.data.sources.files import read_rows
    from prefed.data.sources.folders import data_files

    if data.validation is not None or data.validation_fraction:
        return True
    if data.columns is not None:
        return data.columns.split is not None
    for role, _, source in data.sources():
        if role == "train" and not Path(source.path).exists():
            return True  # on the hub: rows may have a column "split"
        for file in data_files(Path(source.path), source.split or role) if role == "train" else ():
            try:
                rows = read_rows(file, data.encoding, ErrorCollector())
                if any("split" in row for row, _ in islice(rows, 1)):
                    return True
            except DataError:
                return True  # the run reports the error in the file
    return False


@dataclass(frozen=True)
class Chosen:
    """The combination selected from those that share their data.

    Attributes:
        among: all of them, the best first; each with seed → metric on validation pairs, mean over clients.
    """

    among: tuple[tuple[Combination, dict[int, float]], ...]

    @property
    def combination(self) -> Combination:
        """The selected combination."""
        return self.among[0][0]

    @property
    def at_end_of(self) -> list[str]:
        """Keys whose selected number is the lowest or the highest that was tried."""
        keys = []
        for key, value in self.combination.values.items():
            tried = {each.values[key] for each, _ in self.among if isinstance(each.values[key], int | float)}
            if len(tried) > 1 and value in (min(tried), max(tried)):
                keys.append(key)
        return keys


@dataclass
class GridSweep:
    """Runs every combination with every seed, and selects the best on validation pairs.

    Attributes:
        path: the experiment file.
        folder: runs are in ``FOLDER/COMBINATION-seedSEED``.
        overrides: ``KEY=VALUE`` for every run.
        judge: the metric for the selection, as a mean over clients and seeds.
        tell, do: as for :class:`Sweep`.
        failed: the runs that failed, each with its log file if there is one.
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
        """The combinations, grouped by their data. One of each group is selected."""
        groups: dict[tuple[str, ...], list[Combination]] = {}
        for each in self.combinations:
            groups.setdefault(each.of_data, []).append(each)
        return list(groups.values())

    @cached_property
    def chooses(self) -> bool:
        """Whether a group has several combinations. Otherwise the file decides on the evaluated split."""
        return any(len(group) > 1 for group in self.groups)

    @cached_property
    def cells(self) -> dict[str, SweepCell]:
        """The grid as cells of a table, by the names of the combinations."""
        table, cells = grid_table(self.path, self.combinations, self.seeds, self.judge)
        return {
            name: SweepCell(cell, table, self.folder, self.overrides, self.chooses)
            for name, cell in cells.items()
        }

    def run_of(self, combination: Combination, seed: int, *, test: bool = False) -> SweepRun:
        """Return the run of a combination with a seed.

        Raises:
            ConfigError: its settings are not valid.
        """
        return self.cells[combination.name].run_of(seed, test=test)

    def check(self) -> None:
        """Call :func:`check_cells` for all combinations."""
        check_cells(list(self.cells.values()))

    async def carry_out(self, jobs: int) -> list[Chosen]:
        """Run what is not finished, ``jobs`` runs at a time; evaluate the selected runs on test pairs.

        If a run fails, the others continue, but nothing is selected.
        """
        runs = [self.run_of(each, seed) for each in self.combinations for seed in self.seeds]
        counts = (
            pluralize(len(self.combinations), "combination", "combinations"),
            pluralize(len(self.seeds), "seed", "seeds"),
            pluralize(len(runs), "run", "runs"),
        )
        self.tell(f"{', '.join(counts)}, {sum(run.finished for run in runs)} already finished")
        await self._all(runs, jobs)
        if self.failed or not self.chooses:
            return []
        chosen = [self._choose(group) for group in self.groups]
        for each in chosen:
            self.tell(f"selected on validation pairs: {each.combination.name}")
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
        """Select the best of a group by its mean over seeds; on a tie, the first."""
        figures = []
        for each in group:
            runs = {seed: self.run_of(each, seed) for seed in self.seeds}
            figures.append((each, {s: float(run.summary[self.judge]["mean"]) for s, run in runs.items()}))
        return Chosen(tuple(sorted(figures, key=lambda pair: -fmean(pair[1].values()))))
