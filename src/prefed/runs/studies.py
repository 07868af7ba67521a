"""What finished runs show together: those that differ in one thing, and a figure of the theory over it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import numpy as np

from prefed.config import Experiment
from prefed.core import POOLED, Key
from prefed.core.strict import flatten
from prefed.fleet import FleetConfig
from prefed.merge.graphs import GraphConfig
from prefed.merge.mixing import ConsensusFactors, consensus_factors
from prefed.merge.topology import Topology
from prefed.runs.record import RunError, RunRecord, read_run

LAST = 5
"""A final figure is the mean of the last so many rounds in which it was measured."""
_UNLIKE = ("seed", "engine.")
"""Settings in which runs may always differ."""
_TITLE = 120
"""Letters of a family's title at most."""
_LATE = frozenset({"merge.late", "merge.staleness.name", "merge.staleness.exponent"})

Values: TypeAlias = dict[float, list[float]]
"""A setting → a figure of each run that has it."""


def paper_gap(run: RunRecord) -> float:
    """The paper's gap: local batches' squared gradients, clipped at 1, at the end of a run."""
    return fmean(measured(run, "paper_gap")[-LAST:])


def squared_gradient(run: RunRecord) -> float:
    """Ours: the squared gradient of the global objective, before any clip, at the end of a run."""
    return fmean(squared_gradients(run)[-LAST:])


GAPS: dict[str, Callable[[RunRecord], float]] = {
    "the paper's gap": paper_gap,
    "squared gradient norm": squared_gradient,
}
"""Both measures of how far from a stationary point a run ended, by which claims are judged."""


def squared_gradients(run: RunRecord) -> list[float]:
    """‖∇ℒ‖² in each diagnosed round, less what the draw of few pairs adds to it; so it may be below 0.

    A mean over N clients of m pairs each has the variance ζ² · batch/(m N), where a batch has ζ².
    """
    method, drawn = run.config["method"], run.config.get("evaluate", {}).get("diagnostic_pairs")
    told = [record for record in run.rounds if "gradient_norm" in record]
    if drawn is None:
        return [record["gradient_norm"] ** 2 for record in told]
    unseen = run.config["evaluate"].get("unseen", 0)
    clients = sum(sizes["train"] > 0 for sizes in run.summary["clients"].values())
    clients -= unseen if isinstance(unseen, int) else len(unseen)
    if run.rounds[-1]["cohort"] == [POOLED]:
        clients = 1
    share = method["batch_size"] * method.get("accumulate", 1) / (drawn * clients)
    return [record["gradient_norm"] ** 2 - share * record["zeta2"] for record in told]


def measured(run: RunRecord, name: str) -> list[float]:
    """A number of the round log, in the rounds that have it."""
    return [float(record[name]) for record in run.rounds if isinstance(record.get(name), int | float)]


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
    """Runs that differ in their seed alone.

    Attributes:
        experiment: of the first of them.
    """

    runs: tuple[RunRecord, ...]
    experiment: Experiment

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

    def over_rounds(self, name: str) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
        """The rounds in which all runs have a number of the log, and ``[runs, rounds]`` its values."""
        told = [dict(zip(*run.curve(name), strict=True)) for run in self.runs]
        rounds = sorted(set.intersection(*map(set, told)))
        return rounds, np.array([[values[r] for r in rounds] for values in told], dtype=np.float64)


