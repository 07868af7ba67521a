r"""The memory that ``prefed run --dry-run --device`` estimates, next to measured peaks and at larger shapes.

    OMP_NUM_THREADS=1 python benchmarks/memory_model.py         # estimated and measured, on a CPU
    OMP_NUM_THREADS=1 python benchmarks/memory_model.py --kept  # kept for backward at Llama 3 8B's shape

Measured is the peak of resident memory (the kernel's VmHWM) that a DPO step of four pairs of 512 tokens takes
beyond the model in a process of its own, in fp32 with random weights, with the attention calls and the block
of logits of a GPU. Estimates come from the model's configuration only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import checkpointing
import numpy as np
import transformers
from common import Pairs, shape

from prefed.data import Pair
from prefed.models import ModelConfig, matmul
from prefed.runs.memory_plan import META, PlannedModel
from prefed.train import logprobs, packed

SHAPES = ("gpt2-small-vocab", "llama-4k", "llama-8k")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "packed": {},
    "checkpointing": {"checkpointing": True},
    "plain": {"fast": False},
    "full": {"train": "full"},
}
PAIRS, TOKENS = 4, 512


def planned(config: Any, tokens: Sequence[tuple[int, int, int]], **settings: Any) -> PlannedModel:
    """A model of a configuration, and pairs with these numbers of tokens."""
    model = ModelConfig.model_validate({"name": "model", "lora": {"dropout": 0.0}, **settings})
    needs = frozenset({"weights" if model.train == "full" else "lora"})
    return PlannedModel(config, model, needs, pairs_of(tokens))


def lengths() -> list[tuple[int, int, int]]:
    """Tokens of each pair; one response is shorter, so that padded batches have a mask."""
    half = TOKENS // 2
    return [(half, half, half)] * (PAIRS - 1) + [(half, half, half - 1)]


def pairs_of(tokens: Sequence[tuple[int, int, int]]) -> Pairs:
    """Pairs with these numbers of tokens."""
    return Pairs([Pair(*(np.ones(count, np.int32) for count in each)) for each in tokens])


def with_gpu_code() -> None:
    """Let a CPU take the code of a GPU in fp32, on the pairs of :func:`lengths`."""
    checkpointing.make_pairs = lambda *shape: pairs_of(lengths())
    block_size = logprobs.block_size
    packed._kernel = lambda query: packed._one_by_one
    matmul._prefers_onednn = functools.cache(lambda: False)  # it copies what it multiplies
    logprobs.block_size = lambda rows, device: block_size(rows, META)


def measured(name: str, setting: str) -> float:
    """MiB of a step in this process."""
    with_gpu_code()
    own = {"train": "lora", "checkpointing": False, "fast": True, **SETTINGS[setting]}
    words = {"shape": name, "device": "cpu", "dtype": "float32", "pairs": PAIRS, "tokens": TOKENS}
    args = Namespace(**words, plain=not own["fast"], dropout=0.0, **own)
    mib: float = checkpointing.measure(args)["mib"]
    return mib


def compare() -> None:
    """Print estimates next to measured peaks."""
    # Freed memory goes back to the system at once, as it does on a GPU.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    print("| shape | settings | estimated MiB | measured MiB | ratio |\n|---|---|---|---|---|")
    for name in SHAPES:
        config = shape(name).config
        for setting, own in SETTINGS.items():
            model = planned(config, lengths(), dtype="float32", **own)
            step = model.step(np.arange(PAIRS))
            estimated = (step.kept + step.passing) / 2**20
            words = [sys.executable, __file__, "--one", name, setting]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            mib = json.loads(done.stdout.splitlines()[-1])
            row = f"| `{name}` | {setting} | {estimated:,.0f} | {mib:,.0f} | {estimated / mib:.2f} |"
            print(row, flush=True)


def llama() -> Any:
    """The shape of Llama 3 with 8 billion parameters."""
    return transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )


def kept(quantize: str | None) -> None:
    """Print what two pairs keep for the backward pass, by their length, with the default LoRA.

    Args:
        quantize: 4-bit format of the frozen weights, if any.
    """
    common: dict[str, Any] = {"dtype": "bfloat16", "lora": {}, "quantize": quantize}
    print("| tokens of a pair | kept, GiB | and total | with checkpointing | and total |")
    print("|---|---|---|---|---|")
    for count in (1500, 2048, 4096, 8192):
        third = count // 3
        pairs = [(count - 2 * third, third, third)] * 2
        cells = [f"{count:,}"]
        for recompute in (False, True):
            model = planned(llama(), pairs, checkpointing=recompute, **common)
            step = model.step(np.arange(2))
            cells += [f"{step.kept / 2**30:.2f}", f"{step.total / 2**30:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kept", action="store_true", help="Llama 3's shape of 8 B, by length")
    parser.add_argument("--quantize", choices=("nf4", "fp4"), help="with --kept: 4-bit weights")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(*args.one)))
    elif args.kept:
        kept(args.quantize)
    else:
        compare()


if __name__ == "__main__":
    main()
