"""Plots of what finished runs show together, as Distributed DPO (arXiv:2605.20696) has them.

    python experiments/distributed_dpo/study_plots.py runs/figures/personas --out figures

Takes run directories, or folders of them such as a sweep leaves. Runs that differ only in their seed are one
case. A study takes cases whose other settings are alike; the script finds them, writes a plot of each study
and prints its numbers. With several data sets or methods there are several studies of a kind.

A final gap is the mean over the last five diagnosed rounds, by two measures: the paper's, and the squared
gradient norm of the global objective, less what the draw of few pairs adds to it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from prefed.config import Experiment
from prefed.core import Key
from prefed.core.strict_settings import flatten
from prefed.engines.config import FleetConfig
from prefed.merge.config import GraphConfig
from prefed.merge.mixing_matrices import ConsensusFactors, Topology, consensus_factors
from prefed.runs.finished_run import RunRecord, find_runs
from prefed.runs.seed_groups import Case, cases
from prefed.runs.theory_constants import squared_gradients
from prefed.ui.pages.comparison_data import case_names

LAST = 5
"""A final figure is the mean of the last so many rounds in which it was measured."""
CURVES = 20
"""Most cases in one plot of curves."""
TITLE = 120
"""Most characters of a study's title."""
LATE = frozenset({"merge.late", "merge.staleness.name", "merge.staleness.exponent"})

Values = dict[float, list[float]]
"""A setting → a value of each run that has it."""
Draw = Callable[[Figure], None]
"""Draws a study into an empty figure."""


@dataclass(frozen=True)
class Known:
    """A case, with its settings read again.

    Raises:
        ConfigError: this version cannot read them.
    """

    case: Case

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        """One for each seed."""
        return self.case.runs

    @cached_property
    def experiment(self) -> Experiment:
        """That of the first run."""
        return Experiment.from_tables(self.runs[0].config, str(self.runs[0].path / "config.toml"))

    @cached_property
    def settings(self) -> dict[str, str]:
        """Dotted name → setting, with the defaults of a fleet and a graph that are left out."""
        whole, tables = self.experiment, flatten(self.experiment.tables())
        own = {n: v for n, v in tables.items() if not n.startswith(("seed", "engine.", "fleet.", "graph."))}
        own |= flatten({"fleet": self.fleet.model_dump()})
        own |= flatten({"graph": whole.whole_graph.model_dump() if whole.whole_graph else {}})
        own["merge.late"] = whole.whole_merge.late
        return {name: json.dumps(value) for name, value in own.items()}

    @property
    def fleet(self) -> FleetConfig:
        """Without one, a fleet in which nobody is late."""
        return self.experiment.fleet or FleetConfig()

    @property
    def graph(self) -> GraphConfig | None:
        """``None`` with a server."""
        return self.experiment.whole_graph

    @property
    def members(self) -> tuple[str, ...]:
        """The clients of the last round: all that train, where there is a graph."""
        return tuple(self.runs[0].rounds[-1]["cohort"])

    @property
    def diagnosed(self) -> bool:
        """Whether all runs were, at a model that clients share."""
        return all(measured(run, "gradient_norm") for run in self.runs)


@dataclass(frozen=True)
class Study:
    """What some cases show together.

    Attributes:
        name: of the plot's file.
        draw: draws the plot; ``None`` where it would hold too much.
        lines: its numbers, printed.
        values: its numbers, by measure or case.
    """

    name: str
    draw: Draw | None
    lines: Sequence[str]
    values: Mapping[str, object]


def measured(run: RunRecord, name: str) -> list[float]:
    """A number of the round log, in the rounds that have it."""
    return [float(record[name]) for record in run.rounds if isinstance(record.get(name), int | float)]


GAPS: dict[str, Callable[[RunRecord], float]] = {
    "the paper's gap": lambda run: fmean(measured(run, "paper_gap")[-LAST:]),
    "squared gradient norm": lambda run: fmean(squared_gradients(run)[-LAST:]),
}
"""Both measures of how far from a stationary point a run ended."""


