"""What a curious server learns from one update: was a pair among the client's, and which side was preferred?

    OMP_NUM_THREADS=1 python benchmarks/membership.py

The server does all it should and looks at what it was sent. It knows the model φ that it sent out, one
client's answer φ_i, and candidate pairs: those that the client trained on and as many others of the same
taste. It scores a candidate by how far the update goes down that pair's DPO loss:

    inner product   ⟨φ_i − φ, −∇L(pair; φ)⟩ / ‖∇L(pair; φ)‖
    drop            L(pair; φ) − L(pair; φ_i)

``membership`` is the area under the ROC curve of members against others: 1 separates them with certainty, 0.5
is a guess. ``side`` is the share of members of which the score's sign says rightly which response was
chosen, the pair being known without its order. Means over clients, each a persona with pairs and a visit of
its own, and their standard deviation. Everything runs on what really travels: the bytes of FedDPO's first
round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import SHARED, TOKENIZER, trainers_of

from prefed.config import Experiment
from prefed.core import Key, Objective, Tensors
from prefed.core.wire import decode_upload, encode
from prefed.engines import ClientStates, Job, Task, run_task
from prefed.models.pretrained import silence_transformers
from prefed.runs.build import build_job
from prefed.store import ClientStateFiles

DATA = SHARED / "data" / "personas.train.jsonl.gz"
SCORES = ("inner product", "drop")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="personas, as experiments/personas prepares them"
    )
    parser.add_argument("--model", default=str(TOKENIZER), help="a folder or a hub name")
    parser.add_argument("--cells", nargs="+", default=["1x1", "4x1", "16x6"], metavar="PAIRSxSTEPS")
    parser.add_argument("--others", type=int, default=32, help="candidates that are not the client's")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    if not args.data.exists():
        raise SystemExit(
            f"{args.data}: no such file; give --data (experiments/personas/prepare.py writes one)"
        )
    silence_transformers()
    torch.set_num_threads(1)
    print("| pairs | steps | clients | " + " | ".join(f"membership, {s} | side, {s}" for s in SCORES) + " |")
    print("|---" * (3 + 2 * len(SCORES)) + "|", flush=True)
    for cell in args.cells:
        pairs, steps = map(int, cell.split("x"))
        figures_of_clients = [
            figures for seed in range(args.seeds) for figures in clients(args, pairs, steps, seed)
        ]
        cells = [
            f"{statistics.mean(v):.2f} ± {statistics.pstdev(v):.2f}"
            for v in zip(*figures_of_clients, strict=True)
        ]
        print(f"| {pairs} | {steps} | {len(figures_of_clients)} | {' | '.join(cells)} |", flush=True)


def clients(args: argparse.Namespace, pairs: int, steps: int, seed: int) -> Iterator[list[float]]:
    """Membership and side by each score, of every persona in turn."""
    # A client's validation pairs are the others: drawn from the same persona, and it does not train on them.
    experiment = Experiment.model_validate(
        {
            "seed": seed,
            "rounds": 1,
            "data": {
                "train": str(args.data),
                "partition": {"by": "column", "column": "persona"},
                "validation_fraction": 0.5,
                "limit": pairs,
            },
            "model": {"name": args.model, "lora": {"dropout": 0.0}},
            "method": {
                "name": "feddpo", "lr": args.lr, "local_steps": steps, "batch_size": min(pairs, 8),
            },
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(experiment, Path(folder))
        for client in job.members:
            states = ClientStateFiles(Path(folder))
            yield attack(job, client, states, args.others, experiment.method.settings.goal())


def attack(job: Job, client: str, states: ClientStates, others: int, goal: Objective) -> list[float]:
    """What the server makes of one client's first upload."""
    method, place = job.method, trainers_of(job)
    sent = method.exchanges[0].send(method.init_server(place.initial), client, job.round(1))
    result = run_task(job, Task("visit", client, 1, "train", encode(sent)), states)
    before = place.initial.replace(*sent.tensors.values())
    after = before.replace(*decode_upload(result.message).tensors.values())
    update = (after - before).flat.double()
    data = place.dataset.clients[client]
    rows = np.concatenate([data.train, data.validation[:others]])
    scores = np.array([score(job, client, int(row), before, after, update, goal) for row in rows])
    member = np.arange(len(rows)) < len(data.train)
    areas = []
    for column in scores.T:
        areas += [auc(column[member], column[~member]), float((column[member] > 0).mean())]
    return areas


def score(
    job: Job, client: str, row: int, before: Tensors, after: Tensors, update: torch.Tensor, goal: Objective
) -> tuple[float, float]:
    """How far the update goes down the loss of one candidate: in slope, and in the loss itself."""
    visit = trainers_of(job).trainer(client, job.round(1), Key(0), job.method.ownership)
    alone = replace(visit, rows=np.array([row]))
    slope, loss = alone.gradient(before, goal, batch_size=0, name="candidate")
    flat = slope.flat.double()
    return float(-(update @ flat) / flat.norm()), loss - alone.loss(after, goal, "train")


def auc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Share of couples, one of each, in which the first is larger; ties count half."""
    gaps = inside[:, None] - outside[None, :]
    return float((gaps > 0).mean() + (gaps == 0).mean() / 2)


if __name__ == "__main__":
    main()
