"""Time of one DPO step compared with TRL's DPOTrainer, interleaved step by step in one process.

    OMP_NUM_THREADS=1 python benchmarks/dpo_step.py --shape distilgpt2
    OMP_NUM_THREADS=1 python benchmarks/dpo_step.py --model FOLDER --max-length 192 --batch 2 --steps 3

Peers, on the same token ids, LoRA 8/16 on the same modules, dropout 0, fp32, no checkpointing:

- ``trl``: DPOTrainer as it comes;
- ``trl, reference precomputed``: its ``precompute_ref_log_probs``;
- ``trl, precomputed, completion head``: also its LM head on completion positions only, which it does
  by itself where Triton is available.

A step is collate, forward, backward, clip and AdamW. The loss of the first step is compared too. The time is
CPU time; with a GPU it is wall time. The memory is the peak beyond the loaded model, trainer and optimiser
included, each side in a process of its own, with the largest batch; with a GPU it is that of a step.
``--bf16`` adds both sides in bf16: the weights' dtype, and TRL's own ``bf16``.

The last lines compare prefed's time with the matrix products that a step cannot do without: their rate as a
share of the fastest product of a batch with one of the model's weights, in the same dtype. On a CPU a table
says where a profiled step's time goes, with the rate of its products and the fastest one at their shapes.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import numpy as np
import torch
import trl.trainer.utils
from common import (
    DATA,
    Memory,
    Pairs,
    base_model,
    cpu_ms,
    load_pairs,
    lora_config,
    matmul_peak,
    matmul_rate,
    parse_with_model,
    timed,
)
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
from prefed.engines.backends import peak_memory_mb
from prefed.models import LoraSettings, ModelConfig, make_backbone
from prefed.models.families import FAMILIES
from prefed.train import PairTrainer
from prefed.train.feedback.pairs import PairScores
from prefed.train.logprobs import BLOCK

BETA, LR, RANK = 0.1, 1e-4, 8
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "mkldnn::_linear_pointwise"}
PEERS = {
    "trl": (False, False),
    "trl, reference precomputed": (True, False),
    "trl, precomputed, completion head": (True, True),
    "trl, precomputed, completion head, bf16": (True, True),
}
"""Whether the reference is precomputed, and the head on completions only."""


class Prefed:
    """prefed's trainer, driven a step at a time."""

    def __init__(self, model: Any, pairs: Pairs, *, batch: int, bf16: bool, **settings: Any) -> None:
        lora = LoraSettings(rank=RANK, alpha=16, dropout=0.0)
        config = ModelConfig(name="model", lora=lora, dtype="bfloat16" if bf16 else "float32", **settings)
        self.backbone = make_backbone(model, None, config, Key(0))
        self.trainer = PairTrainer(self.backbone, pairs)
        self.everything = np.arange(len(pairs))
        self.trainer.references.fill_training(self.everything, self.everything)
        self.parts = Ownership.of(self.backbone.layout, lambda entry: Owner.SHARED)
        objective, optimizer = Objective("dpo", {"beta": BETA}), Optimizer("adamw", lr=LR)
        self.phase = Phase("train", self.parts.names(Owner.SHARED), objective, optimizer, batch, steps=1)

    @property
    def reference(self) -> np.ndarray:
        """``[n, 2]`` log-probabilities of the responses by the reference."""
        scores = self.trainer.score(self.backbone.initial, self.everything)
        assert isinstance(scores, PairScores)
        return scores.reference

    def step(self, rows: np.ndarray) -> float:
        """Collate, forward, backward, clip, step; the loss."""
        return self.trainer.visit(rows, Key(0), self.parts).train(self.backbone.initial, self.phase).loss


class Trl:
    """TRL's trainer, driven a step at a time."""

    def __init__(
        self,
        model: Any,
        targets: list[str],
        pairs: Pairs,
        *,
        tokenizer: Path,
        reference: Any,
        compact: bool,
        batch: int,
        bf16: bool,
    ) -> None:
        self.pairs, self.reference, self.compact = pairs, reference, compact
        config = DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=batch,
            beta=BETA,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_length=None,
            gradient_checkpointing=False,
            bf16=bf16,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        lora = lora_config(model, targets)
        text = datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * batch)
        encode = AutoTokenizer.from_pretrained(tokenizer)
        self.trainer = DPOTrainer(
            model, args=config, train_dataset=text, processing_class=encode, peft_config=lora
        )
        self.trainer.precompute_ref_logps = reference is not None
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.create_optimizer()
        self.model = self.trainer.model.train()

    def step(self, rows: np.ndarray) -> float:
        """Collate, forward, backward, clip, step; the loss."""
        examples = []
        for row in rows:
            pair = self.pairs.pair(int(row))
            example = {f"{k}_ids": getattr(pair, k).tolist() for k in ("prompt", "chosen", "rejected")}
            if self.reference is not None:
                example["ref_chosen_logps"], example["ref_rejected_logps"] = self.reference[row].tolist()
            examples.append(example)
        trl.trainer.utils._use_triton = lambda device: self.compact
        inputs = self.trainer.data_collator(examples)
        loss = self.trainer.training_step(self.model, inputs)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        return float(loss)


