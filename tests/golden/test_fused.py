"""Fused forwards against the modules of transformers that they replace."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from prefed.data import Pair
from prefed.models import fused_lora
from prefed.models.fused_lora import fuse, lora_linear
from prefed.models.trainable_parts import lora_layers
from prefed.train.packed import Packing, enable_packing, trunk_hidden
from small_models import away, backbone


def norms(dtype: torch.dtype, weights: torch.dtype) -> tuple[LlamaRMSNorm, LlamaRMSNorm]:
    """A norm as transformers has it, and the same one fused."""
    torch.manual_seed(0)
    plain = LlamaRMSNorm(48, eps=1e-5)
    plain.weight.data = torch.randn(48).to(weights)
    model = torch.nn.Sequential(copy.deepcopy(plain))
    fuse(model)
    assert "forward" in vars(model[0]), "not fused"
    return plain, model[0]


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_a_fused_norm_in_bfloat16_returns_what_transformers_returns(weights: torch.dtype) -> None:
    """Both compute in float32 and round before the weight and after it, so no element is more than two
    roundings (2⁻⁸ each) away, and no element of a gradient of about 1 more than a few."""
    plain, fused = norms(torch.bfloat16, weights)
    x = torch.randn(2, 30, 48).to(torch.bfloat16)
    upstream = torch.randn(2, 30, 48).to(weights)
    results = []
    for norm in (plain, fused):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        y.backward(upstream)
        assert leaf.grad is not None
        assert norm.weight.grad is not None
        results.append((y.detach(), leaf.grad, norm.weight.grad))
    (y, dx, dw), (got_y, got_dx, got_dw) = results
    assert got_y.dtype == y.dtype
    assert got_dw.dtype == dw.dtype
    torch.testing.assert_close(got_y, y, rtol=2**-7, atol=0)
    torch.testing.assert_close(got_dx, dx, rtol=2**-5, atol=2**-6)
    torch.testing.assert_close(got_dw, dw, rtol=2**-5, atol=2**-4)


def test_a_fused_norm_has_the_gradient_of_its_formula() -> None:
    """Finite differences in float64, for input and weight; and a frozen weight receives none."""
    _, fused = norms(torch.float64, torch.float64)
    x = torch.randn(3, 5, 48, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, weight: _with(fused, weight)(x), (x, fused.weight))
    fused.weight.requires_grad_(False)
    fused.weight.grad = None
    fused(x).sum().backward()
    assert fused.weight.grad is None


def _with(norm: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    norm.weight = torch.nn.Parameter(weight) if not isinstance(weight, torch.nn.Parameter) else weight
    return norm


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_dropout_keeps_its_input_and_repeats_its_draw(
    again: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With frozen weights, and without, as over 4-bit weights. The oracle is PyTorch's dropout and autograd,
    from the same random state and in float64. Saved are no numbers as large as the input except the input
    itself, so modules that share it keep it once, and on a CPU the mask."""
    monkeypatch.setattr(fused_lora, "redraws", lambda x: again)
    torch.manual_seed(0)
    x = torch.randn(2, 20, 24, dtype=torch.float64, requires_grad=True)
    weight, up = (torch.randn(*size, dtype=torch.float64) for size in ((16, 24), (2, 20, 16)))
    a, b = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((3, 24), (16, 3)))
    state, saved = torch.get_rng_state(), list[torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = lora_linear(x, weight if frozen else None, None, a, b, 0.5, dropout=0.3)
    torch.manual_seed(1)
    got = torch.autograd.grad(y, (x, a), up)
    torch.set_rng_state(state)
    plain = frozen * (x @ weight.t()) + 0.5 * (torch.nn.functional.dropout(x, 0.3) @ a.t()) @ b.t()
    want = torch.autograd.grad(plain, (x, a), up)
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(got, want)
    large = [each for each in saved if each.numel() >= x.numel()]
    assert large[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert len(large) == (1 if again else 2)


class OwnGenerators(TorchDispatchMode):
    """Refuses a generator of another device, as PyTorch does with real tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        source = (kwargs or {}).get("generator")
        assert source is None or source.device == args[0].device, f"{func} draws from {source.device}"
        return func(*args, **(kwargs or {}))


def test_an_apple_gpu_draws_from_its_own_generator_once() -> None:
    """A clone of its generator has the seed and not the position, so a draw repeated from it would differ:
    the mask is kept. Without the device PyTorch's autograd cannot run, hence the call of its function."""
    saved = list[torch.Tensor]()
    context = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
    with FakeTensorMode(), OwnGenerators():
        x, a, b = (torch.empty(*shape, device="mps") for shape in ((20, 24), (3, 24), (16, 3)))
        drawn = fused_lora.Dropout(0.3, [20], [fused_lora._generator(x.device)])
        fused_lora._LoraLinear.forward(context, x, None, None, a, b, 0.5, drawn)
    assert [each.shape for each in saved if each is not None] == [x.shape, a.shape, b.shape, (3, 20), x.shape]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("trained", ["AB", "B"])
def test_factors_converted_together_have_the_gradients_of_each_alone(
    trained: str, checkpointing: bool
) -> None:
    """Both round the same numbers to bfloat16 and add the same ones in float32, so gradients are equal:
    with dropout, with frozen factors, and with another pass between forward and backward. They are added to
    those that are there, and a pass after a change of the factors has the new ones."""
    model = backbone("llama", dtype="bfloat16", dropout=0.2, checkpointing=checkpointing)
    assert enable_packing(model) == ""
    model.dropout(trunk=True)
    packing = Packing.of([Pair(*(np.arange(1, n, dtype=np.int32) for n in (9, 7, 5)))])
    model.train_only([name for name in model.layout.names if name[-1] in trained])
    layers = [layer for _, _, layer in lora_layers(model.causal)]
    results = []
    for together in (True, False):
        if not together:
            model.trunk._forward_pre_hooks.clear()
            for layer in layers:
                del layer.converted
        model.grad.fill_(0.5)
        for seed in (1, 2):
            model.load(away(model.layout, model.initial, seed=seed))
            torch.manual_seed(seed)
            hidden = trunk_hidden(model, packing)
            with torch.random.fork_rng(), torch.no_grad():
                trunk_hidden(model, packing)
            hidden.square().sum().backward()
        assert all(hasattr(layer, "converted") == together for layer in layers)
        results.append((hidden.detach(), model.grad.clone()))
    (hidden, gradient), (expected, sums) = results
    assert torch.equal(hidden, expected)
    assert torch.equal(gradient, sums)
    changed = sum(bool((part - 0.5).abs().max() > 0) for part in (p.grad for p in model.parameters.values()))
    assert changed == sum(name[-1] in trained for name in model.layout.names)
