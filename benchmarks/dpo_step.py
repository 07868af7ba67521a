"""Time of one DPO step beside TRL's DPOTrainer, interleaved step by step in one process.

    OMP_NUM_THREADS=1 python benchmarks/dpo_step.py --shape distilgpt2

Peers, on the same token ids, LoRA 8/16 on the same modules, dropout 0, fp32, no checkpointing:

- ``trl``: DPOTrainer as it comes;
- ``trl, reference precomputed``: its ``precompute_ref_log_probs``;
- ``trl, precomputed, completion head``: also its LM head on completion positions only, which it does
  by itself where Triton is available.

A step is collate, forward, backward, clip and AdamW. The loss of each step is compared too. The time is CPU
time; with a GPU it is wall time, and the memory that a step takes beyond the weights is told. ``--bf16`` adds
both sides in bf16: the weights' dtype, and TRL's own ``bf16``.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import numpy as np
import torch
import trl.trainer.utils
from common import DATA, TOKENIZER, Memory, Pairs, load_pairs, lora_config, matmul_peak, shape, timed
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
from prefed.models import LoraSettings, ModelConfig, make_backbone
from prefed.train import PairTrainer

BETA, LR = 0.1, 1e-4


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


def needed_flops(config: Any, pairs: Pairs, rows: np.ndarray) -> float:
    """Multiply-adds (two operations each) that a step cannot do without.

    Frozen linear layers forward and back to their input (two products; the first layer's input needs
    none), attention over the pairs it must see, the head's two products at completion positions.
    """
    d, layers, vocab = config.hidden_size, config.num_hidden_layers, config.vocab_size
    inner = getattr(config, "intermediate_size", None) or 4 * d
    total = 0.0
    for p, c, r in pairs.lengths[rows].astype(int):
        tokens, scored = p + c + r - 2, c + r - 1
        seen = p * (p + 1) / 2 + (c - 1) * p + c * (c - 1) / 2 + (r - 1) * p + r * (r - 1) / 2
        for layer in range(layers):
            last = layer == layers - 1
            rest = scored if last else tokens
            linear = 2 * (3 * d * d * tokens + (d * d + 2 * d * inner) * rest)
            back = linear - (2 * 3 * d * d * tokens if layer == 0 else 0)
            total += linear + back + 3 * 4 * d * seen
        total += 2 * 2 * scored * d * vocab
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="gpt2-small-vocab")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="also time both sides in bf16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = args.batch
    pairs = load_pairs(args.data, args.tokenizer, args.max_length, batch * (args.steps + 2))
    base = shape(args.shape)
    lora = LoraSettings(rank=8, alpha=16, dropout=0.0)

    def pair_trainer(dtype: str) -> PairTrainer:
        model = copy.deepcopy(base).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        backbone = make_backbone(model, None, ModelConfig(name=args.shape, lora=lora, dtype=dtype), Key(0))
        return PairTrainer(backbone, pairs)

    ours = {"prefed": pair_trainer("float32")}
    if args.bf16:
        ours["prefed, bf16"] = pair_trainer("bfloat16")
    first = ours["prefed"]
    targets = list(first.backbone.family.targets)  # type: ignore[union-attr]
    everything = np.arange(len(pairs))
    for each in ours.values():
        each.references.fill_training(everything, everything)
    reference = first.score(first.backbone.initial, everything).reference
    initial = first.backbone.initial
    peers = {
        name: Trl(
            copy.deepcopy(base).to(torch.bfloat16 if name.endswith("bf16") else torch.float32),
            targets,
            pairs,
            tokenizer=args.tokenizer,
            reference=cached,
            compact=compact,
            batch=batch,
            bf16=name.endswith("bf16"),
        )
        for name, cached, compact in (
            ("trl", None, False),
            ("trl, reference precomputed", reference, False),
            ("trl, precomputed, completion head", reference, True),
            ("trl, precomputed, completion head, bf16", reference, True),
        )
        if args.bf16 or not name.endswith("bf16")
    }
    for peer in peers.values():
        # The same A factors everywhere, so that losses can be compared.
        state = dict(peer.model.named_parameters())
        for name in initial:
            _, block, module, factor = name.split("/")
            blocks = first.backbone.family.blocks  # type: ignore[union-attr]
            path = next(n for n in state if f".{blocks}.{block}.{module}.lora_{factor}." in n)
            state[path].data.copy_(initial[name])
    parts = Ownership.of(initial.layout, lambda entry: Owner.SHARED)
    phase = Phase(
        "train",
        parts.names(Owner.SHARED),
        Objective("dpo", {"beta": BETA}),
        Optimizer("adamw", lr=LR),
        batch,
        steps=1,
    )
    times: dict[str, list[float]] = {name: [] for name in (*ours, *peers)}
    worst, memory = 0.0, Memory()
    for step in range(args.steps + 2):
        rows = everything[batch * step : batch * (step + 1)]
        losses: dict[str, float] = {}
        for name, each in ours.items():
            took, trained = timed(
                partial(memory.of, name, partial(each.train, initial, phase, rows, Key(step), parts))
            )
            times[name].append(took)
            losses[name] = trained.loss
        for name, peer in peers.items():
            took, losses[name] = timed(partial(memory.of, name, partial(peer.step, rows)))
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
        ratio = f"{statistics.median(ratios):6.2f}x"
        print(f"  {name:<{width}}  {value:9.1f} ms  {ratio}{memory.column(name)}")
    print(f"  first loss: largest difference from TRL {worst:.1e}")
    flops = [
        needed_flops(first.backbone.causal.config, pairs, everything[batch * s : batch * (s + 1)])
        for s in range(2, args.steps + 2)
    ]
    shares = [f / t / 1e6 for f, t in zip(flops, times["prefed"][2:], strict=True)]
    if first.backbone.causal.config.model_type == "gpt2" and not torch.cuda.is_available():
        peak, rate = matmul_peak(), statistics.median(shares)
        print(f"  needed work at {rate:.0f} GFLOP/s, {100 * rate / peak:.0f}% of {peak:.0f}")


if __name__ == "__main__":
    main()
