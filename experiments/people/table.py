"""The table of the people, from finished runs of methods.toml or brief.toml.

    python experiments/people/table.py runs/people/brief --out runs/people/table.md [--pictures FOLDER]

RUNS is a folder of ``prefed sweep``, with a folder for each column. Accuracy is reward accuracy; of a
selector it is the share of pairs that the selector orders as the person did. Contested are test pairs on
which 25% to 75% of the other judges agree with the person. "Another's" is the accuracy with the model of the
next person in the list, which has learnt as much, but not what is personal to this one. "Newcomers" is the
accuracy of those who join after training. What is computed from a run's models is kept in its folder, as
``people.json``. Of several rates, the table has the best one.
With PREFED_REFERENCE, hidden states and log-probabilities are those of the sweep.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cuts import HERE, read
from reference import interval, is_contested

from prefed.core import files

HEAD = (
    *("method", "pairs", "seeds", "accuracy", "over seeds", "worst tenth", "spread", "spread by chance"),
    *("contested", "agreed", "less feddpo", "own less another's", "preference accuracy", "newcomers"),
)
People = dict[str, dict[str, float]]
"""Person → name → value."""


def split_by_agreement(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, ...], bool]:
    """(person, prompt, chosen, rejected) → whether the pair is contested."""
    names = ("person", "prompt", "chosen", "rejected")
    return {tuple(row[name].strip() for name in names): is_contested(row) for row in rows}


def only(scores: Any, where: Any) -> Any:
    """The scores of some of the pairs."""
    arrays = {field.name: getattr(scores, field.name) for field in dataclasses.fields(scores)}
    return dataclasses.replace(
        scores, **{name: value[where] for name, value in arrays.items() if isinstance(value, np.ndarray)}
    )


def from_models(run: Path, contested: Mapping[tuple[str, ...], bool], others: bool) -> People:
    """Person → figures on its test pairs, with ``others`` also with the next person's model."""
    from prefed import load_run
    from prefed.engines.tasks import pair_figures

    loaded, found = load_run(run, data=True), {}
    data, scorer, personal = loaded.trainers.dataset, loaded.trainers.score, loaded.method.personal
    shared = loaded.published_models.get("shared") if personal else None
    # Newcomers have no model of their own.
    clients = [name for name in loaded.clients if name not in loaded.job.unseen]
    for client, other in zip(clients, [*clients[1:], clients[0]], strict=True):
        records = [data.tokens.record(int(row)) for row in data.clients[client].test]
        texts = [(str(each.prompt), each.chosen, each.rejected) for each in records]
        where = np.array([contested[client, *map(str.strip, each)] for each in texts], bool)
        scores = scorer(client, loaded.model(client), "test")
        figures = pair_figures(loaded.job, scores)
        own = found[client] = {
            **{"test": float(len(where)), "train": float(len(data.clients[client].train))},
            **{"accuracy": figures["reward_accuracy"], "preference": figures["preference_accuracy"]},
        }
        for name, part in (("contested", where), ("agreed", ~where)):
            if part.any():
                own[name] = pair_figures(loaded.job, only(scores, part))["reward_accuracy"]
        if others and shared is not None and personal:
            own["shared"] = pair_figures(loaded.job, scorer(client, shared, "test"))["reward_accuracy"]
        if others and (personal or loaded.method.infer is not None):
            anothers = pair_figures(loaded.job, scorer(client, loaded.model(other), "test"))
            own["another"] = anothers["reward_accuracy"]
    # From eight pairs alone if the method can, else after local steps on them.
    joined = json.loads((run / "summary.json").read_text("utf-8")).get("unseen_accuracy", {})
    for figures in [*joined.values()][-1:]:
        found |= {client: {"joined": value} for client, value in figures["per_client"].items()}
    return found


def collect(
    folder: Path, contested: Mapping[tuple[str, ...], bool], others: int | None
) -> dict[str, dict[str, list[People]]]:
    """Column → method → its seeds at the rate that is best on validation pairs with the first seed."""
    runs: dict[tuple[str, str], dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("*/*-seed*/summary.json")):
        if found := re.fullmatch(r"(.+?)(?:-lr(.+))?-seed\d+", path.parent.name):
            runs[path.parents[1].name, found[1]][found[2]].append(path.parent)
    cells: dict[str, dict[str, list[People]]] = defaultdict(dict)
    for (column, method), rates in runs.items():

        def validated(rate: str, rates: Mapping[str, list[Path]] = rates) -> float:
            summary = json.loads((rates[rate][0] / "summary.json").read_text("utf-8"))
            return float(summary["reward_accuracy"]["mean"])

        cells[column][method] = seeds = []
        for place, run in enumerate(rates[max(rates, key=validated)]):
            kept = run / "people.json"
            if not kept.exists():
                own = from_models(run, contested, others is None or place < others)
                files.write(kept, json.dumps(own).encode())
            seeds.append(json.loads(kept.read_text("utf-8")))
    return cells


def over_seeds(seeds: Sequence[People], name: str) -> dict[str, float]:
    """Person → mean over the seeds that have the figure; people without it are left out."""
    values = {person: [seed[person][name] for seed in seeds if name in seed[person]] for person in seeds[0]}
    return {person: float(np.mean(own)) for person, own in values.items() if own}


