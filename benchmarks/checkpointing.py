r"""A training step with and without ``[model] checkpointing``: memory, time, and whether gradients are equal.

    OMP_NUM_THREADS=1 python benchmarks/checkpointing.py
    OMP_NUM_THREADS=1 python benchmarks/checkpointing.py --shape llama-8k --plain
    python benchmarks/checkpointing.py --shape qwen2-0.5b --device cuda --dtype bfloat16 --pairs 16

Random weights of a named shape and random pairs of one length; the prompt is half of a sequence. A step is
the DPO gradient of all pairs in one pass, in a process of its own. Peak memory is what the step takes beyond
the model: of resident memory on a CPU (the kernel's VmHWM), of PyTorch's allocations on a GPU. Times are CPU
seconds on a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Pairs, shape

from prefed.core import Key, Objective, Owner, Ownership, Tensors
from prefed.data import Pair
from prefed.engines.backends import peak_memory_mb
from prefed.models import ModelConfig, make_backbone
from prefed.train import PairTrainer


def make_pairs(count: int, tokens: int, vocabulary: int) -> Pairs:
    draw = np.random.default_rng(0)
    lengths = (tokens // 2, tokens - tokens // 2, tokens - tokens // 2)
    rows = [[draw.integers(2, vocabulary, n).astype(np.int32) for n in lengths] for _ in range(count)]
    return Pairs([Pair(*row) for row in rows])


def forget_the_peak(device: str) -> float:
    """MiB in use; from here on the peak is that of what follows."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory_mb()


def peak(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else peak_memory_mb()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One step, in this process."""
    torch.set_num_threads(1)
    settings = {
        "name": args.shape,
        "train": args.train,
        "device": args.device,
        "dtype": args.dtype,
        "fast": not args.plain,
        "checkpointing": args.checkpointing,
        "lora": {"dropout": args.dropout},
    }
    config = ModelConfig.model_validate(settings)
    needs = frozenset({"weights" if args.train == "full" else "lora"})
    model = shape(args.shape).to(getattr(torch, args.dtype))
    backbone = make_backbone(model, None, config, Key(1), needs)
    pairs = make_pairs(args.pairs, args.tokens, model.config.vocab_size)
    trainer = PairTrainer(backbone, pairs, max_tokens=1 << 30, fast=config.fast)
    rows, everything = np.arange(args.pairs), Ownership.of(backbone.layout, lambda entry: Owner.SHARED)
    # Away from the start, where the gradient of every A is 0.
    noise = torch.randn(backbone.layout.size, generator=torch.Generator().manual_seed(3))
    start = Tensors(backbone.layout, backbone.initial.flat + 0.01 * noise)
    trainer.references.fill_training(rows, rows)
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    before, started = forget_the_peak(args.device), clock()
    gradient, loss = trainer.visit(rows, Key(2), everything).gradient(start, Objective("dpo"))
    if args.device == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - started
    digest = hashlib.sha256(gradient.flat.numpy().tobytes()).hexdigest()
    return {"mib": peak(args.device) - before, "seconds": seconds, "loss": loss, "gradient": digest}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="distilgpt2")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt with a response (default 512)")
    parser.add_argument("--train", choices=("lora", "full"), default="lora")
    parser.add_argument("--dropout", type=float, default=0.1, help="of the LoRA (default 0.1)")
    parser.add_argument("--plain", action="store_true", help="the plain path: padded, and full logits")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args)))
        return
    results = []
    for more in ([], ["--checkpointing"]):
        words = [sys.executable, __file__, *sys.argv[1:], "--one", *more]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        figures = results[-1]
        name = "checkpointing" if more else "without"
        print(f"{name:14} {figures['mib']:9,.0f} MiB {figures['seconds']:8.2f} s", flush=True)
    plain, again = results
    same = "equal to the bit" if plain["gradient"] == again["gradient"] else "DIFFERENT"
    print(
        f"memory x {again['mib'] / plain['mib']:.2f}, time x {again['seconds'] / plain['seconds']:.2f}; "
        f"gradients {same}"
    )


if __name__ == "__main__":
    main()
