"""Sweeps: run the cells of a table, or a grid over one experiment, each run in a separate process."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from prefed.config import ConfigError, Experiment
from prefed.config.experiment_table import Cell, Judge, Table, grid_table, load_table
from prefed.config.grid import Combination
from prefed.core.text import did_you_mean, pluralize
from prefed.data import DataConfig, DataError
from prefed.runs.sweep_child import (
    NEWCOMERS,
    CommandError,
    CommandProcesses,
    SweepRun,
    commits,
    run_in_process,
)
from prefed.train.metrics import COMPARED_METRICS

T = TypeVar("T")
Rates: TypeAlias = Mapping[str, float]
"""Key of ``[method]`` → value: ``lr``, then the separate rates that differ from the row's own."""
NO_RATES: Rates = MappingProxyType({})


@dataclass
class Tried:
    """The values of one rate that were tried with the first seed.

    Attributes:
        validation: value → metric on validation pairs.
        broken: the values that break text.
        rates: value → all rates of its run.
    """

    validation: dict[float, float] = field(default_factory=dict)
    broken: set[float] = field(default_factory=set)
    rates: dict[float, Rates] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """The best value."""
        return _best(self.validation, self.broken)

    def outcome(self, name: str) -> dict[str, Any]:
        """Return the best value under ``name``, and ``validation`` in the order of values."""
        return {name: self.best, "validation": dict(sorted(self.validation.items()))}


