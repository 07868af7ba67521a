"""CPU time of a DPO step with ``torch.compile`` on the decoder blocks, and whether gradients are equal.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py smollm2-135m
    OMP_NUM_THREADS=1 python benchmarks/compiled.py llama-3-8b --blocks 2 --tokens 48
    OMP_NUM_THREADS=1 python benchmarks/compiled.py smollm2-135m --whole

Random weights in float32 (``--bf16``: bfloat16), with a few blocks of a shape of ``roofline.py`` and a small
vocabulary; steps with and without alternate. LoRA's layers and attention are called from the compiled blocks
but not compiled:
``--whole`` compiles them too, which raises an error where oneDNN multiplies (AMD processors with AVX-512).
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import numpy as np
import torch
import transformers
from common import timed
from dpo_step import Prefed
from roofline import SHAPES, make_pairs
from transformers import AttentionInterface

from prefed.models import fused_lora
from prefed.train import packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192, help="of a pair, at most")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sides, rows, dtype = [], np.arange(2), torch.bfloat16 if args.bf16 else torch.float32
    for _ in range(2):
        torch.manual_seed(0)
        config = SHAPES[args.shape]()
        config.num_hidden_layers, config.vocab_size, config.use_cache = args.blocks, 4096, False
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        sides.append(Prefed(model, make_pairs(2, args.tokens), batch=2, bf16=args.bf16))
    plain, compiled = sides
    if not args.whole:
        fused_lora.lora_linear = torch.compiler.disable(fused_lora.lora_linear)
        AttentionInterface.register(packed.NAME, torch.compiler.disable(packed._attention))
    for block in compiled.backbone.trunk.layers:
        block.forward = torch.compile(block.forward, dynamic=False)
    start = time.perf_counter()
    compiled.step(rows)
    took = time.perf_counter() - start
    plain.step(rows)
    first, second = (side.backbone.grad for side in sides)
    apart = float((first - second).norm() / first.norm())
    pairs = [[timed(partial(side.step, rows))[0] for side in sides] for _ in range(args.steps)]
    eager, faster = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(other / one for one, other in pairs)
    print(f"{args.shape}: {eager:.0f} ms, compiled {faster:.0f}, ratio {ratio:.3f}")
    print(f"gradients differ by {apart:.1e}")
    print(f"the first compiled step took {took:.0f} s")


if __name__ == "__main__":
    main()
