"""The share of a client's visit that its personal head takes to fetch, load and store.

    python benchmarks/personal_head.py --model FOLDER [--steps 10] [--visits 4]

Two clients take turns, so every visit fetches another head. A pair has a prompt and responses of about 100
tokens each; batches have four pairs. ``fetch`` reads the private state from disk and decodes it, ``load``
copies tensors to the model's device, and ``store`` encodes the new state and checks it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

PARTS = ("fetch", "load", "store")


def experiment(folder: Path, model: str, steps: int) -> Any:
    """FedPer over random words of two clients."""
    from prefed import Experiment

    draw = np.random.default_rng(0)

    def words() -> str:
        return " ".join(draw.choice(["we", "go", "far", "and", "the", "day", "is", "long"], 100))

    rows = [
        {"prompt": words(), "chosen": words(), "rejected": words(), "worker": f"client-{number % 2}"}
        for number in range(2 * 4 * steps)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: dict[str, Any] = {
        "train": str(folder / "pairs.jsonl"),
        "partition": {"by": "column", "column": "worker"},
    }
    data["test_fraction"] = 0.1
    method = {"name": "fedper", "local_steps": steps, "batch_size": 4}
    tables = {"rounds": 1, "data": data, "method": method, "model": {"name": model, "lora": {"rank": 8}}}
    return Experiment.model_validate(tables)


def main() -> None:
    from prefed.core.wire import encode
    from prefed.engines import tasks
    from prefed.engines.tasks import Task, run_task
    from prefed.models import Backbone
    from prefed.runs.build import build_job

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a folder with a model")
    parser.add_argument("--steps", type=int, default=10, help="steps per visit")
    parser.add_argument("--visits", type=int, default=4, help="visits to measure")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds = defaultdict[str, float](float)

    def timed(owner: Any, name: str, part: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*args, **named)
            finally:
                seconds[part] += time.perf_counter() - start

        setattr(owner, name, call)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = build_job(experiment(folder, given.model, given.steps), folder / "cache")

        class Disk:
            def read(self, client: str) -> bytes | None:
                start, path = time.perf_counter(), folder / client
                found = path.read_bytes() if path.exists() else None
                seconds["fetch"] += time.perf_counter() - start
                return found

            def stage(self, client: str, state: bytes) -> None:
                start = time.perf_counter()
                (folder / client).write_bytes(state)
                seconds["store"] += time.perf_counter() - start

            def accept(self, clients: Any) -> None: ...

        states, (exchange,) = Disk(), job.method.exchanges
        server = job.method.init_server(job.trainers.initial)
        timed(tasks, "_decoded", "fetch")
        timed(tasks, "digest", "store")
        timed(tasks, "encode", "store")
        timed(Backbone, "load", "load")
        whole = 0.0
        for visit in range(2 + given.visits):
            client, now = f"client-{visit % 2}", job.round(1 + visit)
            message = encode(exchange.send(server, client, now))
            if visit == 2:  # both clients have a state, and references are cached
                seconds.clear()
            start = time.perf_counter()
            run_task(job, Task("visit", client, now.number, "train", message), states)
            whole += (time.perf_counter() - start) if visit >= 2 else 0.0
        size = (folder / "client-0").stat().st_size
    print(f"private state: {size / 1e6:.0f} MB; a visit of {given.steps} steps: {whole / given.visits:.2f} s")
    for part in PARTS:
        own = seconds[part] / given.visits
        print(f"{part}: {1e3 * own:.0f} ms, {100 * own * given.visits / whole:.1f}% of the visit")


if __name__ == "__main__":
    main()
