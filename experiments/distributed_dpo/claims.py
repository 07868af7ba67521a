"""Distributed DPO's claims compared with the results of runs.

    python experiments/distributed_dpo/claims.py runs/figures/personas
    python experiments/distributed_dpo/claims.py runs/opposed

The folder holds the runs ``ROW-seedSEED`` of a sweep of figures.toml or opposed.toml. The first table has
each row's mean over seeds of

- ``loss``: of the global objective, at the last diagnosis;
- ``gradient²``: the squared norm of its gradient, the mean of the last five diagnoses. What the draw of few
  pairs adds is taken off (:mod:`prefed.engines.diagnostics`), so it may be below 0;
- ``paper gap``: what the paper's code calls the final stationary gap;
- ``consensus``: before and after the mix, the mean of the last five rounds;
- ``reward``: share of test pairs whose chosen response gained more likelihood, mean and worst client;
- ``MB``: sent by all clients together.

A claim says that each row has a larger figure than the next one. It holds if that is so with every seed,
fails for a pair of rows if it is the other way round with every seed, and cannot be decided otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

Figures: TypeAlias = Mapping[str, float]
CLAIMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("more local steps, a smaller gap", ("e1", "feddpo", "e6")),
    ("more participation, a smaller gap", ("single", "partial", "feddpo")),
    ("more staleness, a larger gap (eq. 11)", ("q5", "q2", "feddpo")),
    ("more staleness, a larger gap (steps)", ("q5-delta", "q2-delta", "feddpo")),
    ("a larger spectral gap, a smaller gap", ("path", "ring", "complete")),
    ("centralised is slowest, DecDPO's ring fastest", ("centralized", "partial", "feddpo", "ring")),
    ("the same at equal steps", ("pooled", "feddpo", "ring-equal")),
)
"""What the paper says of loss, gradient and gap → the rows, from the largest to the smallest."""
CONSENSUS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("consensus error grows with ρ", ("path", "ring", "complete")),
    ("the star is above the path", ("star", "path")),
)
"""The same of the consensus error."""


def figures(run: Path) -> dict[str, float]:
    """The figures of a finished run."""
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    method, evaluate = (
        tomllib.loads((run / "config.toml").read_text("utf-8"))[name] for name in ("method", "evaluate")
    )
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text("utf-8").splitlines()]
    got = [record for record in rounds if "gradient_norm" in record][-5:]
    clients = len(summary["reward_accuracy"]["per_client"])
    drawn = evaluate.get("diagnostic_pairs")
    noise = 0.0 if drawn is None else method["batch_size"] / drawn / clients
    found = {}
    if got:  # where each client trains alone there is no model whose gradient they share
        found["loss"] = got[-1]["global_loss"]
        found["gradient²"] = statistics.fmean(r["gradient_norm"] ** 2 - noise * r["zeta2"] for r in got)
    found |= {
        "paper gap": summary["paper_gap"],
        "reward": summary["reward_accuracy"]["mean"],
        "worst": summary["reward_accuracy"]["worst"],
        "MB": (summary["bytes"]["up"] + summary["bytes"]["down"]) / 1e6,
    }
    for name in ("before", "after"):
        if f"consensus_{name}" in rounds[-1]:
            found[f"consensus {name}"] = statistics.fmean(r[f"consensus_{name}"] for r in rounds[-5:])
    return found


def read_folder(folder: Path) -> dict[str, dict[int, Figures]]:
    """Row → seed → the figures of its run."""
    found: dict[str, dict[int, Figures]] = {}
    for path in sorted(folder.glob("*-seed*/summary.json")):
        name = re.fullmatch(r"(.+)-seed(\d+)", path.parent.name)
        if name is not None:
            found.setdefault(name[1], {})[int(name[2])] = figures(path.parent)
    return found


def verdict(larger: Mapping[int, Figures], smaller: Mapping[int, Figures], figure: str) -> str:
    """Whether a figure is larger in one row than in the other, seed by seed.

    >>> verdict({1: {"loss": 0.5}, 2: {"loss": 0.6}}, {1: {"loss": 0.4}, 2: {"loss": 0.6}}, "loss")
    'cannot be decided'
    """
    gaps = [larger[seed][figure] - smaller[seed][figure] for seed in sorted(larger.keys() & smaller.keys())]
    if not gaps:
        return "no seed in common"
    return "holds" if min(gaps) > 0 else "fails" if max(gaps) < 0 else "cannot be decided"


def line_fit(shares: Mapping[str, float], runs: Mapping[str, Mapping[int, Figures]], figure: str) -> str:
    """The line through a figure against 1/S, and how much of its variance the line explains."""
    points = [(1 / share, each[figure]) for row, share in shares.items() for each in runs[row].values()]
    x, y = np.array(points).T
    slope, start = np.polyfit(x, y, 1)
    left, whole = (float((part**2).sum()) for part in (y - slope * x - start, y - y.mean()))
    explained = 1 - left / whole if whole else math.nan
    return f"{figure} = {start:.3g} + {slope:.3g} N/S, R² = {explained:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    runs = read_folder(folder)
    if not runs:
        parser.error(f"{folder}: no finished run ROW-seedSEED in it")
    names = list(dict.fromkeys(name for seeds in runs.values() for each in seeds.values() for name in each))
    print("| row | seeds |", *(f"{name} |" for name in names))
    print("|---|" + "---|" * (len(names) + 1))
    for row, seeds in runs.items():
        cells = []
        for name in names:
            values = [each[name] for each in seeds.values() if name in each]
            spread = statistics.stdev(values) if len(values) > 1 else math.nan
            cells.append(f"{statistics.fmean(values):.3g} ± {spread:.1g} |" if values else "|")
        print(f"| {row} | {len(seeds)} |", *cells)
    judged = ("loss", "gradient²", "paper gap"), ("consensus before", "consensus after")
    for claims, kinds in zip((CLAIMS, CONSENSUS), judged, strict=True):
        for text, rows in claims:
            there = [row for row in rows if row in runs]
            for larger, smaller in pairwise(there):
                said = (f"{kind}: {verdict(runs[larger], runs[smaller], kind)}" for kind in kinds)
                print(f"\n{text}: {larger} > {smaller}\n  " + "; ".join(said))
    shares = {
        row: share for row, share in {"single": 0.2, "partial": 0.6, "feddpo": 1.0}.items() if row in runs
    }
    if len(shares) > 1:
        print("\nthe gap lies on a line in 1/S")
        for figure in judged[0]:
            print(f"  {line_fit(shares, runs, figure)}")


if __name__ == "__main__":
    main()
