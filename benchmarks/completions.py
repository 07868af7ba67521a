"""Completions per second of batches, compared with ``model.generate`` called prompt by prompt, on one core.

    OMP_NUM_THREADS=1 python benchmarks/completions.py --shape tiny
    OMP_NUM_THREADS=1 python benchmarks/completions.py --shape distilgpt2
    OMP_NUM_THREADS=1 python benchmarks/completions.py --model FOLDER --bf16 --batch 32

Prompts of equal length, ``--batch`` of them; T 0.7; every completion has ``--tokens`` tokens, since no
end-of-text token ends it. The peer is the same model with its LoRA merged into the weights, so that it pays
for no adapter. Both take the same work in turn; the median ratio of their CPU times is printed, and how
many of their greedy completions are equal.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from types import SimpleNamespace
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import DEVICE, base_model, parse_with_model, timed

from prefed.core import Key
from prefed.models import LoraSettings, ModelConfig, make_backbone
from prefed.models.pretrained import silence_transformers
from prefed.train.generation import Sampling, complete_batch

NEVER = -1
"""An end-of-text token that no model says."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    args = parse_with_model(parser, "tiny")
    silence_transformers()
    torch.set_num_threads(1)
    base = base_model(args).to(torch.bfloat16 if args.bf16 else torch.float32)
    base.config.use_cache = True
    base.config.eos_token_id = base.generation_config.eos_token_id = None
    plain = copy.deepcopy(base).to(DEVICE).eval()
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if args.bf16 else "float32"
    config = ModelConfig(name=args.shape, dtype=dtype, lora=LoraSettings(dropout=0.0))
    # No text is read: special tokens are all that is asked of a tokenizer.
    tokens = SimpleNamespace(eos_token_id=NEVER, bos_token_id=NEVER, pad_token_id=NEVER, get_vocab=dict)
    backbone = make_backbone(base, tokens, config, Key(0))
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, base.config.vocab_size, (args.batch, args.length), generator=draw).tolist()
    keys = [Key(0).at("prompt", number) for number in range(args.batch)]

    def batched(temperature: float) -> list[list[int]]:
        how = Sampling(max_tokens=args.tokens, temperature=temperature)
        return complete_batch(backbone, backbone.reference, prompts, how, keys)

    def one_by_one(temperature: float) -> list[list[int]]:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        rows = []
        with torch.inference_mode():
            for prompt in prompts:
                ids = torch.tensor([prompt], device=DEVICE)
                output = plain.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=args.tokens,
                    pad_token_id=0,
                    **(sampling or {"do_sample": False}),
                )
                rows.append(output[0, args.length :].tolist())
        return rows

    greedy, peer = batched(0.0), one_by_one(0.0)
    times: dict[str, list[float]] = {"batched": [], "one by one": []}
    for repeat in range(args.repeats + 1):
        for name, work in (("batched", batched), ("one by one", one_by_one)):
            spent, rows = timed(lambda work=work: work(0.7))  # type: ignore[misc]
            assert all(len(row) == args.tokens for row in rows), name
            if repeat:
                times[name].append(spent)
    ratio = statistics.median([b / a for a, b in zip(times["batched"], times["one by one"], strict=True)])
    print(
        f"{args.shape}, {dtype}, batch {args.batch}, {args.length} tokens and {args.tokens} new ones, T 0.7"
    )
    for name, values in times.items():
        seconds = statistics.median(values) / 1e3
        rate, tokens = args.batch / seconds, args.batch * args.tokens / seconds
        print(f"  {name:<12} {rate:8.2f} completions/s   {tokens:9.1f} tokens/s   {seconds:7.2f} s")
    agree = sum(one == other for one, other in zip(greedy, peer, strict=True))
    print(f"  ratio {ratio:.2f}x; greedy completions that agree: {agree}/{args.batch}")


if __name__ == "__main__":
    main()
