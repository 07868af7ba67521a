r"""Visits of N clients with a common pass for a step of all of them (``[engine] stack``), next to one by one.

    OMP_NUM_THREADS=1 python benchmarks/stacked.py --model FOLDER     # CPU time of a client's step
    OMP_NUM_THREADS=1 python benchmarks/stacked.py --shape llama-wide --bf16
    OMP_NUM_THREADS=1 python benchmarks/stacked.py --roofline          # a model of a GPU

Each client has its own LoRA 8/16, dropout 0, and takes DPO steps with AdamW on pairs of random tokens. Both
ways alternate in one process; a ratio is the median of the turns' ratios. The first line is the largest
difference between a client's gradients of both ways in float64, relative to their norm.

The roofline is the model of ``roofline.py``, a bound and not a measurement. An H100 has one kernel for the
clients' products with a factor; other GPUs run one for each client.
"""

from __future__ import annotations

import argparse
import os
import statistics
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import Pairs, base_model, parse_with_model, timed
from roofline import DEVICES, SHAPES, Trace, Work, gpu_code, make_pairs

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase, PhaseResult, Tensors
from prefed.data import Pair
from prefed.models import LoraSettings, ModelConfig, make_backbone, stacked_lora
from prefed.runs.memory_plan import PlannedModel
from prefed.train import PairTrainer
from prefed.train.lockstep import Lockstep

TOKENS = (40, 20, 20)
"""Mean tokens of a prompt and of its two responses."""


class Clients:
    """N clients with pairs, and with a LoRA each away from its start."""

    def __init__(
        self, model: Any, count: int, pairs: int, dtype: str | None, optimizer: Optimizer, steps: int
    ):
        draw = np.random.default_rng(0)
        vocabulary = model.config.vocab_size

        def pair() -> Pair:
            lengths = [max(2, int(mean * draw.uniform(0.6, 1.4))) for mean in TOKENS]
            return Pair(*(draw.integers(5, vocabulary, length).astype(np.int32) for length in lengths))

        self.rows = np.arange(count * pairs).reshape(count, pairs)
        settings = LoraSettings(rank=8, alpha=16, dropout=0.0)
        backbone = make_backbone(model, None, ModelConfig(name="model", lora=settings, dtype=dtype), Key(0))
        self.trainer = PairTrainer(backbone, Pairs([pair() for _ in range(count * pairs)]))
        self.trainer.references.fill_training(self.rows.ravel(), self.rows.ravel())
        self.parts = Ownership.of(backbone.layout, lambda entry: Owner.SHARED)
        names, objective = self.parts.names(Owner.SHARED), Objective("dpo", {"beta": 0.1})
        self.phase = Phase("train", names, objective, optimizer, pairs, steps=steps)
        start, noise = backbone.initial.flat, torch.Generator().manual_seed(0)
        self.starts = [
            Tensors(
                backbone.layout, start + 0.01 * torch.randn(start.shape, generator=noise, dtype=start.dtype)
            )
            for _ in range(count)
        ]

    def visit(self, client: int) -> PhaseResult:
        """The phase of a client."""
        visit = self.trainer.visit(self.rows[client], Key(client), self.parts)
        return visit.train(self.starts[client], self.phase)

    def alone(self, count: int) -> list[PhaseResult]:
        """The phases of the first clients, one after the other."""
        return [self.visit(client) for client in range(count)]

    def together(self, count: int) -> list[PhaseResult]:
        """The phases of the first clients in common passes."""
        return Lockstep(self.trainer, count).run([partial(self.visit, client) for client in range(count)])


def difference(args: argparse.Namespace) -> float:
    """The largest relative difference between gradients of both ways, in float64.

    What the trainer computes in fp32 whatever the model's dtype is computed in float64 as well.
    """
    model = base_model(args).double()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch.Tensor, "float", torch.Tensor.double):
            clients = Clients(model, 4, args.pairs, None, Optimizer("sgd", lr=1.0, clip=0.0), 1)
            alone, together = clients.alone(4), clients.together(4)
    finally:
        torch.set_default_dtype(torch.float32)
    worst = 0.0
    for start, one, other in zip(clients.starts, alone, together, strict=True):
        gradient = one.tensors.flat - start.flat
        worst = max(worst, float((other.tensors.flat - one.tensors.flat).norm() / gradient.norm()))
    return worst


