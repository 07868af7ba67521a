"""What ``benchmarks/roofline.py`` counts, against sums by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from prefed.data import Pair
from prefed.runs.memory_plan import META

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import roofline

BLOCKS, WIDTH, KEYS, INNER, VOCABULARY, RANK = 3, 64, 32, 96, 1000, roofline.RANK
IN_OUT = {
    **dict.fromkeys(("q", "o"), (WIDTH, WIDTH)),
    **dict.fromkeys(("k", "v"), (WIDTH, KEYS)),
    **dict.fromkeys(("gate", "up"), (WIDTH, INNER)),
    "down": (INNER, WIDTH),
}
PROMPT, CHOSEN, REJECTED = 7, 6, 4


def config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )


def pair() -> roofline.Pairs:
    return roofline.Pairs([Pair(*(np.ones(n, np.int32) for n in (PROMPT, CHOSEN, REJECTED)))])


def linear(rows: dict[str, list[int]]) -> int:
    """Two operations a multiply-add: the frozen product and its gradient for x; of LoRA's two factors each
    forward, for their gradient, and towards x. Nothing goes back to the embeddings, which are frozen."""
    total = 0
    for name, (into, out) in IN_OUT.items():
        for block, n in enumerate(rows[name]):
            back = block > 0 or name not in ("q", "k", "v")
            total += 2 * n * (into * out * (1 + back) + RANK * (into * (2 + back) + out * 3))
    return total


def test_a_step_of_prefed() -> None:
    """Last tokens are no inputs. The last block's feed-forward network and the head, forward and backward in
    one pass, run where a completion token is predicted. Attention is two causal sequences: five products of
    the width for each score that a query may have, two forward."""
    chosen, rejected = CHOSEN - 1, REJECTED - 1
    total, rows = PROMPT + chosen + rejected, 1 + chosen + rejected
    tokens = {name: [total] * BLOCKS for name in IN_OUT}
    tokens |= {name: [total] * (BLOCKS - 1) + [rows] for name in ("gate", "up", "down")}
    seen = [PROMPT + i for i in range(1, chosen + 1)] + [PROMPT + i for i in range(1, rejected + 1)]
    last = PROMPT + sum(seen)
    scores = (BLOCKS - 1) * (sum(range(1, PROMPT + 1)) + sum(seen)) + last
    expected = linear(tokens) + 14 * scores * WIDTH + 4 * rows * VOCABULARY * WIDTH
    assert roofline.step_of_prefed(config(), pair()).flops == expected


def test_a_step_of_trl() -> None:
    """Both responses have a row of the longer one's length, and attention a mask, so all scores count. The
    head runs at completion tokens: forward, again backward, and towards the hidden states. The reference is
    the frozen model's forward pass. Without padding and mask, only tokens and their causal scores count."""
    longest = PROMPT + CHOSEN
    head = 2 * (CHOSEN + REJECTED) * VOCABULARY * WIDTH

    def step(total: int, scores: int) -> int:
        rows = {name: [total] * BLOCKS for name in IN_OUT}
        return linear(rows) + BLOCKS * 14 * scores * WIDTH + 3 * head

    frozen = sum(2 * 2 * longest * into * out for into, out in IN_OUT.values()) + 4 * 2 * longest**2 * WIDTH
    padded = step(2 * longest, 2 * longest**2)
    assert roofline.step_of_trl(config(), pair(), precomputed=True).flops == padded
    assert roofline.step_of_trl(config(), pair()).flops == padded + BLOCKS * frozen + head
    lengths = (longest, PROMPT + REJECTED)
    dense = step(sum(lengths), sum(n * (n + 1) // 2 for n in lengths))
    assert roofline.step_of_trl(config(), pair(), precomputed=True, fused=True).flops == dense


def test_kernels_bytes_and_syncs() -> None:
    """A product of [4, 8] and [8, 4] in bfloat16; views and allocations are no kernels; the host waits for a
    copy, a number and a mask. A launch of 5 µs bounds kernels that take less."""
    trace = roofline.Trace([], (3, 4))
    x = torch.empty(4, 8, dtype=torch.bfloat16, device=META)
    with trace:
        product = x @ x.t()
        torch.ones(4).to(META)
        work = trace.work
        assert work.kernels[0] == (2 * 4 * 8 * 4, 2 * (32 + 32 + 16))
        assert (len(work.kernels), work.syncs) == (2, 1)
        float(product.sum())
        assert x[torch.empty(4, device=META, dtype=torch.bool)].shape == (3, 8)
    assert trace.work.syncs == 3
    device = roofline.Device(flops=1e9, bandwidth=1e9)
    assert roofline.Work(((1e6, 0), (0, 3e6))).on(device) == (4e-3, "memory")
    assert roofline.Work(((1e3, 0), (0, 3e3))).on(device) == (2 * roofline.LAUNCH, "launches")
