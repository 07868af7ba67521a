"""The table of tastes.toml, ceilings.toml and lora.toml, from their finished runs, and what must hold in it.

    python experiments/tastes/table.py runs/tastes --out runs/tastes/table.md --jobs 2

RUNS is the ``--out`` of the sweeps. Every client's test pairs are judged with every client's z, which comes
from training pairs. Writes the table as Markdown, and next to it as JSON with the figures of every run.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from clients import AS_IT_IS, REVERSED, read

from prefed import load_run
from prefed.config import Experiment
from prefed.core import Tensors, files
from prefed.engines.tasks import pair_figures
from prefed.merge.posteriors import active_units
from prefed.runs.loaded_run import LoadedRun
from prefed.runs.tastes import read_tastes
from prefed.train.metrics.run_warnings import GAINS_FROM
from prefed.train.metrics.tastes import kl_per_dimension, transfer

CONTEXTS = (2, 4, 8, 16)
ROWS = (
    *("fedbis", "fedbiscuit-2", "fedbiscuit-3", "lore", "pal"),
    *("fedvpl", "fedvpa", "unbalanced", "prior", "prototypes"),
)
CEILINGS = {AS_IT_IS: "a", REVERSED: "b"}
"""Taste → the letter of the mix of its clients alone."""
COLUMNS = {
    "own": "own z",
    "own a": "as it is",
    "own b": "reversed",
    "another": "another's",
    "same": "same taste's",
    "opposite": "opposite taste's",
    "population": "population's",
    "sent": "the last one sent to the server",
    **{f"new {pairs}": f"new, {pairs} pairs" for pairs in CONTEXTS},
    **{f"far {pairs}": f"other personas, {pairs} pairs" for pairs in CONTEXTS},
    "active": "active units",
    "kl": "KL, nats",
    "misplaced": "at the other's prototype",
}
WEIGHTS = {"half": {"a": 0.5, "b": 0.5}, "seventy": {"a": 0.7, "b": 0.3}}
"""Mix → letter of a taste → its share of the clients."""
Figures = Mapping[str, float]
Cells = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""Mix → row → the figures of its seeds."""


def mean(values: Iterable[float]) -> float | None:
    """Their mean; ``None`` of none."""
    listed = list(values)
    return fmean(listed) if listed else None


def tastes_of(run: Path) -> dict[str, str]:
    """Client → its taste, from the run's training file."""
    source = Experiment.load(run / "config.toml").data.train
    return {row["client"]: row["taste"] for row in read(Path(source.path))}


def misplaced(labels: Mapping[str, int], tastes: Mapping[str, str]) -> int | None:
    """Clients at the prototype of the other taste, after the best match of two prototypes with two tastes.

    >>> misplaced({"a": 0, "b": 0, "c": 1, "d": 1}, dict(a="x", b="x", c="x", d="y"))
    1
    """
    kinds = sorted({tastes[client] for client in labels})
    if len(kinds) != 2:
        return None
    wrong = sum(label != kinds.index(tastes[client]) for client, label in labels.items())
    return min(wrong, len(labels) - wrong)


def figures_of(run: Path) -> dict[str, Any]:
    """The figures of one run; those that its method lacks are left out."""
    torch.set_num_threads(1)
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    tastes, own = tastes_of(run), summary["preference_accuracy"]["per_client"]
    found: dict[str, Any] = {
        "own": mean(own.values()),
        **{
            f"own {letter}": mean(own[client] for client in own if tastes[client] == taste)
            for taste, letter in CEILINGS.items()
        },
        "vote": summary.get("majority_accuracy", {}).get("mean"),
        "seconds": summary["seconds"],
    }
    unseen = summary.get("unseen_accuracy", {})
    for name, figure in unseen.items():
        for kind in ("new", "far"):
            accuracies = {c: value for c, value in figure["per_client"].items() if c.startswith(kind)}
            found[f"{kind} {name.removeprefix('pairs/')}"] = mean(accuracies.values())
    loaded = load_run(run, data=True)
    if loaded.method.tastes:
        read_out = read_tastes(loaded)
        over = transfer(read_out.accuracies, [tastes[client] for client in read_out.clients])
        kl = kl_per_dimension(read_out.means, read_out.log_variances)
        found |= {
            "another": over.another,
            "same": over.same_taste,
            "opposite": over.other_taste,
            "population": float(read_out.population.mean()),
            "sent": mean(read_out.sent.values()),
            "active": active_units(read_out.means),
            "kl": float(kl.sum()),
            "kl per dimension": kl.tolist(),
            "misplaced": misplaced(read_out.labels, tastes) if read_out.labels else None,
            "accuracies": read_out.accuracies.tolist(),
            "clients": list(read_out.clients),
            "trainable share": read_out.trainable_share,
        }
        # With one z for all, a selector is one for all: a pair and its reverse are right once.
        one = dict(zip(read_out.clients, read_out.population.tolist(), strict=True))
        check_twins(run, one)
    elif loaded.method.infer is not None:
        clients = [client for client in loaded.clients if client in own]
        models = [loaded.model(client) for client in clients]
        accuracies = [[accuracy(loaded, client, model) for model in models] for client in clients]
        over = transfer(np.array(accuracies), [tastes[client] for client in clients])
        found |= {"another": over.another, "same": over.same_taste, "opposite": over.other_taste}
    elif found["vote"] is None:
        check_twins(run, own)
    return {key: value for key, value in found.items() if value is not None}


def accuracy(run: LoadedRun, client: str, model: Tensors) -> float:
    """Accuracy of ``model``, with another client's weights perhaps, on the test pairs of ``client``."""
    return pair_figures(run.job, run.trainers.score(client, model, "test"))["preference_accuracy"]


