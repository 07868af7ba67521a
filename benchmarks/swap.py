"""Time to put one client's LoRA into the model and to take it out, compared with PEFT's own calls.

    OMP_NUM_THREADS=1 python benchmarks/swap.py

DistilGPT2 shape, rank 8 on c_attn, c_proj, c_fc: 0.59 M parameters. Wall time, median of 200.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import shape
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from prefed.core import Key
from prefed.models import LoraSettings, ModelConfig, make_backbone


def median_ms(work: Callable[[], object], times: int = 200) -> float:
    values = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        values.append(1e3 * (time.perf_counter() - start))
    return statistics.median(values)


def main() -> None:
    torch.set_num_threads(1)
    config = ModelConfig(name="distilgpt2 shape", lora=LoraSettings(dropout=0.0), device="cpu")
    backbone = make_backbone(shape("distilgpt2"), None, config, Key(0))
    tensors = backbone.initial.clone()
    state = {name: value.clone() for name, value in get_peft_model_state_dict(backbone.model).items()}

    def peft_load() -> None:
        set_peft_model_state_dict(backbone.model, state)

    def peft_extract() -> None:
        for value in get_peft_model_state_dict(backbone.model).values():
            value.clone()

    print(f"{backbone.layout.size:,} parameters")
    for name, ours, theirs in (
        ("load", lambda: backbone.load(tensors), peft_load),
        ("extract", backbone.extract, peft_extract),
    ):
        mine, peft = median_ms(ours), median_ms(theirs, 50)
        print(f"{name:<8} {mine:.3f} ms   PEFT {peft:.2f} ms   {peft / mine:.0f}x")


if __name__ == "__main__":
    main()
