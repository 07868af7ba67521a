"""The attention calls of a GPU: their indices against the untouched model in float64, and their memory."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.small_models import VOCABULARY, Pair, away, backbone
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from prefed.models import Backbone
from prefed.train import Packing, packed
from prefed.train.packed import enable_packing, trunk_hidden

LENGTHS = [(1, 1, 1), (1, 1, 4), (5, 1, 1), (5, 4, 1), (3, 1, 6), (8, 3, 7), (2, 7, 7)]
KINDS = {
    "cut": {},
    "whole": {"whole": True},
    "chosen": {"rejected": False},
    "whole chosen": {"rejected": False, "whole": True},
    "ends": {"ends": True},
}


def pairs(ends: bool) -> list[Pair]:
    """Random pairs; with ``ends`` no branch is empty before its last token."""
    draw = np.random.default_rng(0)
    return [
        Pair(*(draw.integers(1, VOCABULARY, n).astype(np.int32) for n in (p, c + ends, r + ends)))
        for p, c, r in LENGTHS
    ]


def varlen_by_definition(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size, enable_gqa=False
):
    """The documented meaning of :func:`torch.nn.attention.varlen.varlen_attn`, sequence by sequence.

    A window (−1, 0) is causal, and (w, 0) starts w keys before the query's own. As in FlashAttention ≥ 2.1,
    the diagonal ends at the lower right corner: query i of Q sees key j of K if
    i + K − Q − w ≤ j ≤ i + K − Q. The assertions are those of PyTorch's CUDA kernel.
    """
    before, after = window_size
    assert after == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    for tensor in (query, key, value):
        assert (tensor.dim(), tensor.stride(-1), tensor.shape[2] % 8) == (3, 1, 0)
    for ends, longest, tensor in ((cu_seq_q, max_q, query), (cu_seq_k, max_k, key)):
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert (ends[0], ends[-1], ends.diff().max()) == (0, len(tensor), longest)
        assert ends.diff().min() > 0
    groups = query.shape[1] // key.shape[1]
    results = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seq_q), pairwise(cu_seq_k), strict=True):
        k, v = (t[k0:k1].repeat_interleave(groups, 1) for t in (key, value))
        scores = torch.einsum("qhw,khw->hqk", query[q0:q1], k) * (scale or query.shape[2] ** -0.5)
        i, j = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)
        scores = scores.masked_fill((j > i) | ((j < i - before) & (before >= 0)), -torch.inf)
        results.append(torch.einsum("hqk,khw->qhw", scores.softmax(-1), v))
    return torch.cat(results)


def in_float64(family: str, window: int | None = None) -> Backbone:
    """A model that computes in float64 throughout: transformers' RMS norms cast to fp32."""
    model = backbone(family, fast=False, double=True)
    model.causal.config.sliding_window = window
    for module in model.model.modules():
        if isinstance(module, LlamaRMSNorm | MistralRMSNorm):
            size, weight, epsilon = module.weight.shape, module.weight, module.variance_epsilon
            module.forward = partial(F.rms_norm, normalized_shape=size, weight=weight, eps=epsilon)
    start = away(model.layout, model.initial)
    for name, parameter in model.parameters.items():
        parameter.data = start[name].double()
        parameter.grad = None
        parameter.requires_grad_(True)
    return model


def gradient(model: Backbone, states: torch.Tensor) -> torch.Tensor:
    """Gradient of a fixed weighting of the states."""
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1), dtype=states.dtype)
    (states * weights).sum().backward()
    return torch.cat([model.parameters[name].grad.reshape(-1) for name in model.layout.names])


def plain_states(model: Backbone, packing: Packing) -> torch.Tensor:
    """Final hidden states at the packing's rows, from one unpadded forward pass for each response."""
    states, start = [], 0
    for segment in packing.segments:
        p, c, r = segment.prompt, segment.chosen, segment.rejected
        prompt, chosen, rejected = packing.ids[:, start : start + segment.length].split([p, c, r], 1)
        for first, response in ((0, chosen), (p, rejected)):
            ids = torch.cat([prompt, response], 1)
            states.append(model.trunk(input_ids=ids, use_cache=False).last_hidden_state[0, first:])
        start += segment.length
    return torch.cat(states)[packing.rows]


