"""Reward accuracy of the rows of sites.toml as clients measure it, and what sums cost next to central noise.

    for run in runs/privacy/sites/*-seed*/; do prefed evaluate $run --json > ${run%/}.json; done
    python experiments/privacy/sites_table.py runs/privacy/sites

A hub gets noised means, so the table of ``prefed sweep`` has noise in the rows with sums. A row here has ε,
the accuracy of each seed, its mean, and the mean difference to ``central`` with the same noise multiplier,
seed by seed; both with 95% intervals over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from prefed.train.metrics import seed_interval


def mean(values: Sequence[float]) -> str:
    """A mean and half the width of its interval."""
    interval = seed_interval(values)
    half = "" if interval is None else f" ± {(interval[1] - interval[0]) / 2:.3f}"
    return f"{fmean(values):.3f}{half}" if values else ""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    rows: dict[str, dict[int, float]] = {}
    epsilons: dict[str, float] = {}
    for path in sorted(parser.parse_args().folder.glob("*-seed*.json")):
        row, _, seed = path.stem.rpartition("-seed")
        rows.setdefault(row, {})[int(seed)] = json.loads(path.read_text())["reward_accuracy"]["mean"]
        epsilons[row] = json.loads((path.with_suffix("") / "summary.json").read_text())["privacy"]["epsilon"]
    seeds = sorted({seed for row in rows.values() for seed in row})
    print(f"| row | ε | {' | '.join(map(str, seeds))} | mean | minus central |\n{'|---' * (4 + len(seeds))}|")
    for row, found in rows.items():
        central = rows.get(f"central-{row.split('-')[1]}", {}) if row.startswith("sums") else {}
        minus = mean([found[seed] - central[seed] for seed in found if seed in central])
        each = [f"{found[seed]:.3f}" if seed in found else "" for seed in seeds]
        epsilon = f"{epsilons[row]:.2f}" if epsilons[row] else "–"
        print(f"| {row} | {epsilon} | {' | '.join(each)} | {mean([*found.values()])} | {minus} |")


if __name__ == "__main__":
    main()
