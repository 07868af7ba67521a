"""CPU and wall seconds of a round by number of threads and by how they wait, idle and next to other work.

    python benchmarks/threads.py --repeats 5

Other work is one process on every core that this program starts and ends, and that only computes. Run it on
a machine that does nothing else. Each figure is the median over the runs of a setting, taken in turns; for a
run it is the mean of its rounds but the first and the last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUN = """
import json, sys, time
from pathlib import Path
from prefed import Experiment, run
from prefed.core import Callback

folder, out, threads, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

class Clocks(Callback):
    def __init__(self):
        self.at = []
    def on_round_end(self, record):
        self.at.append((time.process_time(), time.perf_counter()))

clocks = Clocks()
experiment = Experiment.model_validate({
    "rounds": rounds,
    "data": {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl"),
             "partition": {"by": "column", "column": "client"}, "max_length": 128},
    "model": {"name": str(folder / "model"), "lora": {"dropout": 0.0}},
    "method": {"name": "feddpo", "lr": 1e-3, "local_steps": 2},
    "evaluate": {"every": 0},
    "engine": {"threads": threads},
})
run(experiment, out, callbacks=[clocks])
first, last, count = clocks.at[0], clocks.at[-2], rounds - 2  # the last round ends with an evaluation
print(json.dumps([(last[clock] - first[clock]) / count for clock in (0, 1)]))
"""


def settings(cores: int) -> dict[str, tuple[int, dict[str, str]]]:
    """Name → threads, environment."""
    return {
        "1 thread": (1, {}),
        f"{cores} threads, OpenMP's own way": (cores, {"GOMP_SPINCOUNT": "300000"}),
        f"{cores} threads, spinning 100,000": (cores, {"GOMP_SPINCOUNT": "100000"}),
        f"{cores} threads, spinning 10,000": (cores, {"GOMP_SPINCOUNT": "10000"}),
        f"{cores} threads, sleeping at once": (cores, {"OMP_WAIT_POLICY": "PASSIVE"}),
        f"{cores} threads, spinning 30,000": (cores, {"GOMP_SPINCOUNT": "30000"}),
        f"{cores} threads, the default": (cores, {}),
    }


def round_seconds(folder: Path, threads: int, more: dict[str, str], rounds: int) -> tuple[float, float]:
    """CPU and wall seconds of a round of a run in its own process."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))
    }
    with tempfile.TemporaryDirectory(dir=folder) as out:
        words = [sys.executable, "-c", RUN, str(folder), f"{out}/run", str(threads), str(rounds)]
        done = subprocess.run(words, env={**own, **more}, stdout=subprocess.PIPE, check=True)
    cpu, wall = json.loads(done.stdout)
    return cpu, wall


@contextmanager
def other_work(processes: int) -> Iterator[None]:
    """So many processes that compute until the block ends."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    shaped = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shaped)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    from prefed.core import Key
    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = {"layers": args.layers, "width": args.width, "steps": 1}
        make_tiny(folder / "model", synthetic.corpus(Key(7), 100), Key(7), **shape)
        synthetic.write(folder, synthetic.generate(Key(7), clients=4, train=16, test=2))
        for title, processes in (("idle", 0), (f"next to {cores} computing processes", cores)):
            runs_of: dict[str, list[tuple[float, float]]] = {}
            with other_work(processes):
                for _ in range(args.repeats):
                    for setting, (threads, more) in settings(cores).items():
                        figures = round_seconds(folder, threads, more, args.rounds)
                        runs_of.setdefault(setting, []).append(figures)
            print(f"{title}, seconds a round")
            for setting, runs in runs_of.items():
                cpu, wall = (statistics.median(clock) for clock in zip(*runs, strict=True))
                print(f"  {setting:36} CPU {cpu:6.3f}  wall {wall:6.3f}", flush=True)


if __name__ == "__main__":
    main()
