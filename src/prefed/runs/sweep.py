"""Carries out the cells of a table: finds the runs that each cell needs, and runs them in processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefed.config.table import Cell, Table, load_table
from prefed.core.text import pluralize
from prefed.runs.child import KEPT, CommandError, SweepRun, commits, in_turn, run_in_process


@dataclass(frozen=True)
class SweepCell:
    """A cell to carry out.

    Attributes:
        definition: the cell as its table defines it.
        folder: its runs lie in ``FOLDER/CELL-lrRATE-seedSEED``, without the rate where none is chosen.
        overrides: ``KEY=VALUE`` for every run.
    """

    definition: Cell
    table: Table
    folder: Path
    overrides: tuple[str, ...] = ()

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
            last += [f"method.lr={lr!r}", "evaluate.split=validation"]
            name += f"-lr{lr:g}"
        experiment = self.definition.experiment(first, *self.overrides, *last, own=(first, *last))
        return SweepRun(experiment, self.folder / f"{name}-seed{seed}", test)

    def first(self) -> SweepRun:
        """The run to begin with."""
        return self.run_of(self.table.seeds[0], *self.definition.rates[:1])

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
