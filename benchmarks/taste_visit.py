"""CPU time of a client's visit with a latent taste compared with one of FedDPO, on the same pairs.

    OMP_NUM_THREADS=1 python benchmarks/taste_visit.py --shape distilgpt2

Each method runs the same federation in this process, a round of one method after a round of the other. A
visit is all that a client does: the download is read, the client trains for as many steps of as many pairs,
and its upload is checked and written. In its first visit FedVPA-GP also computes the hidden states of all
its pairs, and the frozen model's answers; FedDPO the reference's log-probabilities of the pairs that it
trains on. Both keep them on disk. The whole run has the merges too; evaluations are left out of both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import DATA, TOKENIZER, shape, timed
from transformers import AutoTokenizer

from prefed import Experiment
from prefed.core import State
from prefed.core.wire import decode_upload, encode
from prefed.engines import Job, Task, run_task
from prefed.models.pretrained import silence_transformers
from prefed.runs.build import build_job


@dataclass
class Memory:
    """Clients' private states in memory."""

    states: dict[str, bytes] = field(default_factory=dict)

    def read(self, client: str) -> bytes | None:
        """A client's private state."""
        return self.states.get(client)

    def stage(self, client: str, state: bytes) -> None:
        """Keep a client's next private state."""
        self.states[client] = state

    def accept(self, clients: Iterable[str]) -> None:
        """All count already."""


@dataclass
class Federation:
    """One method's rounds, all clients in each, and the CPU milliseconds that they take.

    Attributes:
        visits: of each round, those of each client.
        merges: of each round.
        sent: bytes of each round, up and down.
    """

    job: Job
    server: State
    states: Memory = field(default_factory=Memory)
    visits: list[list[float]] = field(default_factory=list)
    merges: list[float] = field(default_factory=list)
    sent: list[tuple[int, int]] = field(default_factory=list)

    def round(self, number: int) -> None:
        """Carry out a round."""
        (exchange,) = self.job.method.exchanges
        now, spent, up, down, uploads = self.job.round(number), list[float](), 0, 0, []
        for client in self.job.members:
            message = encode(exchange.send(self.server, client, now))
            task = Task("visit", client, number, exchange.name, message)
            milliseconds, result = timed(partial(run_task, self.job, task, self.states))
            spent.append(milliseconds)
            up, down = up + len(result.message), down + len(message)
            uploads.append(decode_upload(result.message))
        milliseconds, (self.server, _) = timed(lambda: exchange.merge(self.server, uploads, now))
        self.visits.append(spent)
        self.merges.append(milliseconds)
        self.sent.append((up, down))

    @property
    def total(self) -> float:
        """CPU seconds of all rounds."""
        return (sum(map(sum, self.visits)) + sum(self.merges)) / 1e3


def federation(name: str, args: argparse.Namespace, model: Path, out: Path) -> Federation:
    """A method over the data, before its first round."""
    pairs = 1 if name == "feddpo" else 2  # a selector's batch counts a pair in both orders
    tree: dict[str, Any] = {
        "rounds": args.rounds,
        "data": {
            "train": str(args.data),
            "partition": {"by": "iid", "clients": args.clients},
            "test_fraction": 0.02,
            "limit": args.pairs,
            "max_length": 384,
        },
        "model": {"name": str(model), "lora": {"dropout": 0.0}, "device": "cpu"},
        "method": {"name": name, "lr": 1e-3, "local_steps": args.steps, "batch_size": args.batch * pairs},
        "engine": {"threads": 1},
    }
    job = build_job(Experiment.model_validate(tree), out / name)
    return Federation(job, job.method.init_server(job.trainers.initial))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="preference pairs")
    parser.add_argument("--model", type=Path, default=TOKENIZER, help="a folder with a model and a tokenizer")
    parser.add_argument("--shape", help="random weights, as in dpo_step.py, with --model's tokenizer")
    parser.add_argument(
        "--method", action="append", help="methods next to feddpo (default fedvpl and fedvpa)"
    )
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=60, help="training pairs of a client (default 60)")
    parser.add_argument("--batch", type=int, default=16, help="pairs of a step (default 16)")
    parser.add_argument("--steps", type=int, default=5, help="of a visit (default 5)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    silence_transformers()
    with tempfile.TemporaryDirectory() as folder:
        out, model = Path(folder), args.model
        if args.shape:
            model = out / "model"
            shape(args.shape).save_pretrained(model)
            AutoTokenizer.from_pretrained(args.model).save_pretrained(model)
        names = ["feddpo", *(args.method or ["fedvpl", "fedvpa"])]
        runs = {name: federation(name, args, model, out) for name in names}
        for number in range(1, args.rounds + 1):
            for each in runs.values():
                each.round(number)
    base = runs["feddpo"]
    for name, each in runs.items():
        first, base_first = (statistics.median(run.visits[0]) for run in (each, base))
        later, base_later = (
            statistics.median(ms for visits in run.visits[1:] for ms in visits) for run in (each, base)
        )
        up, down = (value // args.clients for value in each.sent[-1])
        print(
            f"{name}: first visit {first:,.0f} CPU ms ({first / base_first:.2f} of FedDPO's), later visits "
            f"{later:,.0f} ({later / base_later:.2f}), {args.rounds} rounds {each.total:.1f} CPU s "
            f"({each.total / base.total:.2f}); {up:,} bytes up and {down:,} down for a client and round"
        )


if __name__ == "__main__":
    main()
