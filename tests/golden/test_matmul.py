"""Products of frozen weights by oneDNN against PyTorch's own, and when either is used."""

from pathlib import Path

import pytest
import torch
from tests.small_models import backbone
from torch.utils._python_dispatch import TorchDispatchMode

from prefed.models import matmul as module
from prefed.models.fused_lora import lora_linear
from prefed.models.matmul import matmul
from prefed.train.logprobs import token_logprobs

ONEDNN = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="needs PyTorch with oneDNN",
)


class Calls(TorchDispatchMode):
    """Notes the shapes of the operands of every product by oneDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "linear_pointwise" in str(func):
            self.shapes.append((tuple(args[0].shape), tuple(args[1].shape)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def onednn(monkeypatch):
    """As on a CPU where oneDNN is the faster one, for products of every size."""
    monkeypatch.setattr(module, "_prefers_onednn", lambda: True)
    monkeypatch.setattr(module, "SMALLEST", 1)


@pytest.mark.sample
@ONEDNN
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 31, 32, 33])
def test_a_product_by_onednn_is_that_of_float64(onednn, rows: int, bias: bool, transposed: bool) -> None:
    """A sum of 41 terms in float32 is off by at most 41 · 2⁻²⁴ times the sum of their sizes, in any order and
    with or without fused operations. Rows are padded to the next multiple of 32, and the padding is not
    returned."""
    draw = torch.Generator().manual_seed(rows)
    left, right = torch.randn(rows, 40, generator=draw), torch.randn(40, 24, generator=draw)
    right = right.t().contiguous().t() if transposed else right
    added = torch.randn(24, generator=draw) if bias else None
    with Calls() as calls:
        got = matmul(left, right, added)
    want = left.double() @ right.double() + (0 if added is None else added.double())
    assert calls.shapes == [((-(-rows // 32) * 32, 40), (24, 40))]
    assert got.is_contiguous()
    sizes = left.abs().double() @ right.abs().double() + (0 if added is None else added.abs().double())
    assert ((got.double() - want).abs() <= 1.001 * 41 * 2**-24 * sizes).all()


@ONEDNN
def test_layers_and_head_compute_the_same_by_either_library(onednn, monkeypatch) -> None:
    """Values and all gradients of a LoRA layer and of the head's log-probabilities, with 2 and 2 products of
    frozen weights that oneDNN computes."""
    results = []
    for library in (True, False):
        monkeypatch.setattr(module, "_prefers_onednn", lambda library=library: library)
        draw = torch.Generator().manual_seed(1)
        x, a, b = (
            torch.randn(*shape, generator=draw).requires_grad_() for shape in ((37, 24), (4, 24), (24, 4))
        )
        weight, head = torch.randn(24, 24, generator=draw), torch.randn(50, 24, generator=draw)
        at = torch.arange(37)
        with Calls() as calls:
            token_logprobs(lora_linear(x, weight, None, a, b, 0.5), head, at, at).sum().backward()
        assert len(calls.shapes) == (4 if library else 0)
        results.append((x.grad, a.grad, b.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@ONEDNN
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("library", [True, False])
def test_a_lora_that_is_left_out_gives_the_bits_of_one_with_zeros(
    onednn, monkeypatch, family, library
) -> None:
    """By the same library, with a bias (GPT-2) and without: the reference has one set of numbers."""
    monkeypatch.setattr(module, "_prefers_onednn", lambda: library)
    model, ids = backbone(family), torch.arange(1, 13)[None]
    model.load(model.reference)
    with Calls() as calls, torch.no_grad():
        zeros = model.causal(input_ids=ids).logits
        products = len(calls.shapes)
        with model.without_idle_lora():
            assert torch.equal(model.causal(input_ids=ids).logits, zeros)
    assert (products > 0) is library
    assert len(calls.shapes) == 2 * products


def test_small_products_and_other_dtypes_are_pytorchs_own(monkeypatch) -> None:
    """Bit for bit, also where oneDNN is preferred: 255 · 256 · 256 is below 2²⁴, 256³ is not."""
    monkeypatch.setattr(module, "_prefers_onednn", lambda: True)
    square = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    with Calls() as calls:
        assert torch.equal(matmul(square[:255], square), square[:255] @ square)
        half, wide = square.bfloat16(), square.double()
        assert torch.equal(matmul(half, half), half @ half)
        assert torch.equal(matmul(wide, wide, wide[0]), torch.addmm(wide[0], wide, wide))
    assert calls.shapes == []
    assert module.SMALLEST == 256**3


@ONEDNN
@pytest.mark.parametrize(
    ("vendor", "vectors", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_onednn_is_for_amd_processors_with_avx_512(
    tmp_path: Path, monkeypatch, vendor: str, vectors: str, expected: bool
) -> None:
    """Where MKL uses AVX2; without a ``/proc/cpuinfo``, as outside Linux, MKL remains."""
    if vendor:
        (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(module, "Path", lambda name: tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    assert module._prefers_onednn.__wrapped__() is expected
