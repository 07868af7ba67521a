"""The consensus error of a star and of a path of five, over placements of clients, on a language model.

    OMP_NUM_THREADS=1 python benchmarks/consensus.py

Distributed DPO (arXiv:2605.20696) finds the star above the path, and calls it an anomaly. In theory (section
"mixing" of the documentation) it depends on what parts the nodes: noise of gradients has the star above the
path after the mix, and clients that differ have it just below. A path whose ends are alike and one whose ends
are not differ too, so the figures are means over placements.

DecDPO of five clients. Each placement on each graph is a run. All runs start from one model and draw the
same batches: they differ in who is whose neighbour alone. Printed are means and standard deviations over
placements of the mean of the last five rounds, and star over path compared with the formulas. Each client
is two personas, so clients differ; with ``--iid`` each has a share of the same pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import networkx as nx
import numpy as np
from common import SHARED, TOKENIZER

from prefed.config import Experiment
from prefed.core import Callback
from prefed.core.wire import encode
from prefed.engines import InProcess, Job, NeighbourRounds
from prefed.merge.config import GraphConfig
from prefed.merge.mixing_matrices import ConsensusFactors, consensus_factors
from prefed.models.pretrained import silence_transformers
from prefed.runs.build import build_job
from prefed.store import RunWriter

DATA = SHARED / "data" / "personas.train.jsonl.gz"
CLIENTS = {
    "left": ["politically-liberal", "risk-averse"],
    "right": ["politically-conservative", "risk-seeking"],
    "sports": ["interest-in-sports", "extraversion"],
    "math": ["interest-in-math", "narcissism"],
    "calm": ["subscribes-to-Buddhism", "agreeableness"],
}
NODES, LAST = len(CLIENTS), 5
GRAPHS = {"star": nx.star_graph(NODES - 1), "path": nx.path_graph(NODES)}
WHEN = ("before", "after")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="as experiments/personas prepares it")
    parser.add_argument("--iid", action="store_true", help="clients that do not differ")
    parser.add_argument("--model", default=str(TOKENIZER), help="a folder or a hub name")
    parser.add_argument("--placements", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5, help="local steps of a round")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"])
    parser.add_argument("--kept", action="store_true", help="nodes keep their optimisers, as the paper's do")
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    if not args.data.exists():
        raise SystemExit(f"{args.data}: no such file; experiments/personas/prepare.py writes one")
    silence_transformers()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = build_job(experiment(args), folder / "cache")
        found = {
            graph: [
                errors(placed(job, graph, placement, folder), folder / f"{graph}{placement}")
                for placement in range(args.placements)
            ]
            for graph in GRAPHS
        }
        graphs = {graph: placed(job, graph, 0, folder).topology.matrix(1) for graph in GRAPHS}
        report(found, {graph: consensus_factors(matrix) for graph, matrix in graphs.items()})


def experiment(args: argparse.Namespace) -> Experiment:
    """DecDPO with the paper's table 1, but for what the command changes."""
    partition: dict[str, object] = {"by": "column", "column": "persona", "groups": CLIENTS}
    if args.iid:
        partition = {"by": "iid", "clients": NODES}
    method = {"lr": args.lr, "local_steps": args.steps, "batch_size": 4, "beta": 0.2}
    method |= {"optimizer": args.optimizer, "optimizer_state": "kept" if args.kept else "new"}
    return Experiment.from_tables(
        {
            "rounds": args.rounds,
            "data": {
                "train": str(args.data),
                "partition": partition,
                "limit": 120,
                "max_length": 64,
                "test_fraction": 0.05,
            },
            "model": {"name": args.model, "lora": {"rank": 8, "dropout": 0.0}},
            "method": {"name": "decdpo", **method},
            "evaluate": {"every": 0, "clients": 1},
        },
        "benchmarks/consensus.py",
    )


def placed(job: Job, graph: str, placement: int, folder: Path) -> Job:
    """The job on a graph whose nodes are clients in a drawn order."""
    order = np.random.default_rng(placement).permutation(NODES)
    file = folder / f"{graph}{placement}.csv"
    names = [job.members[node] for node in order]
    file.write_text("".join(f"{names[a]},{names[b]}\n" for a, b in GRAPHS[graph].edges))
    return replace(job, graph=GraphConfig(name="edges", file=str(file)))


def errors(job: Job, path: Path) -> tuple[float, float]:
    """The consensus error before and after the mix, mean of the last rounds of a run."""
    with RunWriter(path) as writer, InProcess(job, writer.states) as backend:
        writer.begin(encode(job.method.init_server(job.trainers.initial)), job.trainers.fingerprint)
        NeighbourRounds(job, writer, backend, Callback()).run()
    got = [json.loads(line) for line in (path / "rounds.jsonl").read_text("utf-8").splitlines()][-LAST:]
    before, after = (statistics.fmean(record[f"consensus_{when}"] for record in got) for when in WHEN)
    return before, after


def report(found: dict[str, list[tuple[float, float]]], factors: dict[str, ConsensusFactors]) -> None:
    """Print the errors, and the star's over the path's."""
    for index, when in enumerate(WHEN):
        means = {}
        for graph, runs in found.items():
            values = [run[index] for run in runs]
            means[graph] = statistics.fmean(values)
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"{when} the mix, {graph}: {means[graph]:.4g} ± {spread:.2g} over {len(values)} placements")
        ratios = {
            cause: getattr(factors["star"], f"{cause}_{when}") / getattr(factors["path"], f"{cause}_{when}")
            for cause in ("heterogeneity", "noise")
        }
        print(
            f"  star over path: {means['star'] / means['path']:.3f}; of clients that differ "
            f"{ratios['heterogeneity']:.3f}, of noise {ratios['noise']:.3f}"
        )


if __name__ == "__main__":
    main()