@dataclass(frozen=True)
class SweepCell:
    """A cell of a table, and the folder of its runs.

    Attributes:
        folder: runs are in ``FOLDER/CELL-lrRATE-seedSEED``; without ``-lrRATE`` if no rate is selected, and
            with ``-KEYRATE`` for each separate rate that is not the row's own.
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

    @property
    def combination(self) -> Combination:
        """The combination of a cell of a grid."""
        assert self.definition.grid is not None
        return self.definition.grid

    def run_of(self, seed: int, rates: Rates = NO_RATES, *, test: bool = False) -> SweepRun:
        """Return the run with this seed, and with these rates if any is selected.

        Raises:
            ConfigError: its settings are not valid.
        """
        first, last = "engine.threads=1", [f"seed={seed}"]
        name = "".join([self.definition.name, *(f"-{key}{value:g}" for key, value in rates.items())])
        last += [f"method.{key}={value!r}" for key, value in rates.items()]
        if rates or self.validation:
            last.append("evaluate.split=validation")
        experiment = self.definition.experiment(first, *self.overrides, *last, own=(first, *last))
        return SweepRun(experiment, self.folder / f"{name}-seed{seed}", test)

    def planned(self) -> list[SweepRun]:
        """Return the initial runs: each rate with the first seed, or every seed if there are no rates."""
        first, rates = self.table.seeds[0], dict.fromkeys(self.definition.rates)
        runs = [self.run_of(first, {"lr": lr}) for lr in rates]
        return runs or [self.run_of(seed) for seed in self.table.seeds]

    def own_value(self, key: str, rates: Rates) -> float:
        """Return the row's value of a separate rate, given the rates selected before it.

        Raises:
            ConfigError: the method has no such setting, or it has no number.
        """
        settings, value = self.run_of(self.table.seeds[0], rates).experiment.method.settings, None
        if key in (known := type(settings).model_fields):
            value = getattr(settings, key)
        if isinstance(value, int | float) and value > 0:
            return float(value)
        raise ConfigError(
            f"{self.definition.path}: {self.definition.name!r} has separate = [{key!r}], but method.{key} is "
            + (f"{value!r}: set it to a positive number" if key in known else "no setting of its method")
            + did_you_mean(key, known)
        )

    def count(self) -> tuple[int, int]:
        """Return the number of runs, without those of further and separate rates, and of finished runs."""
        first, *others = self.table.seeds
        rates: list[Rates] = [{"lr": lr} for lr in dict.fromkeys(self.definition.rates)] or [NO_RATES]
        finished = sum(self.run_of(first, lr).finished for lr in rates)
        finished += sum(any(self.run_of(seed, lr).finished for lr in rates) for seed in others)
        return len(rates) + len(others), finished

    def best_rate_outcome(self, rates: Rates, tried: Mapping[str, Tried]) -> dict[str, Any]:
        """Return the row of a cell with selected rates, once the runs of the best rates are evaluated.

        Args:
            rates: those of the best run.
            tried: each rate that was selected, in order.
        """
        seeds = self.table.seeds
        runs = [self.run_of(seed, rates) for seed in seeds]
        outcome = {**self._about(), **tried["lr"].outcome("lr")}
        if separate := self.definition.separate:
            outcome["separate"] = {key: tried[key].outcome("value") for key in separate}
        if texts := [run.summary["text"] for run in runs if "text" in run.summary]:
            outcome |= {"health": texts, "broken": sorted(tried["lr"].broken)}
        tests = [run.figures or {} for run in runs]
        for name in (*COMPARED_METRICS, NEWCOMERS):
            for figure in ("mean", "worst"):
                outcome[f"{name}.{figure}"] = [test[name][figure] for test in tests if name in test]
        outcome["bytes"] = [_sent(run) for run in runs]
        outcome["seconds"] = [run.summary["seconds"] for run in runs]
        all_rates = [rates for each in tried.values() for rates in each.rates.values()]
        outcome["commits"] = commits_of([*runs, *(self.run_of(seeds[0], rates) for rates in all_rates)])
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
                    "worst": top.get("worst"),
                    "clients": top.get("per_client", {}),
                    "bytes": _sent(run),
                    "seconds": run.summary["seconds"],
                }
                for seed, run, figures, top in zip(self.table.seeds, runs, rounds, tops, strict=True)
            ],
            "commits": commits_of(runs),
        }

    def validation_metrics(self) -> dict[int, float]:
        """Return seed → metric on validation pairs, mean over clients, once the runs are finished."""
        judge = self.table.judge
        return {seed: float(self.run_of(seed).summary[judge]["mean"]) for seed in self.table.seeds}

    @property
    def breaks_text(self) -> bool:
        """Whether text is broken after the run of any seed."""
        return any(self.run_of(seed).breaks_text for seed in self.table.seeds)

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


def sweep_cells(
    path: Path, out: Path, overrides: Sequence[str] = (), method: str | None = None
) -> list[SweepCell]:
    """Return the cells of a table.

    Args:
        path: the file of the table.
        out: the folder of all tables.
        method: the method that replaces those of the table; see :meth:`Table.of_method`.

    Raises:
        ConfigError: the table is not valid.
    """
    table = load_table(path) if method is None else load_table(path).of_method(method)
    folder, values = out / path.stem, tuple(overrides)
    return [SweepCell(cell, table, folder, values) for cell in table.cells(path).values()]


def grid_cells(
    path: Path,
    combinations: Sequence[Combination],
    seeds: Sequence[int],
    folder: Path,
    overrides: Sequence[str] = (),
    judge: Judge = "preference_accuracy",
) -> list[SweepCell]:
    """Return the combinations of a grid over an experiment file as cells of a table.

    Args:
        folder: runs are in ``FOLDER/COMBINATION-seedSEED``.
        judge: the metric for the selection, as a mean over clients and seeds.

    Raises:
        ConfigError: as :func:`~prefed.config.experiment_table.grid_table`.
    """
    table, cells = grid_table(path, combinations, seeds, judge)
    # If there is nothing to select, the file decides on the evaluated split.
    selects = max(Counter(each.of_data for each in combinations).values()) > 1
    return [SweepCell(cell, table, folder, tuple(overrides), selects) for cell in cells]


def commits_of(runs: Sequence[SweepRun]) -> list[str]:
    """Return the commits of the code behind the runs."""
    return sorted({commit for run in runs for commit in commits(run.out)})


def _best(figures: Mapping[float, float], broken: Collection[float] = ()) -> float:
    """Return the rate with the highest metric; on a tie, the smaller rate.

    Args:
        broken: rates that break text, of which none is selected unless all do.

    >>> _best({1e-3: 0.5, 3e-3: 0.6, 9e-3: 0.6}), _best({1e-3: 0.5, 3e-3: 0.6}, {3e-3})
    (0.003, 0.001)
    """
    whole = sorted(figures.keys() - {*broken}) or sorted(figures)
    return max(whole, key=lambda lr: figures[lr])


def all_equal(figures: Mapping[float, float]) -> bool:
    """Whether the metric is the same for every rate, e.g. a shared model for clients with opposite tastes."""
    return len(figures) > 1 and max(figures.values()) - min(figures.values()) < 1e-9


def next_rate(figures: Mapping[float, float], most: int, broken: Collection[float] = ()) -> float | None:
    """Extrapolate the next rate to try if the best one is the lowest or the highest so far.

    >>> next_rate({1e-3: 0.5, 3e-3: 0.6}, most=9), next_rate({3e-3: 0.5, 9e-3: 0.6}, most=9)
    (0.009, 0.03)

    Args:
        figures: rate → metric, for each rate that was tried.
        most: maximal number of rates.
        broken: rates that break text.

    Returns:
        The rate, rounded to one digit; ``None`` if the best rate is in the interior, all rates give the same
        metric, or ``most`` rates were tried.
    """
    rates, top = sorted(figures), _best(figures, broken)
    if all_equal(figures) or not 2 <= len(rates) < most or top not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if top == rates[0] else rates[-2]
    return float(f"{top * top / neighbour:.1g}")


@dataclass(frozen=True)
class Chosen:
    """The combination selected from those that share their data.

    Attributes:
        among: all of them, the best first and those that break text last; each with seed → metric on
            validation pairs, mean over clients.
    """

    among: tuple[tuple[SweepCell, dict[int, float]], ...]

    @property
    def cell(self) -> SweepCell:
        """The cell of the selected combination."""
        return self.among[0][0]

    @property
    def at_end_of(self) -> list[str]:
        """Keys whose selected number is the lowest or the highest that was tried."""
        keys, all_values = [], [each.combination.values for each, _ in self.among]
        for key, value in self.cell.combination.values.items():
            tried = {values[key] for values in all_values if isinstance(values[key], int | float)}
            if len(tried) > 1 and value in (min(tried), max(tried)):
                keys.append(key)
        return keys


@dataclass
class Sweep:
    """Runs the cells of tables or of a grid, with at most ``jobs`` runs at a time.

    Attributes:
        report: called with each line of progress.
        do: runs or resumes one run; default: in a separate process.
        failed: the cells of tables and the runs of grids that failed, by name; each with the log file of the
            failed run if there is one.
        refused: those of them whose run was refused before its first round, and why.
    """

    jobs: int
    report: Callable[[str], None] = print
    do: Callable[[SweepRun], Awaitable[None]] | None = None
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.jobs)
        self._processes = CommandProcesses()
        self._do = self.do or partial(run_in_process, processes=self._processes)

    async def tables(
        self, cells: Sequence[SweepCell], done: Callable[[SweepCell, dict[str, Any]], None]
    ) -> None:
        """Run everything that is not finished, at most ``jobs`` cells at a time.

        If a cell fails, the others continue.

        Args:
            done: called with each finished cell and its row for the table.
        """
        counts = [cell.count() for cell in cells]
        runs, finished = (sum(each) for each in zip(*counts, strict=True))
        further = (
            " or more"
            if any(
                cell.definition.rates and (cell.table.further or cell.definition.separate) for cell in cells
            )
            else ""
        )
        listed = (pluralize(len(cells), "cell", "cells"), pluralize(runs, "run", "runs") + further)
        self.report(f"{', '.join(listed)}, {finished} already finished")
        slots, count = asyncio.Semaphore(self.jobs), 0

        async def one(cell: SweepCell) -> None:
            nonlocal count
            async with slots:
                outcome = await self._attempt(cell.name, partial(self._cell, cell))
            if outcome is not None:
                done(cell, outcome)
                count += 1
                self.report(f"finished {cell.name}, {count} of {len(cells)} cells")

        async with self._processes, asyncio.TaskGroup() as group:
            for cell in cells:
                group.create_task(one(cell))

    async def _cell(self, cell: SweepCell) -> dict[str, Any]:
        async def all_seeds(rates: Rates) -> None:
            async with asyncio.TaskGroup() as group:
                for seed in cell.table.seeds:
                    run = cell.run_of(seed, rates, test=bool(rates))
                    group.create_task(self._run(run, cell.folder))

        if not cell.definition.rates:
            await all_seeds(NO_RATES)
            return cell.own_rate_outcome()
        best, tried = NO_RATES, dict[str, Tried]()
        for key in ("lr", *cell.definition.separate):
            tried[key] = await self._try(cell, best, key)
            best = tried[key].rates[tried[key].best]
        await all_seeds(best)
        return cell.best_rate_outcome(best, tried)

    async def _try(self, cell: SweepCell, rates: Rates, key: str) -> Tried:
        """Try values of one rate, given those selected before it, until the best lies inside or at most
        ``further`` were tried.
        """
        values, own = cell.definition.rates, None
        if key != "lr":
            own = cell.own_value(key, rates)
            values = (float(f"{own / 3:.2g}"), own, float(f"{own * 3:.2g}"))
        tried = Tried()

        async def one(value: float) -> None:
            # The run of the row's own value is that of the rates before.
            these = {**rates, key: value} if value != own else {**rates}
            run = cell.run_of(cell.table.seeds[0], these)
            await self._run(run, cell.folder)
            tried.rates[value] = these
            tried.validation[value] = judged = float(run.summary[cell.table.judge]["mean"])
            if run.breaks_text:
                tried.broken.add(value)
            breaks = ", but its text is broken" if value in tried.broken else ""
            self.report(f"{cell.name} {key} {value:g}: validation {judged:.3f}{breaks}")

        async with asyncio.TaskGroup() as group:
            for value in dict.fromkeys(values):
                group.create_task(one(value))
        most = len(set(values)) + cell.table.further
        while (further := next_rate(tried.validation, most, tried.broken)) is not None:
            await one(further)
        return tried

    async def grid(self, cells: Sequence[SweepCell]) -> list[Chosen]:
        """Run every combination with every seed, select the best and evaluate it on test pairs.

        One of each group of combinations that share their data is selected, by its mean over seeds; on a tie,
        the first. One that breaks text with any seed is selected only if all do. If a run fails, the others
        continue, but nothing is selected.

        Args:
            cells: from :func:`grid_cells`.
        """
        seeds = cells[0].table.seeds
        runs = [cell.run_of(seed) for cell in cells for seed in seeds]
        counts = (
            pluralize(len(cells), "combination", "combinations"),
            pluralize(len(seeds), "seed", "seeds"),
            pluralize(len(runs), "run", "runs"),
        )
        self.report(f"{', '.join(counts)}, {sum(run.finished for run in runs)} already finished")
        async with self._processes:
            return await self._grid(cells, runs)

    async def _grid(self, cells: Sequence[SweepCell], runs: Sequence[SweepRun]) -> list[Chosen]:
        await self._all(runs)
        if self.failed or not cells[0].validation:
            return []
        groups: dict[tuple[str, ...], list[tuple[SweepCell, dict[int, float]]]] = {}
        for cell in cells:
            groups.setdefault(cell.combination.of_data, []).append((cell, cell.validation_metrics()))
        chosen = [
            Chosen(tuple(sorted(group, key=lambda pair: (pair[0].breaks_text, -fmean(pair[1].values())))))
            for group in groups.values()
        ]
        for each in chosen:
            self.report(f"selected on validation pairs: {each.cell.definition.name}")
        await self._all(
            [each.cell.run_of(seed, test=True) for each in chosen for seed in each.cell.table.seeds]
        )
        return chosen

    async def _all(self, runs: Sequence[SweepRun]) -> None:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(self._attempt(run.out.name, partial(self._run, run, run.out.parent)))

    async def _attempt(self, name: str, work: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of ``work``; ``None`` if it fails, which is reported and listed in ``failed``."""
        try:
            return await work()
        except Exception as error:
            reason = error
            while isinstance(reason, ExceptionGroup):
                reason = reason.exceptions[0]
            self.failed[name] = name
            if isinstance(reason, CommandError):
                self.failed[name] += f": {reason.log}"
                if reason.refusal:
                    self.refused[name] = reason.refusal
                    self.report(f"{name} is refused: {reason.refusal}")
                    return None
            self.report(f"FAILED {name}: {reason}")
            return None

    async def _run(self, run: SweepRun, folder: Path) -> None:
        """Wait for a slot, then run what is missing; messages name runs relative to ``folder``."""
        async with self._slots:
            run.check()
            if not run.ready:
                doing = "evaluating" if run.finished else "running"
                self.report(f"{doing} {run.out.relative_to(folder)}, log: {run.side_file('log')}")
                await self._do(run)


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
        for key in cell.definition.separate:
            cell.own_value(key, NO_RATES)
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
    if cell.definition.rates:
        sets |= {"evaluate.split", *(f"method.{key}" for key in ("lr", *cell.definition.separate))}
    sets |= {"evaluate.split"} if cell.validation else set()
    for override in cell.overrides:
        key = override.partition("=")[0].strip()
        if key in sets:
            where = "use --seeds or --grid" if cell.definition.grid is not None else "change it in the table"
            raise ConfigError(f"--set {override}: {key} is set by the sweep; {where}")


def missing_paths(experiment: Experiment, folder: Path) -> Iterator[str]:
    """Yield the paths in an experiment that do not exist.

    Args:
        folder: the folder of the experiment file.
    """
    from prefed.data.sources.huggingface import looks_like_hub_name

    reward = getattr(experiment.method.settings, "reward_model", None)
    fleet, graph = experiment.fleet, experiment.whole_graph
    named = [reward, fleet.trace if fleet else None, graph.file if graph else None]
    for path in [*(source.path for _, _, source in experiment.data.sources()), *filter(None, named)]:
        if not looks_like_hub_name(path) and not Path(path).exists():
            yield path
    model = Path(experiment.model.name).expanduser()
    folders = [Path(), folder]
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