def check_states(fast: Backbone, plain: Backbone, kind: str) -> None:
    """States and gradients of packed pairs are those of unpadded passes."""
    packing = Packing.of(pairs(kind == "ends"), **KINDS[kind])
    got = fast.final.norm(trunk_hidden(fast, packing)[None])[0]
    want = plain_states(plain, packing)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    got, want = gradient(fast, got), gradient(plain, want)
    assert (got - want).norm() < 1e-10 * want.norm()


@pytest.mark.sample
@pytest.mark.parametrize("kernel", ["_varlen", "_one_by_one", None])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_calls_equal_the_plain_model(
    kernel: str | None, family: str, kind: str, monkeypatch
) -> None:
    """Prompt and chosen response, and rejected response over the prompt and itself, are all that a pair's
    attention is: states and gradients equal those of unpadded passes, up to rounding in float64. The cases
    include responses of one token (no input), equal and grouped heads, and both forms of the last block.
    ``None`` is the CPU's form."""
    monkeypatch.setattr(packed, "_kernel", lambda query: kernel and getattr(packed, kernel))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_definition)
    fast, plain = in_float64(family), in_float64(family)
    assert enable_packing(fast) == ""
    check_states(fast, plain, kind)


@pytest.mark.sample
@pytest.mark.parametrize("kernel", ["_varlen", "_one_by_one", None])
@pytest.mark.parametrize("window", [4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_shorter_than_a_pair(kernel: str | None, window: int, kind: str, monkeypatch) -> None:
    """Positions within a sequence are as far apart as in an unpadded pass, so a sliding window is the same
    there: states and gradients are those of transformers' own mask, in float64. Pairs have 2 to 15 tokens;
    some sequences fit into the window. Input that is not packed keeps the window too."""
    monkeypatch.setattr(packed, "_kernel", lambda query: kernel and getattr(packed, kernel))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_definition)
    fast, plain = in_float64("mistral", window), in_float64("mistral", window)
    assert enable_packing(fast, 15) == ""
    ids = torch.arange(1, 16)[None]
    torch.testing.assert_close(fast.causal(ids).logits, plain.causal(ids).logits)
    check_states(fast, plain, kind)


class NoSquares(TorchDispatchMode):
    """Fails if an operation returns a tensor with two dimensions of at least ``size``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                assert sum(n >= self.size for n in tensor.shape) < 2, f"{func}: {list(tensor.shape)}"
        return results


@pytest.mark.parametrize("window", [None, 400])
@pytest.mark.parametrize("kernel", ["_varlen", "_one_by_one", None])
def test_no_tensor_grows_with_the_square_of_the_length(
    kernel: str | None, window: int | None, monkeypatch
) -> None:
    """Two pairs of 3,000 tokens through two blocks with grouped heads, forward and backward with fake
    tensors: no tensor has two dimensions of a prompt's or response's length. Other dimensions are at most
    101. The CPU's form (``None``), which has a mask for each response, shows that a mask would be noticed.
    With a window it has none.
    """
    model = backbone("mistral", dtype="float32" if kernel == "_one_by_one" else "bfloat16")
    assert enable_packing(model) == ""
    model.causal.config.sliding_window = window
    monkeypatch.setattr(packed, "_kernel", lambda query: kernel and getattr(packed, kernel))
    model.train_only(model.layout.names)
    long = Pair(*(np.ones(n, np.int32) for n in (1000, 1001, 1001)))
    packing = Packing.of([long, long])
    parameters = list(model.parameters.values())
    for parameter in parameters:
        parameter.grad = None

    def step() -> tuple[torch.Tensor, ...]:
        with FakeTensorMode(allow_non_fake_inputs=True), NoSquares(1000):
            return torch.autograd.grad(trunk_hidden(model, packing).sum(), parameters)

    if kernel is None and window is None:
        with pytest.raises(AssertionError, match=r"\[1000, 2000\]"):
            step()
    else:
        assert [gradient.shape for gradient in step()] == [p.shape for p in parameters]


def on_fake_gpu(*shape: int, **options) -> torch.Tensor:
    """A tensor on a GPU, under fake tensors."""
    return torch.empty_strided(shape, torch.empty(shape).stride(), device="cuda", **options)


@pytest.mark.parametrize("window", [None, 400])
def test_no_mask_of_the_square_of_the_length_on_a_fake_gpu(window: int | None) -> None:
    """Two pairs of 3,000 tokens, with grouped heads, in bfloat16. In float32 a fake GPU cannot show it:
    PyTorch without CUDA has no fused kernel to choose there."""
    long = Pair(*(np.ones(n, np.int32) for n in (1000, 1001, 1001)))
    packing = Packing.of([long, long])
    with FakeTensorMode(allow_non_fake_inputs=True), NoSquares(1000), torch.no_grad():
        packing.ids = on_fake_gpu(1, packing.ids.shape[1], dtype=torch.long)
        q, k, v = (
            on_fake_gpu(1, heads, packing.ids.shape[1], 64, dtype=torch.bfloat16) for heads in (4, 2, 2)
        )
        result, _ = packed._attention(None, q, k, v, None, packing=packing, sliding_window=window)
    assert (result.device.type, result.shape) == ("cuda", (1, 6000, 4, 64))


@pytest.mark.sample
@pytest.mark.parametrize(
    ("dtype", "width", "kernel"),
    [
        (torch.bfloat16, 64, "_varlen"),
        (torch.float16, 192, "_varlen"),
        (torch.bfloat16, 256, "_one_by_one"),
        (torch.bfloat16, 60, "_one_by_one"),
        (torch.float32, 64, "_one_by_one"),
    ],
)
@pytest.mark.parametrize("tail", ["", "fill", "shorten"])
@pytest.mark.parametrize("kind", KINDS)
def test_choice_of_kernel_on_a_fake_gpu(
    dtype, width: int, kernel: str, tail: str, kind: str, monkeypatch
) -> None:
    """Attention on fake CUDA tensors calls flash attention where its kernel supports the heads, and returns
    all rows, or completion rows only if the last block ``shorten``s. All operands are on the GPU, since fake
    tensors refuse to mix devices."""
    calls = []
    run = getattr(packed, kernel)
    monkeypatch.setattr(packed, kernel, lambda *args: calls.append(args) or run(*args))
    packing = Packing.of(pairs(kind == "ends"), **KINDS[kind])
    total, rows = packing.ids.shape[1], len(packing.rows)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        packing.ids, packing.rows = (
            on_fake_gpu(1, total, dtype=torch.long),
            on_fake_gpu(rows, dtype=torch.long),
        )
        q, k, v = (on_fake_gpu(1, heads, total, width, dtype=dtype) for heads in (4, 2, 2))
        result, _ = packed._attention(None, q, k, v, None, packing=packing, packing_tail=tail)
    assert len(calls) == 1
    assert result.device.type == "cuda"
    assert result.shape == (1, rows if tail == "shorten" else total, 4, width)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_bfloat16_on_a_cpu_is_pytorchs_with_the_gradient_of_float64(masked: bool) -> None:
    """Three query heads for each head of keys, and a tail of queries with a mask. The gradient rounds the
    output and itself to 8 significant bits, so it is within 2⁻⁷ of that in float64."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, rows, 16, generator=draw).bfloat16().requires_grad_()
        for heads, rows in ((6, 20 if masked else 50), (2, 50), (2, 50))
    )
    upstream = torch.randn(q.shape, generator=draw).bfloat16()
    mask = torch.full((20, 50), -torch.inf).triu(31) if masked else None

    def options(dtype: torch.dtype) -> dict:
        known = {"scale": 0.3, "enable_gqa": True, "is_causal": not masked}
        return known if mask is None else known | {"attn_mask": mask.to(dtype)}

    got = packed._attend(q, k, v, **options(torch.bfloat16))
    plain = F.scaled_dot_product_attention(q, k, v, **options(torch.bfloat16))
    assert torch.equal(got, plain)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = F.scaled_dot_product_attention(*wide, **options(torch.float64))
    want = torch.autograd.grad(exact, wide, upstream.double())
    for one, other in zip(torch.autograd.grad(got, (q, k, v), upstream), want, strict=True):
        assert (one - other).norm() < 2**-7 * other.norm()
