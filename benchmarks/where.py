"""Where the CPU time of a whole run goes: training, scoring, merging, messages, files, start.

    OMP_NUM_THREADS=1 python benchmarks/where.py experiments/smollm2/opposed.toml --methods feddpo fedvpa
    OMP_NUM_THREADS=1 python benchmarks/where.py FILE --set model.name=FOLDER rounds=1

Each method runs the experiment in its own process, from an empty folder. A kind of work stops the clock
of the work that calls it, so shares add up to the whole process, imports included.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

KINDS = {
    "reading and tokenizing": ("data.build:build_dataset",),
    "loading the model": ("models.backbone:load_backbone",),
    "reference log-probabilities": ("train.forward_passes:ReferenceLogprobs._compute",),
    "hidden states of the frozen model": ("train.tastes:ResponseFeatures._read",),
    "training": ("train.loss_trainer:LossTrainer.train", "train.tastes:LatentTrainer.train"),
    "uploads and private states": ("engines.tasks:_visit", "engines.base_rounds:read_upload"),
    "metrics of clients": ("engines.tasks:_evaluate",),
    "merge": ("engines.server_rounds:aggregate",),
    "answers": ("runs.answers:RoundAnswers.__call__", "runs.answers:RoundAnswers.write"),
    "files of the run": tuple(
        f"store.writer:RunWriter.{name}" for name in ("begin", "begin_round", "finish_round", "write_summary")
    ),
}
"""Kind of work → the functions that do it, those of lower floors first, so that others import them timed."""


class Clock:
    """CPU seconds by kind; a call of one kind within another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.stack, self.since = ["all else"], time.process_time()

    def turn(self) -> None:
        """Give the time since the last turn to the work that is being done."""
        now = time.process_time()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    def watch(self, kind: str, place: str) -> None:
        """Time a function, ``MODULE:NAME`` of prefed, as work of a kind."""
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(f"prefed.{module}")
        *outer, name = path.split(".")
        for step in outer:
            owner = getattr(owner, step)
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.turn()
            self.stack.append(kind)
            try:
                return plain(*args, **kwargs)
            finally:
                self.turn()
                self.stack.pop()

        setattr(owner, name, timed)


def measure(file: str, method: str, settings: list[str]) -> dict[str, float]:
    """CPU seconds of a run by kind of work, in this process."""
    clock = Clock()
    for kind, places in KINDS.items():
        for place in places:
            clock.watch(kind, place)
    from prefed.config import Experiment
    from prefed.runs.run import run

    torch.set_num_threads(1)
    experiment = Experiment.load(file, [f"method.name={method}", *settings])
    clock.seconds["imports"] = time.process_time()
    clock.since = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run")
    clock.turn()
    return dict(clock.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="an experiment file")
    parser.add_argument("--methods", nargs="+", default=["feddpo"])
    parser.add_argument("--set", nargs="*", default=[], help="settings, KEY=VALUE")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.file, args.methods[0], args.set)))
        return
    found = {}
    for method in args.methods:
        command = [sys.executable, __file__, args.file, "--one", "--methods", method, "--set", *args.set]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[method] = json.loads(output.splitlines()[-1])
    print(f"| CPU seconds | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for kind in ("imports", *KINDS, "all else"):
        shares = (f"{s.get(kind, 0):.1f} ({s.get(kind, 0) / sum(s.values()):.0%})" for s in found.values())
        print(f"| {kind} | {' | '.join(shares)} |")
    print(f"| all | {' | '.join(f'{sum(seconds.values()):.1f}' for seconds in found.values())} |")


if __name__ == "__main__":
    main()