def families(
    known: Sequence[Known], vary: Collection[str], of: Callable[[Known], object] = id
) -> Iterator[tuple[list[Known], str]]:
    """Cases whose settings differ only in ``vary`` and that are not all the same in ``of``, with a title.

    The title names the settings that set a family apart from the others; it is empty if there is one.
    """
    found: dict[str, list[Known]] = {}
    for case in known:
        rest = {name: value for name, value in case.settings.items() if name not in vary}
        found.setdefault(json.dumps(rest, sort_keys=True), []).append(case)
    groups = [some for some in found.values() if len({of(case) for case in some}) > 1]
    firsts = [{n: v for n, v in some[0].settings.items() if n not in vary} for some in groups]
    names = dict.fromkeys(name for first in firsts for name in first)
    unlike = [name for name in names if len({first.get(name) for first in firsts}) > 1]
    for some, first in zip(groups, firsts, strict=True):
        title = ", ".join(f"{n.split('.')[-1]} {first[n]}" for n in unlike if n in first)
        yield some, title if len(title) <= TITLE else f"{title[: TITLE - 1]}…"


def studies(runs: Sequence[RunRecord], target: float | None = None) -> list[Study]:
    """Every study of these runs.

    Args:
        target: the accuracy of the plot of simulated times; left out: the highest that all its runs reach.
    """
    known = [Known(case) for case in cases(runs)]
    found = list(methods(known))
    for some in (participation(known), steps(known), delay(known), topologies(known), races(known, target)):
        for number, (title, study) in enumerate(some, 1):
            name = study.name if number == 1 else f"{study.name}-{number}"
            lines = [*([title] if title else []), *study.lines]
            found.append(Study(name, partial(titled, study.draw, title), lines, study.values))
    return found


def titled(draw: Draw, title: str, figure: Figure) -> None:
    """Draw a study under its title."""
    draw(figure)
    if title:
        figure.suptitle(title, fontsize=8)


Titled = Iterator[tuple[str, Study]]


def methods(known: Sequence[Known]) -> Iterator[Study]:
    """Loss, gradient norm and the paper's gap over rounds; the range over seeds is shaded."""
    diagnosed = [case for case in known if case.diagnosed]
    if len(diagnosed) > CURVES:
        text = f"{len(diagnosed)} cases are too many for one plot of curves: name at most {CURVES}"
        yield Study("methods", None, [text], {})
    elif diagnosed:
        names, lines = case_names([each.case for each in diagnosed]), []
        for case, label in zip(diagnosed, names, strict=True):
            ends = (f"{name} {mean([gap(run) for run in case.runs])}" for name, gap in GAPS.items())
            _, losses = case.case.over_rounds("global_loss")
            lines.append(f"{label}: loss {mean(losses[:, -1].tolist())}, {', '.join(ends)}")

        def draw(figure: Figure) -> None:
            panels = canvas(figure, 10.0, 3.8, 3)
            names_of = {
                "global_loss": "loss of the global objective",
                "gradient_norm": "norm of its gradient",
                "paper_gap": "the paper's gap",
            }
            for axes, (name, title) in zip(panels, names_of.items(), strict=True):
                for case, label in zip(diagnosed, names, strict=True):
                    rounds, values = case.case.over_rounds(name)
                    (line,) = axes.plot(rounds, values.mean(0), label=label)
                    axes.fill_between(
                        rounds, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0
                    )
                axes.set(title=title, xlabel="round")
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)

        yield Study("methods", draw, lines, {})


