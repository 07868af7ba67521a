r"""Peak memory of a run with many clients compared with one with few, the same number in each round.

    python benchmarks/many_clients.py --clients 100 --clients 10000 --cohort 100
    python benchmarks/many_clients.py --clients 1 --clients 100 --cohort 100 --method fedpdpo --rounds 1 \
        --shape distilgpt2 --state-dtype bfloat16

Each run is a process of its own, over generated preferences (8 training pairs and 1 test pair a client) and a
tiny generated model, or one of ``--shape`` with random weights; ``--method`` with personal parts keeps every
client's state on disk, a DistilGPT2-shaped head of 38.6 M parameters in 77 MB of bfloat16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import shape

RUN = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from prefed import Experiment, run
folder, clients, cohort = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
method, rounds, dtype = sys.argv[4], int(sys.argv[5]), sys.argv[6]
experiment = Experiment.model_validate({
    "rounds": rounds,
    "data": {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl"),
             "partition": {"by": "column", "column": "client"}, "max_length": 128, "duplicates": "keep"},
    "model": {"name": str(folder.parent / "model"), "lora": {"dropout": 0.0}},
    "cohort": {"size": min(clients, cohort)},
    "method": {"name": method, "lr": 1e-3, "local_steps": 1},
    "evaluate": {"every": 0, "clients": 100},
    "engine": {"threads": 1, "max_tokens": 2048, "state_dtype": dtype},
})
result = run(experiment, folder / f"run-{method}")
private = sorted((result.path / "checkpoint/clients").glob("*"))
held = sum(path.stat().st_size for path in private)
figures = {name: result.summary[name] for name in ("peak_memory_mb", "seconds")}
print(json.dumps({**figures, "disk_mb": held / 2**20}))
"""


def write_data(folder: Path, clients: int) -> None:
    """Generated preferences, a thousand clients at a time."""
    from prefed.core import Key
    from prefed.data import synthetic

    folder.mkdir(parents=True)
    for start in range(0, clients, 1000):
        part = folder / f"part-{start}"
        count = min(1000, clients - start)
        synthetic.write(part, synthetic.generate(Key(start), clients=count, train=8, test=1))
        for split in ("train", "test"):
            with (
                (part / f"{split}.jsonl").open(encoding="utf-8") as source,
                (folder / f"{split}.jsonl").open("a", encoding="utf-8") as target,
            ):
                for line in source:
                    row = json.loads(line)
                    row["client"] = f"{start}-{row['client']}"
                    target.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, action="append")
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--method", default="feddpo")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shape", help="of the model, as in dpo_step.py; left out: the tiny one")
    parser.add_argument("--state-dtype", default="float32", help="of the private states on disk")
    args = parser.parse_args()
    from prefed.core import Key
    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder / "model", synthetic.corpus(Key(7), 300), Key(7), steps=10)
        if args.shape:
            shape(args.shape).save_pretrained(folder / "model")
        first = None
        for clients in args.clients or [100, 10_000]:
            data = folder / str(clients)
            write_data(data, clients)
            words = [
                str(data),
                str(clients),
                str(args.cohort),
                args.method,
                str(args.rounds),
                args.state_dtype,
            ]
            done = subprocess.run(
                [sys.executable, "-c", RUN, *words], check=True, capture_output=True, text=True
            )
            figures = json.loads(done.stdout.splitlines()[-1])
            first = first or figures["peak_memory_mb"]
            peak = figures["peak_memory_mb"]
            print(
                f"{args.method}, {clients:>6} clients, {args.cohort} a round: peak {peak:.0f} MiB "
                f"({100 * (peak / first - 1):+.1f}%), private states {figures['disk_mb']:.0f} MiB on disk, "
                f"{figures['seconds']:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
