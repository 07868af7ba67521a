"""What finished runs show together: a figure of the theory over what some of them differ in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

import numpy as np

from prefed.core import Key
from prefed.merge.mixing import ConsensusFactors, consensus_factors
from prefed.merge.topology import Topology
from prefed.runs.record import RunRecord
from prefed.runs.replicates import Case, Family, families
from prefed.runs.stationarity import GAPS, LAST, measured

_LATE = frozenset({"merge.late", "merge.staleness.name", "merge.staleness.exponent"})

Values: TypeAlias = dict[float, list[float]]
"""A setting → a figure of each run that has it."""


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