def blocks(model: Any) -> Any:
    """The decoder blocks of a family that prefed packs."""
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        raise SystemExit(f"{model.config.model_type}: no family that prefed packs ({', '.join(FAMILIES)})")
    return getattr(model.base_model, family.blocks)


def weights(model: Any) -> list[torch.Size]:
    """The shapes of a block's matrices, and of the head's."""
    matrices = [weight.shape for weight in blocks(model)[0].parameters() if weight.dim() == 2]
    return [*matrices, model.get_output_embeddings().weight.shape]


def needed_flops(model: Any, pairs: Pairs, rows: np.ndarray) -> float:
    """Operations, two a multiply-add, of the products that a step cannot do without.

    Frozen linear layers forward and back to their input (two products; the first block's input needs none),
    attention over the positions it must see, the head's two products. After the keys and values of the last
    block only positions that predict a completion count, as for the head. LoRA's products are left out.
    """
    config, count = model.config, len(blocks(model))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query = config.num_attention_heads * width
    shared = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    into_queries, into_keys_and_values = config.hidden_size * query, config.hidden_size * 2 * shared * width
    *block, head = (size.numel() for size in weights(model))
    total = 0.0
    for p, c, r in pairs.lengths[rows].astype(int):
        tokens, scored = p + c + r - 2, c + r - 1
        for number in range(count):
            last = number == count - 1
            at = scored if last else tokens
            prompt = p if last else p * (p + 1) / 2
            seen = prompt + (c - 1) * p + c * (c - 1) / 2 + (r - 1) * p + r * (r - 1) / 2
            forward = into_keys_and_values * tokens + (sum(block) - into_keys_and_values) * at
            back = forward
            if number == 0:
                back -= into_keys_and_values * tokens + into_queries * at
            total += 2 * (forward + back) + 3 * 4 * query * seen
        total += 2 * 2 * scored * head
    return total


def kind_of(event: Any, config: Any) -> str:
    """The kind of work of a profiled operation, by its name and the shapes of its operands."""
    shapes = [shape for shape in event.input_shapes if shape]
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    last = {shape[-1] for shape in shapes}
    if event.key in PRODUCTS:
        sizes = {size for shape in shapes for size in shape}
        if RANK in sizes:
            return "products with LoRA's factors"
        vocabulary = config.vocab_size % BLOCK or BLOCK
        return "the head's products" if sizes & {BLOCK, vocabulary} else "products with frozen weights"
    if "attention" in event.key:
        return "attention"
    if "adam" in event.key:
        return "optimiser"
    if inner in last or "silu" in event.key or "gelu" in event.key:
        return "activation"
    if any(len(shape) == 4 for shape in shapes):
        return "rotary embedding, layout of heads"
    if last & {BLOCK, config.vocab_size % BLOCK}:
        return "softmax of the head"
    return "norms, residuals" if config.hidden_size in last else "all else"


def breakdown(side: Prefed, rows: np.ndarray, dtype: torch.dtype) -> None:
    """Print the kinds of work of a step: share of its profiled CPU time, and rates of its products."""
    whole = min(cpu_ms(partial(side.step, rows)) for _ in range(3))
    shares = []
    for _ in range(5):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            side.step(rows)
        events = trace.key_averages(group_by_input_shape=True)
        times = Counter[str]()
        for event in events:
            times[kind_of(event, side.backbone.text_config)] += event.self_cpu_time_total
        shares.append(times)
    # Of wall time, which other programs lengthen, hence medians.
    took = Counter({kind: statistics.median(each[kind] for each in shares) for kind in shares[0]})
    flops, fastest = Counter[str](), Counter[str]()
    for event in events:
        kind = kind_of(event, side.backbone.text_config)
        if kind in ("products with frozen weights", "the head's products"):
            left, right = [shape for shape in event.input_shapes if len(shape) == 2][-2:]
            (m, k), n = left, math.prod(right) // left[1]
            flops[kind] += event.count * 2 * m * n * k
            fastest[kind] += event.count * 2 * m * n * k / matmul_rate(m, n, k, dtype) / 1e6
    print(
        "    | kind of work | share of the time | GFLOP/s | fastest at these shapes |\n    |---|---|---|---|"
    )
    for kind, time in took.most_common():
        share = time / took.total()
        rates = [flops[kind] / each / 1e6 for each in (share * whole, fastest[kind])] if flops[kind] else []
        cells = [f"{rate:.0f}" for rate in rates] or ["", ""]
        print(f"    | {kind} | {100 * share:.0f}% | {' | '.join(cells)} |")