def check_twins(run: Path, accuracies: Mapping[str, float]) -> None:
    """Half and half, one selector for all is 0.5 on average, exactly.

    Raises:
        SystemExit: it is not.
    """
    if run.parent.name == "half" and abs(fmean(accuracies.values()) - 0.5) > 1e-12:
        raise SystemExit(f"{run}: one selector has {fmean(accuracies.values())} on pairs and their reverses")


def collect(folders: Iterable[Path], jobs: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Mix → row → the figures of its seeds, of all finished runs in ``folders``."""
    runs = sorted(path.parent for folder in folders for path in folder.glob("*/*-seed*/summary.json"))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        figures = list(pool.map(figures_of, runs))
    cells: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for run, found in zip(runs, figures, strict=True):
        cells[run.parent.name][run.name.rpartition("-seed")[0]].append({"seed": run.name, **found})
    return cells


def over_seeds(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A figure of every seed that has it."""
    return [run[name] for run in runs if name in run]


def printed(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds.

    >>> printed([0.5, 0.75]), printed([2, 2, 2], 1), printed([])
    ('0.625 ± 0.177', '2.0', '')
    """
    if not values:
        return ""
    spread = stdev(values) if len(values) > 1 else 0.0
    return f"{fmean(values):.{digits}f}" + (f" ± {spread:.{digits}f}" if spread else "")


def table(cells: Cells) -> str:
    """One table of each mix."""
    lines = []
    for mix, rows in cells.items():
        head = ["method", *COLUMNS.values()]
        lines += [f"## {mix}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in sorted(rows, key=lambda name: ROWS.index(name) if name in ROWS else len(ROWS)):
            shown = [
                printed(over_seeds(rows[row], name), 1 if name in ("active", "kl", "misplaced") else 3)
                for name in COLUMNS
            ]
            lines.append(f"| `{row}` | " + " | ".join(shown) + " |")
        lines.append("")
    return "\n".join(lines)


def verdicts(cells: Cells, ceilings: Cells) -> list[str]:
    """What FedVPA-GP must show on opposed tastes, each with its figures and whether it holds."""
    lines = []
    for mix, row in (("half", "fedvpa"), ("seventy", "fedvpa"), ("seventy", "unbalanced")):
        own = {name: mean(over_seeds(cells.get(mix, {}).get(row, []), name)) for name in COLUMNS}
        alone = {
            letter: {
                name: mean(over_seeds(ceilings.get(f"{mix}-{letter}", {}).get("fedvpa", []), name))
                for name in COLUMNS
            }
            for letter in CEILINGS.values()
        }
        if own["own"] is None or any(top["own"] is None for top in alone.values()):
            continue
        lines += [f"- {mix}, {row}, {text}" for text in claims(own, alone, WEIGHTS[mix])]
    return lines + collapses(cells)


def claims(own: Mapping[str, Any], alone: Mapping[str, Mapping[str, Any]], weights: Figures) -> list[str]:
    """The thresholds of one row: ``own`` are its means, ``alone`` those of each ceiling, by letter."""
    lines = []

    def claim(text: str, holds: bool) -> None:
        lines.append(f"{text}: {'holds' if holds else 'FAILS'}")

    for taste, letter in CEILINGS.items():
        here, top = own[f"own {letter}"], alone[letter]["own"]
        claim(f"{taste}: own z {here:.3f}, ceiling {top:.3f}, within 0.05", here >= top - 0.05)
    top = sum(weights[letter] * alone[letter]["own"] for letter in weights)
    gap, least = own["own"] - own["opposite"], 0.8 * (2 * top - 1)
    claim(f"own z less the opposite taste's {gap:.3f}, at least {least:.3f}", gap >= least)
    apart = abs(own["own"] - own["same"])
    claim(f"own z {own['own']:.3f}, the same taste's {own['same']:.3f}, within 0.03", apart <= 0.03)
    # Of newcomers there are as many of each taste.
    for kind, text in (("new", "newcomers"), ("far", "newcomers of other personas")):
        top = fmean(each[f"{kind} 8"] for each in alone.values())
        here = own[f"{kind} 8"]
        claim(f"{text} with 8 pairs {here:.3f}, their ceiling {top:.3f}, within 0.10", here >= top - 0.1)
    return lines


def collapses(cells: Cells) -> list[str]:
    """Which rows' tastes say nothing, by own z less another's."""
    lines = []
    for mix, rows in cells.items():
        for row, runs in rows.items():
            gaps = [run["own"] - run["another"] for run in runs if "another" in run]
            if gaps:
                dead = sum(gap < GAINS_FROM for gap in gaps)
                text = f"own z less another's {printed(gaps)}; collapsed in {dead} of {len(gaps)} runs"
                lines.append(f"- {mix}, {row}: {text}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="the --out of the sweeps")
    parser.add_argument("--out", type=Path, help="left out: RUNS/table.md")
    parser.add_argument("--jobs", type=int, default=1, help="runs that are read at a time (default 1)")
    args = parser.parse_args()
    cells = collect((args.runs / "tastes", args.runs / "lora"), args.jobs)
    ceilings = collect([args.runs / "ceilings"], args.jobs)
    if not cells:
        parser.error(f"{args.runs}/tastes: no finished run; `prefed sweep` of tastes.toml makes them")
    text = "\n".join([table(cells), table(ceilings), *verdicts(cells, ceilings), ""])
    out = args.out or args.runs / "table.md"
    files.write(out, text.encode())
    got = {"cells": cells, "ceilings": ceilings}
    files.write(out.with_suffix(".json"), json.dumps(got, indent=1).encode())
    print(text)


if __name__ == "__main__":
    main()