def participation(known: Sequence[Known]) -> Titled:
    """Final gaps against 1/S, each with the nearest line a + b/S and the R² of the fit."""
    served = [case for case in known if case.diagnosed and case.graph is None]
    for family, title in families(served, {"cohort.size", "cohort.fraction"}, lambda case: len(case.members)):
        ordered = sorted(family, key=lambda case: -len(case.members))
        gaps = {
            name: {1 / len(case.members): [gap(run) for run in case.runs] for case in ordered}
            for name, gap in GAPS.items()
        }
        fits = {name: line(values) for name, values in gaps.items()}
        texts = {
            name: f"{start:.3g} + {slope:.3g}/S, R² {share:.2f}"
            for name, (start, slope, share) in fits.items()
        }
        lines = [
            f"{name} {listed(values, lambda x: f'S={1 / x:.0f}')}; nearest line {texts[name]}"
            for name, values in gaps.items()
        ]

        def draw(figure: Figure, gaps=gaps, fits=fits, texts=texts) -> None:  # type: ignore[no-untyped-def]
            for axes, (name, values) in zip(canvas(figure, 8.0, 3.2, 2), gaps.items(), strict=True):
                scatter(axes, values, "C0")
                start, slope, _ = fits[name]
                ends = np.array([0.0, max(values)])
                axes.plot(ends, start + slope * ends, "--", color="C1", label=texts[name])
                axes.set(title=name, xlabel="1/S")
                axes.legend()

        yield title, Study("participation", draw, lines, {"gaps": gaps, "fits": fits})


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


def steps(known: Sequence[Known]) -> Titled:
    """Final gaps against local steps E, a curve for each learning rate."""
    counted = [case for case in known if case.diagnosed and case.experiment.method.settings.local_steps]
    for family, title in families(counted, {"method.local_steps", "method.lr"}):
        gaps: dict[str, dict[str, Values]] = {name: {} for name in GAPS}
        own = {id(case): case.experiment.method.settings for case in family}
        for case in sorted(family, key=lambda case: (own[id(case)].lr, own[id(case)].local_steps or 0)):
            settings = own[id(case)]
            for name, gap in GAPS.items():
                curve = gaps[name].setdefault(f"η = {settings.lr:g}", {})
                curve[float(settings.local_steps or 0)] = [gap(run) for run in case.runs]
        lines = [
            f"{name} at {rate}: {listed(some, lambda x: f'E={x:.0f}')}"
            for name, rates in gaps.items()
            for rate, some in rates.items()
        ]
        yield title, Study("steps", partial(draw_curves, gaps, "local steps E"), lines, {"gaps": gaps})


def delay(known: Sequence[Known]) -> Titled:
    """Final gaps against q_max, a curve for each way in which a late upload counts."""
    served = [c for c in known if c.diagnosed and c.graph is None and c.fleet.server == "synchronous"]
    for family, title in families(served, {"fleet.max_delay", *LATE}, lambda case: case.fleet.max_delay):
        late = [case for case in family if case.fleet.max_delay]
        in_time = [case for case in family if not case.fleet.max_delay]
        gaps: dict[str, dict[str, Values]] = {name: {} for name in GAPS}
        for way in dict.fromkeys(map(_way, late)):
            some = [*in_time[:1], *(case for case in late if _way(case) == way)]
            some.sort(key=lambda case: case.fleet.max_delay)
            for name, gap in GAPS.items():
                gaps[name][way] = {float(c.fleet.max_delay): [gap(run) for run in c.runs] for c in some}
        lines = [
            f"{name}, late uploads as {way}: {listed(values, lambda x: f'q_max={x:.0f}')}"
            for name, ways in gaps.items()
            for way, values in ways.items()
        ]
        yield title, Study("delay", partial(draw_curves, gaps, "q_max"), lines, {"gaps": gaps})


def _way(case: Known) -> str:
    merge = case.experiment.whole_merge
    discount = "" if merge.staleness.name == "none" else f", discount {merge.staleness.exponent:g}"
    return f"{'models' if merge.late == 'model' else 'steps'}{discount}"


