r"""Peak memory of a step on the plain path where the vocabulary is large.

    OMP_NUM_THREADS=1 python benchmarks/plain_head.py

A two-layer Llama of width 64 with random weights, and random pairs of one length. A step is the DPO gradient
of all pairs, in passes of at most ``--max-tokens``. Peak memory is what the step takes beyond the model, of
resident memory (the kernel's VmHWM). 64 pairs with ``--max-tokens 4096``, the default of ``[engine]``, fill
a pass.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import transformers
from common import Pairs

from prefed.core import Key, Objective, Owner, Ownership
from prefed.data import Pair
from prefed.engines.backends import peak_memory_mb
from prefed.models import ModelConfig, make_backbone
from prefed.train import PairTrainer

PROMPT, RESPONSE = 32, 16


def main() -> None:
    """Take one step, and print what it took as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=262_144)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    shape = transformers.LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(shape)
    config = ModelConfig(name="llama", device="cpu", fast=False)
    backbone = make_backbone(model, None, config, Key(1))
    draw = np.random.default_rng(0)
    sizes = (PROMPT, RESPONSE, RESPONSE)
    pairs = Pairs(
        [
            Pair(*(draw.integers(2, args.vocabulary, n).astype(np.int32) for n in sizes))
            for _ in range(args.pairs)
        ]
    )
    trainer = PairTrainer(backbone, pairs, max_tokens=args.max_tokens, fast=False)
    everything = Ownership.of(backbone.layout, lambda entry: Owner.SHARED)
    rows = np.arange(len(pairs))
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak_memory_mb(), time.process_time()
    _, loss = trainer.visit(rows, Key(2), everything).gradient(backbone.initial, Objective("dpo"))
    print(
        json.dumps(
            {
                **vars(args),
                "passes": len(trainer.model.groups(rows)),
                "mib": round(peak_memory_mb() - before),
                "seconds": round(time.process_time() - start, 2),
                "loss": round(loss, 6),
            }
        )
    )


if __name__ == "__main__":
    main()