def add_peer(base: Any, name: str, pairs: Pairs, args: argparse.Namespace, reference: np.ndarray) -> Trl:
    """One of :data:`PEERS` over a model."""
    precomputed, compact = PEERS[name]
    return Trl(
        base,
        list(FAMILIES[base.config.model_type].targets),
        pairs,
        tokenizer=args.tokenizer,
        reference=reference if precomputed else None,
        compact=compact,
        batch=args.batch,
        bf16=name.endswith("bf16"),
    )


def alone(name: str, base: Any, pairs: Pairs, args: argparse.Namespace) -> None:
    """Print the MiB that two steps of the largest batch take beyond the loaded model."""
    sizes = pairs.lengths.sum(1).reshape(-1, args.batch).sum(1)
    rows = int(sizes.argmax()) * args.batch + np.arange(args.batch)
    # What loading took at its peak does not count.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory_mb()
    side: Any
    if name in PEERS:
        side = add_peer(base, name, pairs, args, np.zeros((len(pairs), 2)))
    else:
        side = Prefed(base, pairs, batch=args.batch, bf16=name.endswith("bf16"))
    for _ in range(2):
        side.step(rows)
    print(peak_memory_mb() - before)


def memory_of(name: str) -> float:
    """What :func:`alone` prints in a process of its own."""
    command = [sys.executable, *sys.argv, "--alone", name]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="also time both sides in bf16")
    parser.add_argument("--alone", metavar="SIDE", help="print the memory of one side only")
    args = parse_with_model(parser, "gpt2-small-vocab")
    torch.set_num_threads(1)
    batch = args.batch
    pairs = load_pairs(args.data, args.tokenizer, args.max_length, batch * (args.steps + 2))
    names = [n for n in ("prefed", "prefed, bf16", *PEERS) if args.bf16 or not n.endswith("bf16")]

    def base(name: str) -> Any:
        return base_model(args).to(torch.bfloat16 if name.endswith("bf16") else torch.float32)

    if args.alone:
        return alone(args.alone, base(args.alone), pairs, args)
    memory = Memory()
    if not torch.cuda.is_available():
        memory.most = {name: memory_of(name) for name in names}
    ours = {
        name: Prefed(base(name), pairs, batch=batch, bf16=name.endswith("bf16"))
        for name in names
        if name not in PEERS
    }
    first = ours["prefed"].backbone
    reference = ours["prefed"].reference
    peers = {name: add_peer(base(name), name, pairs, args, reference) for name in names if name in PEERS}
    for peer in peers.values():
        # The same A factors everywhere, so that losses can be compared.
        state = dict(peer.model.named_parameters())
        for name in first.initial:
            _, block, module, factor = name.split("/")
            path = next(n for n in state if f".{first.family.blocks}.{block}.{module}.lora_{factor}." in n)  # type: ignore[union-attr]
            state[path].data.copy_(first.initial[name])
    times: dict[str, list[float]] = {name: [] for name in names}
    batches = np.arange(len(pairs)).reshape(-1, batch)
    worst = 0.0
    for step, rows in enumerate(batches):
        losses: dict[str, float] = {}
        for name, side in (ours | peers).items():
            took, losses[name] = timed(partial(memory.of, name, partial(side.step, rows)))
            times[name].append(took)
        if step == 0:
            worst = max(abs(losses["prefed"] - losses[name]) for name in peers if not name.endswith("bf16"))
    median = {name: statistics.median(values[2:]) for name, values in times.items()}
    width = max(map(len, median))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "one core"
    print(f"{args.shape}, batch {batch}, max length {args.max_length}, {args.steps} steps, {where}")
    for name, value in median.items():
        unit = "prefed, bf16" if name.endswith("bf16") else "prefed"
        ratios = [b / a for a, b in zip(times[unit][2:], times[name][2:], strict=True)]
        print(
            f"  {name:<{width}}  {value:9.1f} ms  {statistics.median(ratios):6.2f}x{memory.column(name)}"
            f"  {memory.most[name] / memory.most[unit]:6.2f}x"
        )
    print(f"  first loss: largest difference from TRL {worst:.1e}")
    model = base("prefed")
    flops = [needed_flops(model, pairs, rows) for rows in batches[2:]]
    tokens = int(pairs.lengths.sum() / len(batches))
    for name in ours:
        rate = statistics.median(f / t / 1e6 for f, t in zip(flops, times[name][2:], strict=True))
        dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
        peak = matmul_peak(*((tokens, *size) for size in weights(model)), dtype=dtype)
        print(f"  {name}: needed work at {rate:.0f} GFLOP/s, {100 * rate / peak:.0f}% of {peak:.0f}")
        if not torch.cuda.is_available():
            breakdown(ours[name], batches[-1], dtype)


if __name__ == "__main__":
    main()
