"""Finished runs in groups: those that differ in their seed alone, those alike in all but what is studied."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from prefed.config import Experiment
from prefed.core.strict import flatten
from prefed.engines.fleet import FleetConfig
from prefed.merge.graphs import GraphConfig
from prefed.runs.record import RunError, RunRecord, read_run
from prefed.runs.stationarity import measured

_UNLIKE = ("seed", "engine.")
"""Settings in which runs may always differ."""
_TITLE = 120
"""Letters of a family's title at most."""


def find_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The finished runs among ``paths`` and in the folders below them, such as those of ``prefed sweep``.

    A run that is named by itself must be finished; in a folder, those that are not are left out.

    Raises:
        RunError: a named run is not finished, or there is none at all.
    """
    found: dict[Path, RunRecord] = {}
    for path in paths:
        inside = [path] if (path / "config.toml").exists() or not path.is_dir() else []
        if not inside:
            configs = sorted(path.rglob("config.toml"))
            inside = [file.parent for file in configs if (file.parent / "summary.json").exists()]
        found |= {each.resolve(): read_run(each) for each in inside if each.resolve() not in found}
    if not found:
        raise RunError(f"{', '.join(map(str, paths))}: no finished run lies there")
    return list(found.values())


@dataclass(frozen=True)
class Case:
    """Runs that differ in their seed alone."""

    runs: tuple[RunRecord, ...]

    @cached_property
    def experiment(self) -> Experiment:
        """That of the first run.

        Raises:
            ConfigError: this version cannot read its settings.
        """
        return Experiment.from_tables(self.runs[0].config, str(self.runs[0].path / "config.toml"))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each run."""
        return tuple(run.seed for run in self.runs)

    @cached_property
    def settings(self) -> dict[str, str]:
        """Dotted name → setting, with the fleet and the graph that shorthands stand for."""
        whole, tables = self.experiment, flatten(self.experiment.tables())
        shorthands = ("fleet.", "graph.", "method.topology", "method.mixing", "method.max_staleness")
        own = {n: v for n, v in tables.items() if not n.startswith((*_UNLIKE, *shorthands))}
        own |= flatten({"fleet": (whole.whole_fleet or FleetConfig()).model_dump()})
        own |= flatten({"graph": whole.whole_graph.model_dump() if whole.whole_graph else {}})
        own["merge.late"] = whole.whole_merge.late
        return {name: json.dumps(value) for name, value in own.items()}

    @property
    def fleet(self) -> FleetConfig:
        """The run's fleet; one in which nobody is late where it has none."""
        return self.experiment.whole_fleet or FleetConfig()

    @property
    def graph(self) -> GraphConfig | None:
        """The run's graph; ``None`` with a server."""
        return self.experiment.whole_graph

    @property
    def members(self) -> tuple[str, ...]:
        """The clients of the last round: all that train, where there is a graph."""
        return tuple(self.runs[0].rounds[-1]["cohort"])

    @property
    def diagnosed(self) -> bool:
        """Whether all runs were, at a model that clients share."""
        return all(measured(run, "gradient_norm") for run in self.runs)

    def over_rounds(
        self, name: str, of: str = "mean"
    ) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
        """The rounds in which all runs have a number of the log, and ``[runs, rounds]`` its values.

        ``of`` is that of :meth:`~prefed.runs.record.RunRecord.curve`.
        """
        told = [dict(zip(*run.curve(name, of), strict=True)) for run in self.runs]
        rounds = sorted(set.intersection(*map(set, told)))
        return rounds, np.array([[values[r] for r in rounds] for values in told], dtype=np.float64)


def cases(runs: Sequence[RunRecord]) -> list[Case]:
    """The runs, those together that differ in their seed alone, in the order of the first of each.

    Two runs of the same settings and the same seed are in two cases.
    """
    found: dict[tuple[str, int], list[RunRecord]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for run in runs:
        tables = {n: v for n, v in flatten(run.config).items() if not n.startswith(_UNLIKE)}
        settings = json.dumps(tables, sort_keys=True, default=str)
        found.setdefault((settings, seen[settings, run.seed]), []).append(run)
        seen[settings, run.seed] += 1
    return [Case(tuple(some)) for some in found.values()]


@dataclass(frozen=True)
class Family:
    """Cases that are alike in all but what is studied.

    Attributes:
        title: in what the family differs from the others of its study; empty if it is the only one.
    """

    cases: tuple[Case, ...]
    title: str


def families(known: Sequence[Case], vary: Collection[str], of: Callable[[Case], object] = id) -> list[Family]:
    """The families of cases whose settings differ in ``vary`` alone, where ``of`` is not the same for all."""
    found: dict[str, list[Case]] = {}
    for case in known:
        rest = {name: value for name, value in case.settings.items() if name not in vary}
        found.setdefault(json.dumps(rest, sort_keys=True), []).append(case)
    groups = [some for some in found.values() if len({of(case) for case in some}) > 1]
    firsts = [{n: v for n, v in some[0].settings.items() if n not in vary} for some in groups]
    names = dict.fromkeys(name for first in firsts for name in first)
    unlike = [name for name in names if len({first.get(name) for first in firsts}) > 1]
    titles = (", ".join(f"{n.split('.')[-1]} {first[n]}" for n in unlike if n in first) for first in firsts)
    cut = (title if len(title) <= _TITLE else f"{title[: _TITLE - 1]}…" for title in titles)
    return [Family(tuple(some), title) for some, title in zip(groups, cut, strict=True)]
