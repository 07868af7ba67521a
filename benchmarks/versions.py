"""CPU time of a DPO step in two checkouts of prefed, interleaved step by step.

    git worktree add ../before f1b7b464
    OMP_NUM_THREADS=1 python benchmarks/versions.py ../before --shape distilgpt2
    OMP_NUM_THREADS=1 python benchmarks/versions.py ../before --model FOLDER --bf16 --max-length 192 --batch 2

Each checkout trains in its own process, and a step of one follows a step of the other on the same pairs.
Steps, LoRA and data are those of ``dpo_step.py``. Ratios are this checkout's time to the other's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

from common import DATA, parse_with_model


def serve(args: argparse.Namespace) -> None:
    """Take a step of the checkout on the path for each line of input, and print its milliseconds and loss."""
    import numpy as np
    import torch
    from common import base_model, load_pairs, timed

    from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
    from prefed.models import LoraSettings, ModelConfig, make_backbone
    from prefed.train import PairTrainer

    torch.set_num_threads(1)
    pairs = load_pairs(args.data, args.tokenizer, args.max_length, args.batch * (args.steps + 2))
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if args.bf16 else "float32"
    config = ModelConfig(name="model", lora=LoraSettings(rank=8, alpha=16, dropout=0.0), dtype=dtype)
    backbone = make_backbone(base_model(args).to(getattr(torch, dtype)), None, config, Key(0))
    trainer, everything = PairTrainer(backbone, pairs), np.arange(len(pairs))
    trainer.references.fill_training(everything, everything)
    parts = Ownership.of(backbone.layout, lambda entry: Owner.SHARED)
    objective, optimizer = Objective("dpo", {"beta": 0.1}), Optimizer("adamw", lr=1e-4)
    phase = Phase("train", parts.names(Owner.SHARED), objective, optimizer, args.batch, steps=1)
    for start in map(int, sys.stdin):
        rows, own = everything[start : start + args.batch], (Key(0), parts)
        if hasattr(trainer, "visit"):
            step = partial(trainer.visit(rows, *own).train, backbone.initial, phase)
        else:  # as in f1b7b464
            step = partial(trainer.train, backbone.initial, phase, rows, *own)  # type: ignore[attr-defined]
        took, result = timed(step)
        print(took, result.loss, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bf16", action="store_true")
    args = parse_with_model(parser, "gpt2-small-vocab")
    if args.serve:
        return serve(args)
    here = Path(__file__).resolve().parent.parent
    sides = []
    for checkout in (here, args.other.resolve()):
        path = os.pathsep.join(str(checkout / name) for name in ("src", "benchmarks"))
        # -P: modules come from the checkout's folders, not from this program's.
        command = [sys.executable, "-P", __file__, *sys.argv[1:], "--serve"]
        pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        sides.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipe))
    times, apart = [], 0.0
    for step in range(args.steps + 2):
        answers = []
        for side in sides:
            print(step * args.batch, file=side.stdin, flush=True)
            answers.append([float(number) for number in side.stdout.readline().split()])  # type: ignore[union-attr]
        (new, loss), (old, other) = answers
        apart = max(apart, abs(loss - other))
        times.append((new, old))
    for side in sides:
        side.communicate()
    ours, others = (statistics.median(pair[side] for pair in times[2:]) for side in (0, 1))
    low, middle, high = statistics.quantiles(new / old for new, old in times[2:])
    print(f"{args.shape}: {ours:.1f} ms, before {others:.1f}; ratio {middle:.3f} ({low:.3f} to {high:.3f})")
    print(f"losses differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
