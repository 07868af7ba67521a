"""Writes a small finished run of the installed prefed, which the tests of later versions open.

    python scripts/freeze_run.py tests/frozen/VERSION

Run it once for each release, on the commit of the release, and commit the folder. It contains the pairs
(`train.jsonl`, `test.jsonl`), the base model (`model/`) and the run directory (`run/`). Paths in the run are
relative to the folder. `run/cache` is left out, because prefed rebuilds it, and so is `checkpoint/LOCK`,
which names this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from prefed import Experiment, run
from prefed.core import Key
from prefed.models.tiny import make_tiny

EXPERIMENT = {
    "seed": 1,
    "rounds": 2,
    "data": {
        "train": "train.jsonl",
        "test": "test.jsonl",
        "validation_fraction": 0.25,
        "partition": {"by": "column", "column": "worker"},
    },
    "model": {"name": "model", "lora": {"rank": 2, "targets": ["c_attn"]}},
    "method": {"name": "fedsdg", "lr": 0.02, "gate_lr": 0.1, "local_steps": 3, "batch_size": 4},
    "stop": {"metric": "reward_accuracy"},
    "engine": {"threads": 1},
}
"""A private state for each client, metrics from these states, and the best round next to the last one."""


def rows(count: int) -> list[dict[str, str]]:
    """Pairs of two clients with opposite preferences."""
    made = []
    for number in range(count):
        worker, up = ("left", "right")[number % 2], number % 2 == 0
        ends = [f" up {number % 3}", f" down {number % 5}"]
        chosen, rejected = ends if up else ends[::-1]
        made.append({"prompt": f"Case {number}:", "chosen": chosen, "rejected": rejected, "worker": worker})
    return made


def freeze(folder: Path) -> None:
    """Make the folder; it must not exist."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    pairs = rows(36)
    for name, part in (("train", pairs[:24]), ("test", pairs[24:])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    texts = [row["prompt"] + row["chosen"] for row in pairs]
    make_tiny(Path("model"), texts, Key(0), layers=1, width=16, heads=2, vocabulary=270, context=32, steps=20)
    run(Experiment.model_validate(EXPERIMENT), "run")
    shutil.rmtree("run/cache")
    Path("run/checkpoint/LOCK").unlink()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/freeze_run.py FOLDER")
    freeze(Path(sys.argv[1]))