def cases(runs: Sequence[RunRecord]) -> list[Case]:
    """The runs, those together that differ in their seed alone, in the order of the first of each."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        tables = {n: v for n, v in flatten(run.config).items() if not n.startswith(_UNLIKE)}
        found.setdefault(json.dumps(tables, sort_keys=True, default=str), []).append(run)
    return [
        Case(tuple(some), Experiment.from_tables(some[0].config, str(some[0].path / "config.toml")))
        for some in found.values()
    ]


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


@dataclass(frozen=True)
class Participation:
    """Final gaps against 1/S, each with the straight line a + b/S that is nearest to it.

    Attributes:
        gaps: measure → 1/S → the gap of each run.
        fits: measure → a, b and R², the share of the variance that the line explains.
    """

    family: Family
    gaps: dict[str, Values]
    fits: dict[str, tuple[float, float, float]]


def participation(known: Sequence[Case]) -> Iterator[Participation]:
    """The studies of how many clients take part in a round."""
    served = [case for case in known if case.diagnosed and case.graph is None]
    for family in families(served, {"cohort.size", "cohort.fraction"}, lambda case: len(case.members)):
        some = sorted(family.cases, key=lambda case: -len(case.members))
        gaps = {
            name: {1 / len(case.members): [gap(run) for run in case.runs] for case in some}
            for name, gap in GAPS.items()
        }
        yield Participation(family, gaps, {name: line(values) for name, values in gaps.items()})


def line(values: Values) -> tuple[float, float, float]:
    """The least-squares line through all points: its value at 0, its slope, and R².

    >>> line({0.2: [1.0], 0.5: [4.0], 1.0: [9.0]})
    (-1.0, 10.0, 1.0)
    """
    x = np.repeat([*values], [len(some) for some in values.values()])
    y = np.concatenate([*values.values()])
    slope, start = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    left = float(((y - start - slope * x) ** 2).sum())
    share = 1 - left / spread if spread else 1.0
    return round(float(start), 12), round(float(slope), 12), round(share, 12)


@dataclass(frozen=True)
class Steps:
    """Final gaps against local steps E, a curve for each learning rate.

    Attributes:
        gaps: measure → learning rate → E → the gap of each run.
    """

    family: Family
    gaps: dict[str, dict[float, Values]]


def steps(known: Sequence[Case]) -> Iterator[Steps]:
    """The studies of local steps and learning rates."""
    counted = [case for case in known if case.diagnosed and case.experiment.method.settings.local_steps]
    for family in families(counted, {"method.local_steps", "method.lr"}):
        gaps: dict[str, dict[float, Values]] = {name: {} for name in GAPS}
        for case in sorted(family.cases, key=lambda case: case.experiment.method.settings.local_steps or 0):
            settings = case.experiment.method.settings
            for name, gap in GAPS.items():
                own = gaps[name].setdefault(settings.lr, {})
                own[float(settings.local_steps or 0)] = [gap(run) for run in case.runs]
        yield Steps(family, gaps)


@dataclass(frozen=True)
class Delay:
    """Final gaps against q_max, a curve for each way in which a late upload counts.

    Attributes:
        gaps: measure → way → q_max → the gap of each run. In time all ways are one.
    """

    family: Family
    gaps: dict[str, dict[str, Values]]


def delay(known: Sequence[Case]) -> Iterator[Delay]:
    """The studies of drawn delays."""
    served = [c for c in known if c.diagnosed and c.graph is None and c.fleet.server == "synchronous"]
    for family in families(served, {"fleet.max_delay", *_LATE}, lambda case: case.fleet.max_delay):
        late = [case for case in family.cases if case.fleet.max_delay]
        in_time = [case for case in family.cases if not case.fleet.max_delay]
        gaps: dict[str, dict[str, Values]] = {name: {} for name in GAPS}
        for way in dict.fromkeys(map(_way, late)):
            some = [*in_time[:1], *(case for case in late if _way(case) == way)]
            some.sort(key=lambda case: case.fleet.max_delay)
            for name, gap in GAPS.items():
                gaps[name][way] = {float(c.fleet.max_delay): [gap(run) for run in c.runs] for c in some}
        yield Delay(family, gaps)


def _way(case: Case) -> str:
    merge = case.experiment.whole_merge
    discount = "" if merge.staleness.name == "none" else f", discount {merge.staleness.exponent:g}"
    return f"{'models' if merge.late == 'model' else 'steps'}{discount}"


@dataclass(frozen=True)
class GraphErrors:
    """A graph of a study of topologies.

    Attributes:
        before, after: consensus error before and after the mix at the end of each run.
        factors: what it is proportional to in theory; ``None`` for a graph that changes.
    """

    name: str
    rho: float
    before: list[float]
    after: list[float]
    factors: ConsensusFactors | None


@dataclass(frozen=True)
class Topologies:
    """Consensus errors against graphs, by falling ρ."""

    family: Family
    graphs: tuple[GraphErrors, ...]


def topologies(known: Sequence[Case]) -> Iterator[Topologies]:
    """The studies of graphs."""
    alone = [case for case in known if case.graph is not None]
    for family in families(alone, {"graph.name", "graph.probability", "graph.file"}):
        graphs = sorted(map(_graph, family.cases), key=lambda graph: -graph.rho)
        yield Topologies(family, tuple(graphs))


def _graph(case: Case) -> GraphErrors:
    graph, run = case.graph, case.runs[0]
    assert graph is not None
    factors = None
    if not graph.varies:
        topology = Topology(graph, case.members, Key(int(run.config["seed"])))
        factors = consensus_factors(topology.matrix(1))
    before, after = (
        [fmean(measured(each, name)[-LAST:]) for each in case.runs]
        for name in ("consensus_before", "consensus_after")
    )
    return GraphErrors(graph.name, measured(run, "rho")[-1], before, after, factors)


@dataclass(frozen=True)
class Race:
    """Simulated seconds to a target accuracy, of synchronous and of buffered servers.

    Attributes:
        target: the mean accuracy over clients that is to be reached.
        seconds: each case with the time at which each run first reaches the target; ``None``: it never does.
    """

    family: Family
    target: float
    seconds: tuple[tuple[Case, list[float | None]], ...]


def races(known: Sequence[Case], target: float | None = None) -> Iterator[Race]:
    """The studies of fleets on a virtual clock.

    Args:
        target: an accuracy; left out: the highest that all runs of a study reach.
    """
    clocked = [case for case in known if all(timeline(run) for run in case.runs)]
    vary = {"fleet.server", "fleet.buffer", "fleet.max_delay", "rounds", *_LATE}
    for family in families(clocked, vary, lambda case: case.fleet.server):
        lines = [(case, [timeline(run) for run in case.runs]) for case in family.cases]
        tops = [max(value for _, value in each) for _, some in lines for each in some]
        goal = min(tops) if target is None else target
        seconds = tuple(
            (case, [next((at for at, value in each if value >= goal), None) for each in some])
            for case, some in lines
        )
        yield Race(family, goal, seconds)


def timeline(run: RunRecord) -> list[tuple[float, float]]:
    """Simulated seconds and mean accuracy of each evaluation; empty without a clock."""
    return [
        (float(record["time"]), float(record["evaluation"]["preference_accuracy"]["mean"]))
        for record in run.rounds
        if record.get("time") and "evaluation" in record
    ]