def row_of(method: str, seeds: Sequence[People], baseline: Sequence[People] | None) -> list[str]:
    """One line of the table."""

    def shown(values: Sequence[float], sign: str = "") -> str:
        if len(values) < 2:
            return "–"
        mean, half = interval(values)
        return f"{mean:{sign}.3f} ± {half:.3f}"

    own = over_seeds(seeds, "accuracy")
    lowest = sorted(own.values())[: max(1, len(own) // 10)]
    pairs, tested = over_seeds(seeds, "train"), over_seeds(seeds, "test")
    chance = np.sqrt(np.mean([own[name] * (1 - own[name]) / tested[name] for name in own]))
    common = over_seeds(baseline, "accuracy") if baseline and method != "feddpo" else {}
    another = over_seeds(seeds, "another")
    alike = over_seeds(
        [seed for seed in seeds if any("another" in one for one in seed.values())] or seeds, "accuracy"
    )
    each_seed = [float(np.mean([seed[name]["accuracy"] for name in own])) for seed in seeds]
    return [
        f"`{method}`",
        f"{np.median([*pairs.values()]):.0f}",
        f"{len(seeds)}",
        shown([*own.values()]),
        shown(each_seed),
        f"{np.mean(lowest):.3f}",
        f"{np.std([*own.values()], ddof=1):.3f}",
        f"{chance:.3f}",
        shown([*over_seeds(seeds, "contested").values()]),
        shown([*over_seeds(seeds, "agreed").values()]),
        shown([own[name] - common[name] for name in own if name in common], "+"),
        shown([alike[name] - another[name] for name in another], "+"),
        shown([*over_seeds(seeds, "preference").values()]),
        shown([*over_seeds(seeds, "joined").values()]),
    ]


def table(cells: Mapping[str, Mapping[str, Sequence[People]]]) -> str:
    """Markdown: a table of each column, best accuracy first."""
    lines = []
    for column, methods in sorted(cells.items()):
        lines += [f"## {column}", "", f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]

        def mean(method: str, methods: Mapping[str, Sequence[People]] = methods) -> float:
            return -float(np.mean([*over_seeds(methods[method], "accuracy").values()]))

        for method in sorted(methods, key=mean):
            lines.append(f"| {' | '.join(row_of(method, methods[method], methods.get('feddpo')))} |")
        lines.append("")
    return "\n".join(lines)


def pictures(cells: Mapping[str, Mapping[str, Sequence[People]]], folder: Path) -> None:
    """Draw accuracy with the shared and the own model by person, and accuracy by the number of own pairs."""
    sys.path.append(str(HERE.parents[1] / "benchmarks"))
    from common import save_picture

    from prefed.ui.pages.chart_data import Axis, Chart, Line, Panel, look_of, percent

    scatter, lines, accuracy = list[Line](), list[Line](), Axis("accuracy on test pairs", percent)
    methods = sorted({name for column in cells.values() for name in column})
    for place, name in enumerate(methods):
        seeds = cells.get("all", {}).get(name, ())
        if seeds and (shared := over_seeds(seeds, "shared")):
            own = over_seeds(seeds, "accuracy")
            points = [(shared[person], own[person]) for person in sorted(shared)]
            scatter.append(Line(name, points, sorted(shared), look_of(place), joined=False, main=0))
        found = []
        for column in ("own-8", "own-32", "own-128", "all"):
            if seeds := cells.get(column, {}).get(name, ()):
                mean, half = interval([*over_seeds(seeds, "accuracy").values()])
                found.append((float(np.mean([*over_seeds(seeds, "train").values()])), mean, half))
        if len(found) > 1:
            along, mean, half = (np.array(part) for part in zip(*found, strict=True))
            points = list(zip(along.tolist(), mean.tolist(), strict=True))
            low, high = (mean - half).tolist(), (mean + half).tolist()
            lines.append(Line(name, points, [""] * len(points), look_of(place), low, high))
    by_person = Panel(
        Axis("accuracy with the shared model", percent),
        Axis("with the own one", percent),
        scatter,
        diagonal=True,
    )
    by_pairs = Panel(Axis("own pairs, mean over people", log=True), accuracy, lines)
    for chart in (
        Chart("people-own", "accuracy by person", "", [by_person]),
        Chart("people-pairs", "accuracy by own pairs", "", [by_pairs]),
    ):
        save_picture(chart, folder / f"{chart.name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="a folder of prefed sweep, e.g. OUT/brief")
    parser.add_argument("--test", type=Path, default=HERE / "people.test.jsonl.gz")
    parser.add_argument("--out", type=Path, help="left out: RUNS/table.md")
    parser.add_argument(
        "--others", type=int, help="seeds that are judged with another's model, too; left out: all"
    )
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="draw people-own.svg, people-pairs.svg"
    )
    args = parser.parse_args()
    cells = collect(args.runs, split_by_agreement(read(args.test)), args.others)
    if not cells:
        parser.error(f"{args.runs}: no finished run")
    text = table(cells)
    files.write(args.out or args.runs / "table.md", text.encode())
    print(text)
    if args.pictures is not None:
        pictures(cells, args.pictures)


if __name__ == "__main__":
    main()
