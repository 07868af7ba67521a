r"""Rounds without a server in one process: what the mix costs compared with the training, and peak memory.

    OMP_NUM_THREADS=1 python benchmarks/nodes.py
    OMP_NUM_THREADS=1 python benchmarks/nodes.py --nodes 100 --nodes 1000 --graph ring --graph exponential

Each run is a process of its own: DecDPO with its defaults, five steps of 8 pairs at each node, over generated
preferences (8 training pairs a node) and a tiny generated model whose LoRA has 32,768 numbers. Seconds are of
the process's CPU time, a mean over the rounds; those of the disk that a commit waits for are apart, by the
clock. The mix is everything between the last upload and the commit: reading rows, W, writing, the mean model.

``--diagnose`` measures FedDPO with ``evaluate.diagnose = 5`` and 6 pairs of each client instead: what the
diagnosis of the fifth round costs compared with the training of five rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from many_clients import write_data

RUN = """
import json, sys, time
from collections import Counter
from pathlib import Path
import torch
torch.set_num_threads(1)
from prefed import Experiment, run
from prefed.engines import base_rounds, neighbours, server_rounds
from prefed.engines.config import DIAGNOSE

spent = Counter()

def measured(place, name, key, clock=time.process_time):
    original = getattr(place, name)
    def wrapped(*arguments, **named):
        start = clock()
        try:
            return original(*arguments, **named)
        finally:
            spent[key] += clock() - start
    setattr(place, name, wrapped)

measured(neighbours, "mix", "mix")
measured(neighbours, "mean_row", "mix")
measured(base_rounds.Course, "diagnose", "diagnose")
measured(base_rounds.Course, "commit", "commit")
measured(base_rounds.Course, "commit", "disk", time.perf_counter)
measured(neighbours.NeighbourRounds, "_train", "train")
measured(server_rounds.ServerRounds, "_round", "server round")
settings = json.loads(sys.argv[1])
result = run(Experiment.model_validate(settings), sys.argv[2])
count = len(result.rounds)
print(json.dumps({**{key: value / count for key, value in spent.items()},
                  "peak": result.summary["peak_memory_mb"], "edges": result.rounds[-1].get("edges")}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, action="append")
    parser.add_argument("--graph", action="append", choices=("ring", "exponential", "complete"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--diagnose", action="store_true")
    args = parser.parse_args()
    from prefed.core import Key
    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder / "model", synthetic.corpus(Key(7), 300), Key(7), steps=10)
        first: dict[str, float] = {}
        for nodes in args.nodes or ([100] if args.diagnose else [100, 1000]):
            data = folder / str(nodes)
            write_data(data, nodes)
            for graph in ["none"] if args.diagnose else args.graph or ["ring", "exponential"]:
                method = {"name": "feddpo", "lr": 1e-3, "local_steps": args.steps}
                settings: dict[str, Any] = {
                    "rounds": 5 if args.diagnose else args.rounds,
                    "data": {
                        "train": str(data / "train.jsonl"),
                        "test": str(data / "test.jsonl"),
                        "partition": {"by": "column", "column": "client"},
                        "max_length": 128,
                        "duplicates": "keep",
                    },
                    "model": {"name": str(folder / "model"), "lora": {"dropout": 0.0}},
                    "method": method if args.diagnose else {**method, "name": "decdpo"},
                    "evaluate": {"every": 0, "clients": 10},
                    "engine": {"threads": 1},
                }
                if args.diagnose:
                    settings["evaluate"] |= {"diagnose": 5, "diagnostic_pairs": 6}
                else:
                    settings["graph"] = {"name": graph}
                words = [sys.executable, "-c", RUN, json.dumps(settings), str(data / f"run-{graph}")]
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr)
                f = json.loads(done.stdout.splitlines()[-1])
                if args.diagnose:
                    rest = f["server round"] - f["diagnose"] - f["commit"]
                    print(
                        f"feddpo, {nodes} clients, {args.steps} steps: a diagnosis of 6 pairs every 5 rounds "
                        f"takes {100 * f['diagnose'] / rest:.1f}% of the rounds' time ({5 * rest:.1f} s)",
                        flush=True,
                    )
                    continue
                few = first.setdefault(graph, f["peak"])
                print(
                    f"{graph}, {nodes} nodes, {f['edges']} edges: training {f['train']:.1f} s a round, mix "
                    f"{f['mix']:.2f} s ({100 * f['mix'] / f['train']:.1f}%), commit {f['commit']:.2f} s and "
                    f"{f['disk']:.2f} s by the clock; peak {f['peak']:.0f} MiB "
                    f"({100 * (f['peak'] / few - 1):+.1f}%)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
