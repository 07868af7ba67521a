r"""CPU time of digests as a share of a round's, and of a commit that names many clients.

    python benchmarks/digests.py --clients 100 --cohort 4 --method fedpdpo --shape distilgpt2

A run of ``--cohort`` clients, all of them in every round, over generated preferences (8 training pairs a
client) and a tiny generated model, or one of ``--shape`` with random weights. What is digested and how long
it takes is counted where it happens; the share is of the cheapest round. Then the commit of a round of as
many states in a directory of ``--clients`` that have one each, with digests and without.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import cpu_ms, shape
from many_clients import write_data


@dataclass
class Spent:
    """CPU milliseconds and bytes of digests so far."""

    ms: float = 0.0
    size: int = 0

    def counted(self, work: Callable[[Any], str], size: Callable[[Any], int]) -> Callable[[Any], str]:
        """``work``, counted."""

        def call(what: Any) -> str:
            start = time.thread_time()
            result = work(what)
            self.ms += 1e3 * (time.thread_time() - start)
            self.size += size(what)
            return result

        return call


def rounds_of(folder: Path, args: argparse.Namespace, spent: Spent) -> list[tuple[float, float, int]]:
    """Each round's CPU milliseconds, those of its digests, and the bytes that these were of."""
    from prefed import Experiment, run
    from prefed.core import Callback
    from prefed.core.records import RoundRecord

    class Clock(Callback):
        def on_run_begin(self, done: int, rounds: int) -> None:
            self.marks = [self.mark()]

        def on_round_end(self, record: RoundRecord) -> None:
            self.marks.append(self.mark())

        def mark(self) -> tuple[float, float, int]:
            return 1e3 * time.process_time(), spent.ms, spent.size

    clock, data = Clock(), folder / "data"
    write_data(data, args.cohort)
    tree = {
        "rounds": args.rounds,
        "data": {
            "train": str(data / "train.jsonl"),
            "test": str(data / "test.jsonl"),
            "partition": {"by": "column", "column": "client"},
            "max_length": 128,
            "duplicates": "keep",
        },
        "model": {"name": str(folder / "model"), "lora": {"dropout": 0.0}},
        "method": {"name": args.method, "lr": 1e-3, "local_steps": 1},
        "evaluate": {"every": 0, "clients": 1},
        "engine": {"threads": 1, "max_tokens": 2048, "state_dtype": args.state_dtype},
    }
    run(Experiment.model_validate(tree), folder / "run", callbacks=[clock])
    return [
        (end[0] - begin[0], end[1] - begin[1], end[2] - begin[2])
        for begin, end in zip(clock.marks, clock.marks[1:], strict=False)
    ]


def commit_of(folder: Path, clients: int, cohort: int) -> tuple[float, float, int, int]:
    """CPU milliseconds of writing ``COMMIT.json`` with digests and without, and its bytes each way."""
    from prefed.core import files
    from prefed.core.records import RoundRecord
    from prefed.store import RunWriter
    from prefed.store.commit import write_commit

    sync, files.sync = files.sync, lambda path: None
    names = [f"client-{number:06d}" for number in range(clients)]
    with RunWriter(folder / "store") as store:
        store.begin(b"", {"data": 64 * "0", "model": 64 * "0"})
        for part in (names, names[:cohort]):
            for name in part:
                store.states.stage(name, b"state")
            store.states.accept(part)
            record: RoundRecord = {"round": store.round + 1, "bytes_up": 1, "bytes_down": 1}
            store.finish_round(b"", record, {"bytes_up": 1})
        commit = store.commit
    assert commit is not None
    files.sync = sync
    path = folder / "store/checkpoint"
    content = {name: value for name, value in vars(commit).items() if name not in ("digests", "settings")}

    def plain() -> None:
        files.write(path / "plain.json", json.dumps({"format": 1, **content}, indent=1).encode())

    def best(work: Callable[[], object]) -> float:
        return min(cpu_ms(work) for _ in range(5))

    times = best(lambda: write_commit(path, commit)), best(plain)
    large, small = ((path / name).stat().st_size for name in ("COMMIT.json", "plain.json"))
    return *times, large, small


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--method", default="fedper")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", help="of the model, as in dpo_step.py; left out: the tiny one")
    parser.add_argument("--state-dtype", default="float32", help="of the private states on disk")
    args = parser.parse_args()
    import torch

    from prefed.core import Key, files
    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    torch.set_num_threads(1)
    spent, opened = Spent(), Spent()
    digest = spent.counted(files.digest, len)
    of_file = opened.counted(files.file_digest, lambda path: path.stat().st_size)
    counted = patch.multiple(files, digest=digest, file_digest=of_file)
    with counted, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder / "model", synthetic.corpus(Key(7), 300), Key(7), steps=10)
        if args.shape:
            shape(args.shape).save_pretrained(folder / "model")
        whole, ms, size = min(rounds_of(folder, args, spent))
        print(
            f"{args.method}, {args.cohort} clients a round: {ms:.2f} ms of {whole:.0f} ms of CPU time, "
            f"{100 * ms / whole:.3f}% of the cheapest round, for {size / 2**20:.1f} MiB"
        )
        print(f"making and opening the data: {opened.ms:.1f} ms for {opened.size / 2**20:.2f} MiB")
        after, before, large, small = commit_of(folder, args.clients, args.cohort)
        print(
            f"COMMIT.json of {args.clients:,} clients: {after:.1f} ms and {large / 2**10:.0f} KiB, "
            f"without digests {before:.1f} ms and {small / 2**10:.0f} KiB: "
            f"{100 * (after - before) / whole:.3f}% of that round more"
        )


if __name__ == "__main__":
    main()