def draw_curves(gaps: Mapping[str, Mapping[str, Values]], label: str, figure: Figure) -> None:
    """A panel for each measure, a curve for each name; a logarithmic axis where gaps span a factor of 30."""
    for axes, (name, curves) in zip(canvas(figure, 8.0, 3.2, 2), gaps.items(), strict=True):
        for index, (key, values) in enumerate(curves.items()):
            scatter(axes, values, f"C{index}", key)
        some = [gap for values in curves.values() for each in values.values() for gap in each]
        if min(some) > 0 and max(some) > 30 * min(some):
            axes.set_yscale("log")
        axes.set(title=name, xlabel=label)
        axes.legend()


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


def topologies(known: Sequence[Known]) -> Titled:
    """Consensus errors of each graph by falling ρ, next to what theory has them proportional to."""
    alone = [case for case in known if case.graph is not None]
    for family, title in families(alone, {"graph.name", "graph.probability", "graph.file"}):
        graphs = sorted(map(_graph, family), key=lambda graph: -graph.rho)
        lines = []
        for when in ("before", "after"):
            errors = (f"{graph.name} {mean(getattr(graph, when))}" for graph in graphs)
            lines.append(f"consensus error {when} the mix: {', '.join(errors)}")
            for label, curve in _curves(graphs, when).items():
                values = (f"{g.name} {value:.3g}" for g, value in zip(graphs, curve, strict=True))
                lines.append(f"  {label}, one factor: {', '.join(values)}")
        yield title, Study("topology", partial(_draw_topologies, graphs), lines, {"graphs": graphs})


def _graph(case: Known) -> GraphErrors:
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


def _curves(graphs: Sequence[GraphErrors], when: str) -> dict[str, list[float]]:
    """Theoretical curves: heterogeneity's and noise's, and after the mix the paper's 1/(1 − ρ²).

    Each has one factor, which puts it nearest to the errors in logarithms.
    """
    if any(graph.factors is None for graph in graphs):
        return {}
    curves = {
        "differing clients": [getattr(graph.factors, f"heterogeneity_{when}") for graph in graphs],
        "noisy gradients": [getattr(graph.factors, f"noise_{when}") for graph in graphs],
    }
    if when == "after":
        curves["1/(1 − ρ²), the paper's"] = [1 / (1 - graph.rho**2) for graph in graphs]
    errors = [fmean(getattr(graph, when)) for graph in graphs]
    return {name: _nearest(curve, errors) for name, curve in curves.items()}


def _nearest(curve: Sequence[float], errors: Sequence[float]) -> list[float]:
    """``curve`` times the factor by which it is nearest to ``errors`` in logarithms, where both are above 0.

    >>> _nearest([1.0, 2.0, 0.0], [10.0, 20.0, 0.0])
    [10.0, 20.0, 0.0]
    """
    both = [(c, e) for c, e in zip(curve, errors, strict=True) if c > 0 and e > 0]
    shift = fmean(math.log(e / c) for c, e in both) if both else 0.0
    return [round(math.exp(shift) * c, 12) for c in curve]


def _draw_topologies(graphs: Sequence[GraphErrors], figure: Figure) -> None:
    at = np.arange(len(graphs))
    for axes, when in zip(canvas(figure, 9.0, 3.6, 2), ("before", "after"), strict=True):
        errors = {float(x): getattr(graph, when) for x, graph in enumerate(graphs)}
        scatter(axes, errors, "C0")
        for index, (label, curve) in enumerate(_curves(graphs, when).items(), 1):
            axes.plot(at, curve, "--D", color=f"C{index}", markerfacecolor="none", label=label)
        axes.set_xticks(at, [f"{graph.name}\nρ {graph.rho:.3g}" for graph in graphs])
        axes.set_yscale("log", nonpositive="mask")
        axes.set(title=f"consensus error {when} the mix")
        axes.legend()


