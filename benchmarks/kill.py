"""Kill a real run with SIGKILL again and again, resume it, and compare with one left alone, bit by bit.

    python benchmarks/kill.py --kills 20

A generated federation of six clients and a tiny generated model; runs are killed after random delays until
they have survived the asked number of kills, then allowed to finish.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from prefed import Experiment, run
folder, out, method = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
experiment = Experiment.model_validate({
    "rounds": 12,
    "data": {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl"),
             "partition": {"by": "column", "column": "client"}, "max_length": 128},
    "model": {"name": str(folder / "model"), "lora": {"dropout": 0.1}},
    "cohort": {"size": 3},
    "method": {"name": method, "lr": 1e-3, "local_steps": 3},
    "engine": {"threads": 1},
})
print("ready", flush=True)
run(experiment, out, resume=out.exists())
"""
TIMES = {"seconds", "peak_memory_mb"}


def outcome(out: Path) -> tuple[bytes, list[dict[str, object]], dict[str, object]]:
    """The final state's bytes, the round log and the summary, clocks and memory left out."""
    lines = (out / "rounds.jsonl").read_text("utf-8").splitlines()
    rounds = [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    state = b"".join(path.read_bytes() for path in sorted((out / "checkpoint").rglob("*.safetensors")))
    return state, rounds, {k: v for k, v in summary.items() if k not in TIMES}


def main() -> None:
    shaped = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shaped)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--method", default="scaffold")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from prefed.core import Key
    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder / "model", synthetic.corpus(Key(7), 300), Key(7), steps=20)
        synthetic.write(folder, synthetic.generate(Key(7), clients=6, train=16, test=8))

        def start(out: Path) -> subprocess.Popen[str]:
            words = [sys.executable, "-c", RUN, str(folder), str(out), args.method]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            process.stdout.readline()
            return process

        started = time.perf_counter()
        alone = start(folder / "alone")
        assert alone.wait() == 0
        length = time.perf_counter() - started
        kills = runs = 0
        killed = folder / "killed"
        while kills < args.kills:
            process = start(killed)
            try:
                code = process.wait(draw.uniform(0, length / 3))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                continue
            assert code == 0, code
            same = outcome(killed) == outcome(folder / "alone")
            runs += 1
            print(f"finished after {kills} kills: {'equal to the bit' if same else 'DIFFERENT'}", flush=True)
            assert same
            killed = folder / f"killed-{runs}"
        assert start(killed).wait() == 0
        same = outcome(killed) == outcome(folder / "alone")
        end = "equal to the bit" if same else "DIFFERENT"
        print(f"{args.method}: {kills} kills over {runs + 1} runs: {end}")
        assert same


if __name__ == "__main__":
    main()