def measure(args: argparse.Namespace) -> None:
    """Print CPU times."""
    print(f"{args.shape}, {args.pairs} pairs: gradients in float64 differ by at most {difference(args):.1e}")
    dtype = "bfloat16" if args.bf16 else "float32"
    model = base_model(args).to(getattr(torch, dtype))
    clients = Clients(model, max(args.count), args.pairs, dtype, Optimizer("adamw", lr=1e-4), args.steps)
    print("| clients | dtype | one by one, ms a step | together, ms | times |\n|---|---|---|---|---|")
    for count in args.count:
        clients.together(count)
        pairs = []
        for _ in range(args.repeats):
            took = [timed(partial(way, count))[0] for way in (clients.alone, clients.together)]
            pairs.append([each / count / args.steps for each in took])
        alone, together = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"| {count} | {dtype} | {alone:.1f} | {together:.1f} | {ratio:.2f} |", flush=True)


def work_of(config: Any, count: int, each: int) -> Work:
    """Trace the second step of phases of ``count`` clients, each on ``each`` pairs of 200 tokens."""
    pairs = make_pairs(count * each, 200)
    settings = ModelConfig(name="shape", dtype="bfloat16", lora=LoraSettings(rank=8, alpha=16, dropout=0.0))
    model = PlannedModel(config, settings, frozenset({"lora"}), pairs)
    backbone, rows = model.backbone, np.arange(count * each).reshape(count, each)
    trainer = PairTrainer(backbone, pairs, max_tokens=1 << 60)
    trainer.references.training.put(rows.ravel(), np.zeros((rows.size, 2), np.float32))
    parts = Ownership.of(backbone.layout, lambda entry: Owner.SHARED)
    works = []
    for steps in (1, 2):
        names, objective = parts.names(Owner.SHARED), Objective("dpo", {"beta": 0.1})
        phase = Phase("train", names, objective, Optimizer("adamw", lr=1e-4), each, steps=steps)
        visits = [trainer.visit(own, Key(0), parts) for own in rows]
        calls = [partial(visit.train, backbone.initial, phase) for visit in visits]
        trace = Trace([], (0, 1))
        with gpu_code(trace), trace:
            Lockstep(trainer, count).run(calls) if count > 1 else calls[0]()
        works.append(trace.work)
    return works[1].since(works[0])


def roofline(counts: Sequence[int], pairs: int) -> None:
    """Print the model of GPUs: milliseconds of a client's step."""
    warnings.filterwarnings("ignore")
    heads = ["shape", "device", "clients", "TFLOP a client", "GB", "launches", "ms", "bound by", "times"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in ("qwen2-0.5b", "qwen2-1.5b", "llama-3-8b"):
        for where in ("H100 SXM", "A100 80 GB SXM"):
            first = 0.0
            for count in counts:
                config = SHAPES[name]()
                config.use_cache = False
                with patch.object(
                    stacked_lora, "_has_grouped_kernel", lambda device, own=where: "H100" in own
                ):
                    work = work_of(config, count, pairs)
                seconds, bound = work.on(DEVICES[where])
                own = 1e3 * seconds / count
                first = first or own
                totals = f"{work.flops / count / 1e12:.2f}", f"{work.bytes / count / 1e9:.1f}"
                cells = [f"`{name}`", where, f"{count}", *totals, f"{len(work.kernels) / count:,.0f}"]
                print(f"| {' | '.join(cells)} | {own:.1f} | {bound} | {first / own:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, nargs="+", default=[1, 2, 4, 8], help="clients in a stack")
    parser.add_argument("--pairs", type=int, default=2, help="pairs in a client's step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--roofline", action="store_true", help="a model of a GPU")
    args = parse_with_model(parser, "llama-wide")
    torch.set_num_threads(1)
    if args.roofline:
        roofline(args.count, args.pairs)
    else:
        measure(args)


if __name__ == "__main__":
    main()
