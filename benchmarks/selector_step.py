"""CPU time of one step of a selector compared with plain transformers and PEFT, interleaved in one process.

    OMP_NUM_THREADS=1 python benchmarks/selector_step.py --shape distilgpt2
    OMP_NUM_THREADS=1 python benchmarks/selector_step.py --model FOLDER

A step is collate, forward, backward, clip and AdamW on a batch of pairs, each in both presentation orders,
on the same token ids, LoRA 8/16 on the same modules, dropout 0, fp32. The peers are written here as anybody
would:

- ``plain``: both orders as rows of a padded batch through PEFT's model, full logits, cross-entropy over the
  two letters at the last position;
- ``plain, labels``: ``model(**inputs, labels=labels)``, transformers' own loss at the letter.

The rungs of a ladder lead from there to the trainer, one measure at a time. The first is its own modules and
optimiser with padded batches and full logits. The loss of the first step is compared too.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    DATA,
    DEVICE,
    Memory,
    Pairs,
    base_model,
    encoded,
    lora_config,
    matmul_peak,
    parse_with_model,
    timed,
)
from peft import get_peft_model
from transformers import AutoTokenizer

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
from prefed.data import ChoiceEncoder, Pair, SelectorConfig
from prefed.models import Backbone, LoraSettings, ModelConfig, make_backbone
from prefed.train import Packing, PairTrainer
from prefed.train.packed import PackedChoices
from prefed.train.padded import PaddedChoices, log_odds, pad

BATCH, LR = 4, 1e-4


class Choices(Pairs):
    """Pairs in both presentation orders: a prompt, and two branches that end with the letters A and B."""

    letters: tuple[int, int]

    def __init__(self, pairs: list[Pair], letters: tuple[int, int]) -> None:
        super().__init__(pairs)
        self.letters = letters
        self.orientations = np.random.default_rng(0).integers(0, 2, len(pairs)).astype(np.uint8)


def load_choices(path: Path, tokenizer: Path, max_length: int, limit: int) -> Choices:
    """Pairs in the general template of selectors, which shortens what is too long."""
    encoder = ChoiceEncoder(AutoTokenizer.from_pretrained(tokenizer), SelectorConfig(), max_length=max_length)
    assert encoder.letters is not None
    return Choices(encoded(path, encoder, limit), encoder.letters)


class Plain:
    """A selector's step through transformers and PEFT."""

    def __init__(self, model: Any, targets: list[str], pairs: Choices, *, labels: bool) -> None:
        self.pairs, self.labels = pairs, labels
        lora = lora_config(model, targets)
        self.model = get_peft_model(model, lora).to(DEVICE).train()
        self.free = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.free, lr=LR, weight_decay=0.0)

    def step(self, rows: np.ndarray) -> float:
        """Collate, forward, backward, clip, step; the loss."""
        pairs = [self.pairs.pair(int(row)) for row in rows]
        ids, attention, _ = pad(pairs, device=torch.device(DEVICE))
        at = attention.sum(1) - 1
        everyone = torch.arange(len(ids), device=DEVICE)
        a, b = self.pairs.letters
        better = torch.from_numpy(self.pairs.orientations[rows].astype(np.int64)).to(DEVICE)
        # Order 1 shows the first response as A, order 2 as B; the right letter follows the chosen response.
        chosen_is_a = torch.stack([better == 1, better == 0], 1).view(-1)
        ids[everyone, at] = torch.where(chosen_is_a, a, b)
        if self.labels:
            labels = torch.full_like(ids, -100)
            labels[everyone, at] = ids[everyone, at]
            loss = self.model(input_ids=ids, attention_mask=attention, labels=labels).loss
        else:
            logits = self.model(input_ids=ids, attention_mask=attention).logits
            two = logits[everyone, at - 1][:, [a, b]]
            loss = F.cross_entropy(two, (~chosen_is_a).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.free, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class PaddedTwo(PaddedChoices):
    """Rung: padded batches, and the head's two rows at the last positions alone."""

    def __call__(self, pairs: Sequence[Pair], **options: Any) -> torch.Tensor:
        """Log-odds ``[B, 2]``."""
        inputs = [Pair(prompt, first[:-1], second[:-1]) for prompt, first, second in pairs]
        ids, attention, _ = pad(inputs, device=torch.device(DEVICE))
        hidden = self.backbone.trunk(input_ids=ids, attention_mask=attention, use_cache=False)[0]
        last = hidden[torch.arange(len(ids), device=DEVICE), attention.sum(1) - 1]
        weight = self.backbone.causal.get_output_embeddings().weight[self._letters]
        targets = torch.tensor(
            [int(x[-1]) for pair in pairs for x in (pair.chosen, pair.rejected)], device=DEVICE
        )
        return log_odds(last @ weight.t(), targets, self._letters)


class PackedTwo(PackedChoices):
    """Rungs: packed, with the last block at all rows of the branches.

    Both orders share the prompt, or each has its own.
    """

    def __init__(self, backbone: Backbone, letters: tuple[int, int], *, share: bool) -> None:
        super().__init__(backbone, letters)
        self._share = share

    def _pack(self, pairs: Sequence[Pair], rejected: bool, rewards: bool) -> Packing:
        if self._share:
            return Packing.of(pairs, device=self.backbone.device)
        orders = [Pair(p.prompt, x, x) for p in pairs for x in (p.chosen, p.rejected)]
        return Packing.of(orders, rejected=False, device=self.backbone.device)

    def _read(self, packing: Packing, hidden: torch.Tensor) -> torch.Tensor:
        end = torch.cat([packing.response[1:] != packing.response[:-1], torch.tensor([True], device=DEVICE)])
        packing.targets = packing.targets[end]
        return super()._read(packing, hidden[packing.pick[end]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=BATCH, help="pairs, each in both orders")
    args = parse_with_model(parser, "gpt2-small-vocab")
    torch.set_num_threads(1)
    batch = args.batch
    pairs = load_choices(args.data, args.tokenizer, args.max_length, batch * (args.steps + 2))
    base = base_model(args)
    config = ModelConfig(name=args.shape, lora=LoraSettings(rank=8, alpha=16, dropout=0.0), dtype="float32")
    rungs: dict[str, Any] = {
        "prefed": None,
        "rung 1: own modules and optimiser": PaddedChoices,
        "rung 2: and two logits": PaddedTwo,
        "rung 3: and no padding": partial(PackedTwo, share=False),
        "rung 4: and one prompt for both orders": partial(PackedTwo, share=True),
    }
    ours: dict[str, PairTrainer] = {}
    for name, forward in rungs.items():
        backbone = make_backbone(copy.deepcopy(base), None, config, Key(0))
        slow = isinstance(forward, type)
        ours[name] = PairTrainer(backbone, pairs, fast=not slow, max_tokens=1 << 20)
        if forward is not None:
            ours[name].model.forward = forward(backbone, pairs.letters)
    first = ours["prefed"].backbone
    assert first.family is not None
    peers = {
        name: Plain(copy.deepcopy(base), list(first.family.targets), pairs, labels=labels)
        for name, labels in (("plain", False), ("plain, labels", True))
    }
    for peer in peers.values():
        # The same A factors everywhere, so that losses can be compared.
        state = dict(peer.model.named_parameters())
        for name in first.initial:
            _, block, module, factor = name.split("/")
            path = next(n for n in state if f".{first.family.blocks}.{block}.{module}.lora_{factor}." in n)
            state[path].data.copy_(first.initial[name])
    parts = Ownership.of(first.layout, lambda entry: Owner.SHARED)
    optimizer = Optimizer("adamw", lr=LR)
    phase = Phase("train", parts.names(Owner.SHARED), Objective("choice"), optimizer, batch, steps=1)
    times: dict[str, list[float]] = {name: [] for name in (*ours, *peers)}
    losses: dict[str, float] = {}
    memory = Memory()
    everything, worst = np.arange(len(pairs)), 0.0
    for step in range(args.steps + 2):
        rows = everything[batch * step : batch * (step + 1)]
        for name, each in ours.items():
            visit = partial(each.visit(rows, Key(step), parts).train, first.initial, phase)
            took, trained = timed(partial(memory.of, name, visit))
            times[name].append(took)
            losses[name] = trained.loss
        for name, peer in peers.items():
            took, losses[name] = timed(partial(memory.of, name, partial(peer.step, rows)))
            times[name].append(took)
        if step == 0:
            same = [value for name, value in losses.items() if name != "plain, labels"]
            worst = max(same) - min(same)
    median = {name: statistics.median(values[2:]) for name, values in times.items()}
    width = max(map(len, median))
    print(f"{args.shape}, {batch} pairs in both orders, at most {args.max_length} tokens, {args.steps} steps")
    p, x, y = pairs.lengths.T.astype(int)
    padded = [
        2
        * batch
        * max((p + x)[batch * k : batch * (k + 1)].max(), (p + y)[batch * k : batch * (k + 1)].max())
        for k in range(args.steps + 2)
    ]
    packed = (p + x + y - 2).sum() / len(padded)
    print(f"  tokens of a batch: {statistics.mean(padded):.0f} padded, {packed:.0f} packed")
    for name, value in median.items():
        ratios = [b / a for a, b in zip(times["prefed"][2:], times[name][2:], strict=True)]
        print(f"  {name:<{width}}  {value:9.1f} ms  {statistics.median(ratios):6.2f}x{memory.column(name)}")
    print(f"  first loss: largest difference {worst:.1e}; products at {matmul_peak():.0f} GFLOP/s")


if __name__ == "__main__":
    main()
