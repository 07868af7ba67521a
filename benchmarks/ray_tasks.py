r"""What a task costs besides its work: on Ray actors, in worker processes, in this process.

    python benchmarks/ray_tasks.py --tasks 200 --megabytes 1.2

Each task carries a message and a private state of that size, and brings both back. Its work is a copy.
There is one worker, which has done a few tasks before. It needs Ray: pip install 'prefed[ray]'.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prefed.core import (
    Download,
    Entry,
    Exchange,
    Layout,
    Method,
    Owner,
    Ownership,
    State,
    Tensors,
    Upload,
)
from prefed.core.wire import encode
from prefed.engines import BACKENDS, BackendSettings, Job, JobFactory, Task
from prefed.engines.tasks import MemoryStates


@dataclass(frozen=True)
class Sizes:
    """Pairs of a client."""

    train: int = 1
    validation: int = 0
    test: int = 1


class Visit:
    """A client's turn, as far as a copy needs one."""

    def __init__(self, client: str, now: Any) -> None:
        self.client, self.round = client, now

    def upload(self, tensors: dict[str, Tensors]) -> Upload:
        """What is sent."""
        return Upload(self.client, 1.0, tensors, {}, self.round.number)


class Copies:
    """Clients whose work is a copy."""

    def __init__(self, megabytes: float) -> None:
        half = int(megabytes * 2**20 / 4)
        layout = Layout((Entry("lora/0/A", (half,), "lora", 0, "A"), Entry("head", (half,), "head")))
        self.initial = Tensors(layout, torch.ones(2 * half))
        self.clients = {"one": Sizes()}
        self.fingerprint = {"megabytes": str(megabytes)}

    def trainer(self, client: str, now: Any, key: Any, ownership: Any) -> Visit:
        """One client's turn."""
        return Visit(client, now)


def build(megabytes: str) -> Job:
    """The job, in each process."""
    trainers: Any = Copies(float(megabytes))
    owners = {"lora": Owner.SHARED, "head": Owner.PERSONAL}
    ownership = Ownership.of(trainers.initial.layout, lambda entry: owners[entry.part])

    def work(trainer: Any, private: State, download: Download) -> tuple[Upload, State]:
        model, own = download.tensors["model"], private.tensors["personal"]
        return trainer.upload({"model": model}), State({"personal": own * 1.001})

    method = Method(
        name="copy",
        source="a benchmark",
        ownership=ownership,
        init_server=lambda initial: State({"model": ownership.select(initial, Owner.SHARED)}),
        init_client=lambda initial, client: State({"personal": ownership.select(initial, Owner.PERSONAL)}),
        exchanges=(
            Exchange(
                "copy",
                lambda server, client, now: Download({"model": server.tensors["model"]}),
                work,
                lambda server, uploads, now: (server, {}),
                scalars=frozenset(),
            ),
        ),
        publish=lambda server, client: Download({"model": server.tensors["model"]}),
        predict=lambda trainer, private, published: trainer.assemble(),
        personal=True,
    )
    return Job(trainers, method, seed=0, rounds=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--megabytes", type=float, default=1.2, help="of a message, and of a private state")
    parser.add_argument("--repeats", type=int, default=3, help="the smallest figure of so many counts")
    args = parser.parse_args()
    here = str(Path(__file__).resolve().parent)
    # The processes must find this file: it is what builds their job.
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    text, job = str(args.megabytes), build(str(args.megabytes))
    server = job.method.init_server(job.trainers.initial)
    exchange = job.exchange("copy")
    message = encode(exchange.send(server, "one", job.round(1)))
    print(f"{args.tasks} tasks, messages of {len(message) / 1e6:.2f} MB, threads 1, one worker")
    for name in ("in_process", "processes", "ray"):
        states = MemoryStates()
        start = time.perf_counter()
        factory = partial(JobFactory, "ray_tasks:build", text)
        with BACKENDS[name](job, factory, states, BackendSettings(1)) as backend:

            def done(count: int, backend: Any = backend) -> float:
                started = time.perf_counter()
                tasks = (Task("visit", "one", 1, "copy", message) for _ in range(count))
                for result in backend.run(tasks):
                    assert result.message, result.withheld
                    backend.accept([result.client])
                return time.perf_counter() - started

            done(5)
            ready = time.perf_counter() - start
            best = min(done(args.tasks) for _ in range(args.repeats)) / args.tasks
            memory = backend.memory_mb()
        print(
            f"{name:>10}: {1e3 * best:6.2f} ms a task, ready after {ready:4.1f} s, {memory:4.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
