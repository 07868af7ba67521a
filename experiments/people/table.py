"""The table of the people, from finished runs of methods.toml or brief.toml.

    python experiments/people/table.py runs/people/brief --out runs/people/table.md

RUNS is a folder of ``prefed sweep``, with a folder for each column. Accuracy is reward accuracy; of a
selector it is the share of pairs that the selector orders as the person did. Contested are test pairs on
which 25% to 75% of the other judges agree with the person. "Another's" is the accuracy with the model of the
next person in the list, which tells what is personal in a model from what it learnt at all. What is computed
from a run's models is kept in its folder, as ``people.json``.
"""

from __future__ import annotations

import argparse
import json
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
    *("contested", "agreed", "less feddpo", "own less another's", "preference accuracy"),
)
People = dict[str, dict[str, float]]
"""Person → name → value."""


def split_by_agreement(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, ...], bool]:
    """(person, prompt, chosen, rejected) → whether the pair is contested."""
    names = ("person", "prompt", "chosen", "rejected")
    return {tuple(row[name].strip() for name in names): is_contested(row) for row in rows}


def from_models(run: Path, contested: Mapping[tuple[str, ...], bool]) -> People:
    """Person → accuracy on ``contested`` pairs and their number, and with the next person's model."""
    from prefed import load_run
    from prefed.engines.evaluation import pair_figures

    loaded, found = load_run(run, data=True), {}
    # Newcomers have no model of their own.
    clients = [name for name in loaded.clients if name not in loaded.job.unseen]
    for client, other in zip(clients, [*clients[1:], clients[0]], strict=True):

        def accuracy(owner: str, rows: Any, client: str = client) -> float:
            model = loaded.model(owner)
            scorer = loaded.trainers.pair_trainer
            scores = scorer.score(model, rows, loaded.trainers.examples(client, model))
            return pair_figures(loaded.job, scores)["reward_accuracy"]

        rows = loaded.trainers.dataset.clients[client].test
        records = [loaded.trainers.dataset.tokens.record(int(row)) for row in rows]
        known = np.array(
            [
                contested[client, str(each.prompt).strip(), each.chosen.strip(), each.rejected.strip()]
                for each in records
            ],
            bool,
        )
        own = found[client] = {"contested pairs": float(known.sum())}
        if known.any():
            own["contested"] = accuracy(client, rows[known])
        if loaded.method.personal or loaded.method.infer is not None:
            own["another"] = accuracy(other, rows)
    return found


def people_of(run: Path, contested: Mapping[tuple[str, ...], bool]) -> People:
    """Person → the figures of a finished run."""
    kept = run / "people.json"
    if not kept.exists():
        files.write(kept, json.dumps(from_models(run, contested)).encode())
    summary, found = (
        json.loads((run / "summary.json").read_text("utf-8")),
        json.loads(kept.read_text("utf-8")),
    )
    for person, own in found.items():
        own["test"] = summary["clients"][person]["test"]
        own["train"] = summary["clients"][person]["train"]
        own["accuracy"] = summary["reward_accuracy"]["per_client"][person]
        own["preference"] = summary["preference_accuracy"]["per_client"][person]
        rest = own["test"] - own["contested pairs"]
        if rest:
            right = own["accuracy"] * own["test"] - own.get("contested", 0.0) * own["contested pairs"]
            own["agreed"] = right / rest
    return found


def collect(folder: Path, contested: Mapping[tuple[str, ...], bool]) -> dict[str, dict[str, list[People]]]:
    """Column → method → its seeds, of runs with a summary that evaluates test pairs."""
    cells: dict[str, dict[str, list[People]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("*/*-seed*/summary.json")):
        if json.loads(path.read_text("utf-8")).get("split", "test") != "test":
            continue
        method = json.loads(path.read_text("utf-8"))["method"]
        cells[path.parents[1].name][method].append(people_of(path.parent, contested))
    return cells


def over_seeds(seeds: Sequence[People], name: str) -> dict[str, float]:
    """Person → mean over seeds; people without the figure are left out."""
    people = [person for person in seeds[0] if all(name in seed.get(person, {}) for seed in seeds)]
    return {person: float(np.mean([seed[person][name] for seed in seeds])) for person in people}


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
    each_seed = [float(np.mean([one["accuracy"] for one in seed.values()])) for seed in seeds]
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
        shown([own[name] - another[name] for name in another], "+"),
        shown([*over_seeds(seeds, "preference").values()]),
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="a folder of prefed sweep, e.g. OUT/brief")
    parser.add_argument("--test", type=Path, default=HERE / "people.test.jsonl.gz")
    parser.add_argument("--out", type=Path, help="left out: RUNS/table.md")
    args = parser.parse_args()
    cells = collect(args.runs, split_by_agreement(read(args.test)))
    if not cells:
        parser.error(f"{args.runs}: no finished run with test pairs")
    text = table(cells)
    files.write(args.out or args.runs / "table.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
