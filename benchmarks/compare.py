"""How long ``prefed compare`` takes over runs of many clients, and how large its page is.

The run directories are made here, with figures that are drawn and not trained. Every client of a run has its
figures in every round, as after ``evaluate.every = 1``.

    python benchmarks/compare.py --runs 20 --clients 100 --rounds 20
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from prefed.train.metrics import federated_metric

METHODS = ("feddpo", "fedprox", "fedper", "ditto", "local")
SHARED = ("feddpo", "fedprox")
"""Methods without models of clients' own."""


def make_run(path: Path, number: int, args: argparse.Namespace) -> None:
    """A run directory as a finished run leaves it, without its checkpoint."""
    method = METHODS[number // args.seeds % len(METHODS)]
    seed, lr = 42 + number % args.seeds, 1e-3 * (1 + number // (args.seeds * len(METHODS)))
    draw = np.random.default_rng(number)
    start = draw.beta(4, 4, args.clients)
    end = np.clip(start + draw.normal(0.2, 0.15, args.clients), 0, 1)
    names = [f"client-{k}" for k in range(args.clients)]

    def over(values: np.ndarray[Any, Any]) -> Any:
        return federated_metric(dict(zip(names, values.tolist(), strict=True)))

    path.mkdir(parents=True)
    config = {
        "seed": seed,
        "rounds": args.rounds,
        "data": {"train": {"path": "pairs.jsonl"}, "partition": {"by": "column", "column": "worker"}},
        "model": {"name": "tiny", "lora": {"rank": 8}},
        "method": {"name": method, "lr": lr},
    }
    (path / "config.toml").write_text(tomli_w.dumps(config))
    evaluation: dict[str, Any] = {}
    with (path / "rounds.jsonl").open("w") as file:
        for number_of_round in range(1, args.rounds + 1):
            share = 1 - np.exp(-3 * number_of_round / args.rounds)
            own = np.clip(start + share * (end - start) + draw.normal(0, 0.02, args.clients), 0, 1)
            evaluation = {
                "baseline_accuracy": over(start),
                "preference_accuracy": over(own),
                "reward_accuracy": over(np.clip(own + 0.1, 0, 1)),
                "normalized_accuracy": over(own),
            }
            if method not in SHARED:
                evaluation["shared_accuracy"] = over(np.clip(own - draw.normal(0.1, 0.1, args.clients), 0, 1))
            record = {
                "round": number_of_round,
                "loss": 0.7 - 0.3 * share,
                "evaluation": evaluation,
                "bytes_up": 2_500_000,
                "bytes_down": 2_500_000,
                "seconds": float(draw.uniform(3, 6)),
                "cohort": names,
                "dropped": [],
            }
            file.write(json.dumps(record) + "\n")
    summary = {
        "method": method,
        "rounds": args.rounds,
        "seed": seed,
        **evaluation,
        "split": "test",
        "bytes": {"up": 2_500_000 * args.rounds, "down": 2_500_000 * args.rounds},
        "seconds": 4.5 * args.rounds,
        "clients": {name: {"train": 40, "validation": 8, "test": 12} for name in names},
    }
    (path / "summary.json").write_text(json.dumps(summary))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1, help="runs that differ in their seed alone")
    parser.add_argument(
        "--keep", type=Path, help="a folder for the runs and the page; left out: none is kept"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        for number in range(args.runs):
            method = METHODS[number // args.seeds % len(METHODS)]
            name = f"{method}-{number // (args.seeds * len(METHODS))}-seed{42 + number % args.seeds}"
            make_run(folder / "runs" / name, number, args)
        read = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{args.runs} runs of {args.clients} clients and {args.rounds} rounds, {read / 1e6:.1f} MB")
        page = folder / "page.html"
        for words in (["--html", str(page)], ["--json"]):
            command = [sys.executable, "-m", "prefed", "compare", str(folder / "runs"), *words]
            before, start = os.times(), time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wall, after = time.perf_counter() - start, os.times()
            cpu = after.children_user + after.children_system
            cpu -= before.children_user + before.children_system
            print(f"{words[0]:7} {wall:5.2f} s, {cpu:5.2f} CPU seconds, the start of Python included")
        print(f"page    {page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
