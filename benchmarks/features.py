"""FedPDPO's personal phase from cached trunk features, compared with recomputing the trunk in every step.

    OMP_NUM_THREADS=1 python benchmarks/features.py
    OMP_NUM_THREADS=1 python benchmarks/features.py --model FOLDER

A model, by default of DistilGPT2's shape, with bottleneck, untied head and reward head; HH-RLHF pairs, batch
8, max length 256. Three ways take the same steps in turn: features cached (their computing counted in), trunk
recomputed on packed batches, trunk recomputed on padded batches. CPU time of whole phases of ``--epochs``
epochs, and of a step once the features are there: what each further epoch costs.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import DATA, base_model, cpu_ms, load_pairs, matmul_peak, parse_with_model

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
from prefed.models import LoraSettings, ModelConfig, make_backbone
from prefed.train import PairTrainer, forward_passes
from prefed.train.logprobs import token_logprobs

NEEDS = frozenset({"lora", "bottleneck", "head", "reward"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    args = parse_with_model(parser, "distilgpt2")
    torch.set_num_threads(1)
    pairs = load_pairs(args.data, args.tokenizer, 256, args.pairs)
    rows = np.arange(len(pairs))
    base = base_model(args)
    zero = {"dropout": 0.0}
    config = ModelConfig.model_validate(
        {"name": args.shape, "lora": LoraSettings(dropout=0.0), "bottleneck": zero, "reward": zero}
    )
    ways = {}
    for name, fast in (
        ("cached features", True),
        ("packed, recomputed", True),
        ("padded, recomputed", False),
    ):
        backbone = make_backbone(
            copy.deepcopy(base), None, config.model_copy(update={"fast": fast}), Key(0), NEEDS
        )
        ways[name] = PairTrainer(backbone, pairs, fast=fast)
        ways[name].references.fill_training(rows, rows)
    layout = ways["cached features"].backbone.layout
    parts = Ownership.of(layout, lambda entry: Owner.SHARED if entry.part == "lora" else Owner.PERSONAL)
    phase = Phase(
        "personal",
        parts.names(Owner.PERSONAL),
        Objective("pdpo", {"beta": 0.1}),
        Optimizer("adamw", lr=1e-4),
        batch_size=8,
        epochs=args.epochs,
    )
    times: dict[str, list[float]] = {name: [] for name in ways}
    results = {}
    most = forward_passes.MAX_FEATURES
    for repeat in range(args.repeats + 1):
        for name, pair_trainer in ways.items():
            forward_passes.MAX_FEATURES = most if name == "cached features" else 0

            def work(pair_trainer: PairTrainer = pair_trainer, name: str = name) -> None:
                start = pair_trainer.backbone.initial
                results[name] = pair_trainer.visit(rows, Key(1), parts).train(start, phase)

            spent = cpu_ms(work)
            if repeat:
                times[name].append(spent)
    cached = ways["cached features"]
    forward_passes.MAX_FEATURES = most
    once = min(cpu_ms(lambda: cached.model.features(rows, rewards=True)) for _ in range(2))
    first = times["cached features"]
    print(f"{args.shape}, {len(pairs)} pairs, {args.epochs} epoch(s), batch 8")
    for name, values in times.items():
        ratio = statistics.median([b / a for a, b in zip(first, values, strict=True)])
        steps = results[name].steps
        further = values if name != "cached features" else [value - once for value in values]
        spare = statistics.median([b / (a - once) for a, b in zip(first, further, strict=True)])
        print(
            f"  {name:<20} {statistics.median(values) / steps:9.1f} ms a step   {ratio:5.2f}x   "
            f"once features are there {statistics.median(further) / steps:9.1f} ms   {spare:5.2f}x"
        )
    start = ways["cached features"].backbone.initial
    moved = (results["cached features"].tensors - start).norm()
    for name in ("packed, recomputed", "padded, recomputed"):
        gap = (results["cached features"].tensors - results[name].tensors).norm() / moved
        print(f"  difference from {name}: {gap:.1e} of the distance moved")
    dim, vocabulary = base.config.hidden_size, base.config.vocab_size
    count = int(pairs.lengths[:8, 1:].sum()) - 8
    hidden = torch.randn(count, dim, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, dim)).requires_grad_()
    pick, targets = torch.arange(count), torch.randint(vocabulary, (count,))

    into = torch.zeros(vocabulary, dim)

    def head() -> None:
        token_logprobs(hidden, weight, pick, targets, into).sum().backward()

    head()
    spent = min(cpu_ms(head) for _ in range(3))
    rate = 3 * 2 * count * dim * vocabulary / spent / 1e6
    peak = matmul_peak()
    share = 100 * rate / peak
    print(f"  the {dim} x {vocabulary} head's three products: {rate:.0f} GFLOP/s, {share:.0f}% of {peak:.0f}")


if __name__ == "__main__":
    main()