def races(known: Sequence[Known], target: float | None = None) -> Titled:
    """Simulated seconds to a target accuracy, of synchronous and of buffered servers."""
    clocked = [case for case in known if all(map(timeline, case.runs))]
    vary = {"fleet.server", "fleet.buffer", "fleet.max_delay", "rounds", *LATE}
    for family, title in families(clocked, vary, lambda case: case.fleet.server):
        curves = [[timeline(run) for run in case.runs] for case in family]
        tops = [max(value for _, value in each) for some in curves for each in some]
        goal = min(tops) if target is None else target
        seconds = [
            [next((at for at, value in each if value >= goal), None) for each in some] for some in curves
        ]
        short = case_names([each.case for each in family])
        names = [f"{name} ({case.fleet.server})" for name, case in zip(short, family, strict=True)]
        lines = [
            f"{name}: {goal:.1%} after {_times(some)}" for name, some in zip(names, seconds, strict=True)
        ]
        values = {"target": goal, "seconds": dict(zip(names, seconds, strict=True))}
        draw = partial(_draw_race, names, curves, seconds, goal)
        yield title, Study("time", draw, lines, values)


def timeline(run: RunRecord) -> list[tuple[float, float]]:
    """Simulated seconds and mean accuracy of each evaluation; empty without a clock."""
    return [
        (float(record["time"]), float(record["evaluation"]["preference_accuracy"]["mean"]))
        for record in run.rounds
        if record.get("time") and "evaluation" in record
    ]


def _draw_race(
    names: Sequence[str],
    curves: Sequence[Sequence[Sequence[tuple[float, float]]]],
    seconds: Sequence[Sequence[float | None]],
    goal: float,
    figure: Figure,
) -> None:
    left, right = canvas(figure, 9.0, 3.4, 2)
    for index, (name, some, times) in enumerate(zip(names, curves, seconds, strict=True)):
        for number, points in enumerate(some):
            left.plot(*zip(*points, strict=True), color=f"C{index}", label="" if number else name)
        reached = [each for each in times if each is not None]
        right.barh(index, fmean(reached) if reached else 0.0, color=f"C{index}")
    left.axhline(goal, color="gray", linestyle=":")
    left.set(xlabel="simulated seconds", title="accuracy, mean over clients")
    left.legend()
    right.set_yticks(range(len(names)), names)
    right.set(xlabel="simulated seconds", title=f"time to {goal:.1%}")


def _times(times: Sequence[float | None]) -> str:
    reached = [seconds for seconds in times if seconds is not None]
    never = f"{len(times) - len(reached)} of {len(times)} runs never"
    if not reached:
        return never
    return f"{fmean(reached):.4g} s" + (f", {never}" if len(reached) < len(times) else "")


def canvas(figure: Figure, width: float, height: float, panels: int) -> list[Axes]:
    """Panels side by side in an empty figure, ``width`` × ``height`` inches."""
    figure.set_size_inches(width, height)
    return list(figure.subplots(1, panels, squeeze=False).flat)


def scatter(axes: Axes, values: Values, color: str, label: str = "") -> None:
    """A point for each run, and a line through the means where there is a label."""
    for x, some in values.items():
        axes.plot([x] * len(some), some, "o", color=color, alpha=0.6)
    if label:
        axes.plot([*values], [fmean(some) for some in values.values()], color=color, label=label)


def listed(values: Values, name: Callable[[float], str]) -> str:
    """Settings with the mean of each."""
    return ", ".join(f"{name(x)} {mean(some)}" for x, some in values.items())


def mean(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation.

    >>> mean([0.5, 0.7]), mean([0.5])
    ('0.6 ± 0.14', '0.5')
    """
    text = f"{fmean(values):.3g}"
    return f"{text} ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the plots")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    parser.add_argument("--target", type=float, help="accuracy of the plot of simulated times")
    options = parser.parse_args()
    found = studies(find_runs(options.runs), options.target)
    if not found:
        parser.error(
            "no study: it takes runs with [evaluate] diagnose, a graph, or synchronous and buffered fleets, "
            "whose other settings are alike"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    for study in found:
        path = options.out / f"{study.name}.{options.format}"
        if study.draw is not None:
            figure = Figure(layout="constrained")
            study.draw(figure)
            figure.savefig(path, dpi=160)
        print(path if study.draw else study.name, *study.lines, sep="\n  ")


if __name__ == "__main__":
    main()
