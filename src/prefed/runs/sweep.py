"""Sweeps: the cells of a table, or a grid over one experiment, each run in a process of its own."""

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
    """A cell to carry out.

    Attributes:
        definition: the cell as its table defines it.
        folder: its runs lie in ``FOLDER/CELL-lrRATE-seedSEED``, without the rate where none is chosen.
        overrides: ``KEY=VALUE`` for every run.
        validation: all its runs are judged on validation pairs, by which one of several cells is chosen.
    """

    definition: Cell
    table: Table
    folder: Path
    overrides: tuple[str, ...] = ()
    validation: bool = False

    @property
    def name(self) -> str:
        """Table and cell, for messages."""
        return f"{self.folder.name} {self.definition.name}"

    def run_of(self, seed: int, lr: float | None = None, *, test: bool = False) -> SweepRun:
        """The run with a seed, and with a learning rate if one is to be chosen.

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
        """The runs to begin with: each rate with the first seed, or every seed where there are no rates."""
        first, rates = self.table.seeds[0], dict.fromkeys(self.definition.rates)
        return [self.run_of(first, lr) for lr in rates] or [self.run_of(seed) for seed in self.table.seeds]

    def count(self) -> tuple[int, int]:
        """How many runs the cell has, without rates beyond the table's, and how many are finished."""
        first, *others = self.table.seeds
        rates: list[float | None] = [*dict.fromkeys(self.definition.rates)] or [None]
        finished = sum(self.run_of(first, lr).finished for lr in rates)
        finished += sum(any(self.run_of(seed, lr).finished for lr in rates) for seed in others)
        return len(rates) + len(others), finished

    def best_rate_outcome(self, validation: Mapping[float, float]) -> dict[str, Any]:
        """What the table keeps of the cell, once the runs of its best rate are evaluated.

        Args:
            validation: rate → figure on validation pairs.
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
        """What the table keeps of a cell without a choice of rates, once its runs are finished."""
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
    """A figure over clients in each round that was evaluated."""
    lines = (run.out / "rounds.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record["evaluation"][figure] for record in records if "evaluation" in record]


def _sent(run: SweepRun) -> int:
    sent = run.summary["bytes"]
    return int(sent["up"] + sent["down"])


def sweep_cells(path: Path, out: Path, overrides: Sequence[str] = ()) -> list[SweepCell]:
    """The cells of a table's file; ``out`` is the folder of all tables.

    Raises:
        ConfigError: the table is not valid.
    """
    table = load_table(path)
    folder, values = out / path.stem, tuple(overrides)
    return [SweepCell(cell, table, folder, values) for cell in table.cells(path).values()]


def _commits(runs: Sequence[SweepRun]) -> list[str]:
    return sorted({commit for run in runs for commit in commits(run.out)})


def _best(figures: Mapping[float, float]) -> float:
    """The rate with the highest figure, the smaller one on a tie.

    >>> _best({1e-3: 0.5, 3e-3: 0.6, 9e-3: 0.6})
    0.003
    """
    return max(sorted(figures), key=lambda lr: figures[lr])


def all_equal(figures: Mapping[float, float]) -> bool:
    """Whether every rate comes to the same figure, so that no other rate would be better.

    So it is with one model for clients who want opposite things: it gets one of every two right.
    """
    return len(figures) > 1 and max(figures.values()) - min(figures.values()) < 1e-9


def next_rate(figures: Mapping[float, float], most: int) -> float | None:
    """The rate to try next: beyond the best one if that lies at an end, as far again as its neighbour.

    >>> next_rate({1e-3: 0.5, 3e-3: 0.6}, most=9), next_rate({3e-3: 0.5, 9e-3: 0.6}, most=9)
    (0.009, 0.03)

    Args:
        figures: rate → figure, for each rate that was tried.
        most: how many rates may be tried in all.

    Returns:
        The rate, of one digit; ``None`` if the best one lies inside, all are alike, or ``most`` are tried.
    """
    rates, top = sorted(figures), _best(figures)
    if all_equal(figures) or not 2 <= len(rates) < most or top not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if top == rates[0] else rates[-2]
    return float(f"{top * top / neighbour:.1g}")


@dataclass
class Sweep:
    """Carries out cells, ``jobs`` runs at a time.

    At most ``jobs`` cells are under way. So every job has work, and cells finish one after the other.

    Attributes:
        done: takes each cell that is finished, with what the table keeps of it.
        tell: takes a line about each thing that has happened.
        failed: the cells that failed, each with the log of the run that ended it if there is one.
    """

    jobs: int
    done: Callable[[SweepCell, dict[str, Any]], None]
    tell: Callable[[str], None] = print
    do: Callable[[SweepRun], Awaitable[None]] = run_in_process
    failed: list[str] = field(default_factory=list)

    async def carry_out(self, cells: Sequence[SweepCell]) -> None:
        """Carry out all runs that are not finished. A cell that fails is left out, and the others go on."""
        counts = [cell.count() for cell in cells]
        runs, finished = (sum(each) for each in zip(*counts, strict=True))
        further = " or more" if any(cell.definition.rates and cell.table.further for cell in cells) else ""
        listed = (pluralize(len(cells), "cell", "cells"), pluralize(runs, "run", "runs") + further)
        self.tell(f"{', '.join(listed)}, {finished} finished already")
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
            self.tell(f"{cell.name} is done, {count} of {len(cells)} cells")

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
    """See that every cell is valid, fits what is there already, and has its files.

    Raises:
        ConfigError: a cell's settings are not valid, an override sets what the sweep sets, or there are no
            validation pairs to choose on.
        ValueError: a run directory holds a run of other settings, or a file or folder is missing.
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
            f"there is no {', '.join(missing.values())}; say with --set where it lies, or prepare it as the "
            "README beside the experiment says"
        )
    for cell, runs in planned:
        chooses = cell.definition.rates or cell.validation
        if chooses and not may_have_validation_pairs(runs[0].experiment.data):
            raise ConfigError(
                f"{cell.definition.path}: a sweep chooses on validation pairs, and {cell.definition.name!r} "
                "has none: set data.validation or data.validation_fraction, in the file or with --set"
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
            where = "see --seeds and --grid" if cell.definition.grid is not None else "change it in the table"
            raise ConfigError(f"--set {override}: a sweep sets {key} itself: {where}")


def missing_paths(experiment: Experiment, beside: Path) -> Iterator[str]:
    """The files and folders that an experiment names and that are not there; its file lies in ``beside``."""
    from prefed.data.sources.huggingface import looks_like_hub_name

    reward = getattr(experiment.method.settings, "reward_model", None)
    fleet, graph = experiment.fleet, experiment.whole_graph
    named = [reward, fleet.trace if fleet else None, graph.file if graph else None]
    for path in [*(source.path for _, _, source in experiment.data.sources()), *filter(None, named)]:
        if not looks_like_hub_name(path) and not Path(path).exists():
            yield path
    model = Path(experiment.model.name).expanduser()
    folders = [Path(), beside]
    # A name without a slash, or an owner and a name, is a hub name unless its folder is on this machine.
    local = len(model.parts) != 1 and any((folder / model).parent.is_dir() for folder in folders)
    if not model.exists() and (local or model.is_absolute() or len(model.parts) > 2):
        yield experiment.model.name


def may_have_validation_pairs(data: DataConfig) -> bool:
    """Whether settings, or the first rows of files on this machine, speak of validation pairs."""
    from prefed.data.errors import ErrorCollector
    from prefed.data.sources.files import read_rows
    from prefed.data.sources.folders import data_files

    if data.validation is not None or data.validation_fraction:
        return True
    if data.columns is not None:
        return data.columns.split is not None
    for role, _, source in data.sources():
        if role == "train" and not Path(source.path).exists():
            return True  # on the hub: its rows may say
        for file in data_files(Path(source.path), source.split or role) if role == "train" else ():
            try:
                rows = read_rows(file, data.encoding, ErrorCollector())
                if any("split" in row for row, _ in islice(rows, 1)):
                    return True
            except DataError:
                return True  # the run says what is wrong with the file
    return False


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

    @cached_property
    def cells(self) -> dict[str, SweepCell]:
        """The grid as the cells of a table, by the combinations' names."""
        table, cells = grid_table(self.path, self.combinations, self.seeds, self.judge)
        return {
            name: SweepCell(cell, table, self.folder, self.overrides, self.chooses)
            for name, cell in cells.items()
        }

    def run_of(self, combination: Combination, seed: int, *, test: bool = False) -> SweepRun:
        """The run of a combination with a seed.

        Raises:
            ConfigError: its settings are not valid.
        """
        return self.cells[combination.name].run_of(seed, test=test)

    def check(self) -> None:
        """See that every combination is valid, and fits what is there already; raises as
        :func:`check_cells`.
        """
        check_cells(list(self.cells.values()))

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
