"""Frozen models in 16 and in 4 bits: gradients against those in float32, and what is refused where."""

from __future__ import annotations

import copy
import importlib.util

import numpy as np
import pytest
import torch
from tests.small_models import Pair, Pairs, away, backbone, causal
from torch._subclasses import FakeTensorMode

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase, Tensors
from prefed.models import (
    ModelConfig,
    ModelError,
    fused_lora,
    load_causal,
    make_backbone,
    pretrained,
    save_merged,
)
from prefed.models import backbone as backbones
from prefed.train import PairTrainer, logprobs, optimizer_steps
from prefed.train.logprobs import token_logprobs, token_terms

PAIRS, ROWS = Pairs(6), np.arange(6)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gradient(model, fast: bool = True, start: Tensors | None = None) -> tuple[Tensors, float]:
    trainer = PairTrainer(model, PAIRS, max_tokens=60, fast=fast)
    everything = Ownership.of(model.layout, lambda entry: Owner.SHARED)
    start = away(model.layout, model.initial) if start is None else start
    return trainer.visit(ROWS, Key(5), everything).gradient(start, Objective("dpo", {"beta": 0.5}))


def apart(one: Tensors, other: Tensors) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture
def half_on_the_cpu(monkeypatch):
    """float16 where there is no GPU: slow, but the numbers are the same."""
    monkeypatch.setattr(backbones, "check_dtype", lambda config, device: None)


@pytest.mark.parametrize("fast", [True, False])
def test_half_precision_gives_the_gradient_of_float32(half_on_the_cpu, fast) -> None:
    """float16 has 11 significant bits, a relative rounding of 5e-4 at each step: the gradient through two
    blocks is within 2% of the one in float32, in float32 and without the loss scale."""
    want, loss = gradient(backbone("llama", fast=fast), fast)
    got, value = gradient(backbone("llama", fast=fast, dtype="float16"), fast)
    assert got.flat.dtype == torch.float32
    assert apart(got, want) < 0.02
    assert value == pytest.approx(loss, rel=0.01)


def test_a_packed_gradient_in_bfloat16_is_as_exact_as_a_plain_one() -> None:
    """The packed pass has an attention gradient of its own on a CPU, the plain one transformers'. Both are
    apart from float32 by roundings to 8 bits alone, so by as much, within a half."""
    want, _ = gradient(backbone("llama"))
    plain, packed = (
        apart(gradient(backbone("llama", fast=fast, dtype="bfloat16"), fast)[0], want)
        for fast in (False, True)
    )
    assert 1e-3 < plain < 0.1
    assert packed < 1.5 * plain


def peaked(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states and a head with logits of up to some 70, and the likeliest token of every other row.

    All are multiples of 1/8 below 4, so no sum of their products is rounded before it is a logit.
    """
    draw = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randint(-31, 32, (rows, 24), generator=draw) / 8 for rows in (40, 300))
    likeliest = (hidden @ weight.t()).argmax(1)
    targets = torch.where(torch.arange(40) % 2 == 0, likeliest, torch.randint(300, (40,), generator=draw))
    return hidden.to(dtype), weight.to(dtype), targets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [2048, 64])
def test_a_16_bit_log_probability_is_that_of_transformers_and_never_above_zero(dtype, block, monkeypatch):
    """Plain transformers: a log-softmax in float32 of logits in 16 bits. A logit is off by at most 2^-p of
    itself, p = 8 or 11, and the normalizer by at most as much as the largest logit: against float64 both
    together stay within 2^(1-p) max|z|. Where the target has nearly all of the probability both have the
    same rounding, and it cancels: in bfloat16 either by itself is off by 0.02 nats and more."""
    monkeypatch.setattr(logprobs, "BLOCK", block)
    hidden, weight, targets = peaked(dtype)
    rows = torch.arange(len(hidden))
    plain = (hidden @ weight.t()).float().log_softmax(1)[rows, targets]
    logits = hidden.double() @ weight.double().t()
    exact = logits.log_softmax(1)[rows, targets]
    off = 2 ** (-7 if dtype == torch.bfloat16 else -10) * float(logits.abs().max())
    sure = exact > -1e-3
    assert sure.sum() >= 5
    assert (plain[sure] - exact[sure]).abs().max() < 1e-3
    for ours in (token_logprobs(hidden, weight, rows, targets), token_terms(hidden, weight, targets)[0]):
        assert ours.max() <= 0
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-5)
        assert (ours - exact).abs().max() < off
        assert (ours[sure] - exact[sure]).abs().max() < 1e-3


@pytest.mark.parametrize(("rows", "vocabulary", "most"), [(300, 70_000, 1 << 15), (1 << 14, 20_000, 1 << 12)])
@pytest.mark.parametrize("keep", [1 << 40, 0])
def test_other_devices_take_larger_blocks(rows, vocabulary, most, keep, monkeypatch) -> None:
    """On meta tensors, which have shapes only: blocks of 2^15 entries, or of 2^26 logits if that is less. The
    forward pass has two products per block for 16-bit states, one of them the gradient of the states, and
    the backward pass one for the head's gradient, and one more if the logits were not kept."""
    monkeypatch.setattr(logprobs, "KEEP", keep)
    shapes, multiply = [], logprobs.product
    monkeypatch.setattr(
        logprobs, "product", lambda a, b: shapes.append((*a.shape, b.shape[1])) or multiply(a, b)
    )
    hidden = torch.empty(rows, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(vocabulary, 8, device="meta", requires_grad=True)
    at = torch.zeros(rows, device="meta", dtype=torch.long)
    token_logprobs(hidden, weight, at, at, torch.zeros_like(weight)).sum().backward()
    sizes = [*[most] * (vocabulary // most), vocabulary % most]
    logits = [(rows, 8, size) for size in sizes]
    toward_states, toward_head = [(rows, size, 8) for size in sizes], [(size, rows, 8) for size in sizes]
    assert sorted(shapes) == sorted([*logits, *([] if keep else logits), *toward_states, *toward_head])
    shapes.clear()
    token_terms(hidden, weight, at)[0].sum().backward()
    assert sorted(shapes) == sorted([*logits, *logits, *toward_states, *toward_head])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_products_of_16_bits_are_float32(dtype) -> None:
    """On fake CUDA tensors. A CPU keeps the dtype, since it has no such product."""
    with FakeTensorMode():
        left = torch.empty(3, 8, device="cuda", dtype=dtype)
        result = logprobs.product(left, left.t())
    assert (result.dtype, result.shape, result.device.type) == (torch.float32, (3, 3), "cuda")
    left = torch.ones(3, 8, dtype=dtype)
    torch.testing.assert_close(logprobs.product(left, left.t()), torch.full((3, 3), 8, dtype=dtype))


def test_a_sure_response_has_no_positive_log_probability_in_bfloat16() -> None:
    """A model that writes its likeliest token each time, with a head that makes it all but certain: each sum
    over a response is at most 0. Of the same weights in float64 it is as near as plain transformers in
    bfloat16 at batch size 1 (whose own rounding depends on the CPU), or within 0.01 nats a token of that."""
    model = causal("llama")
    model.lm_head.weight.data *= 40
    model.bfloat16()
    config = ModelConfig(name="llama", dtype="bfloat16", device="cpu")
    ours = make_backbone(model, None, config, Key(1))
    pairs = []
    for prompt in range(1, 40):
        ids = torch.tensor([[prompt, 2 * prompt]])
        for _ in range(6):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(2)], 1)
        start, response = np.split(ids[0].numpy().astype(np.int32), [2])
        pairs.append(Pair(start, response, response[:1]))
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        plain, want = (
            torch.tensor(
                [
                    [
                        float(tokens[len(pair.prompt) - 1 :].sum())
                        for whole in (
                            torch.from_numpy(np.concatenate([pair.prompt, y]).astype(np.int64))
                            for y in pair[1:]
                        )
                        for tokens in [
                            each(whole[None])
                            .logits[0, :-1]
                            .double()
                            .log_softmax(1)
                            .gather(1, whole[1:, None])[:, 0]
                        ]
                    ]
                    for pair in pairs
                ]
            )
            for each in (model, exact)
        )
        ours.load(ours.reference)
        got = PairTrainer(ours, Pairs(1)).model.forward(pairs)
    assert got.max() <= 0
    assert (got - want).abs().max() <= (plain - want).abs().max() + 0.06


def test_gradients_too_small_for_float16_are_not_lost(half_on_the_cpu, monkeypatch) -> None:
    """With beta = 1e-5 the slope of the loss at a log-probability is below 1e-5, and its products with
    weights of a few hundredths are below 6e-8, where float16 has nothing but 0. Times 2^10 they are numbers.
    """

    def error(scale: float) -> float:
        monkeypatch.setattr(optimizer_steps, "LOSS_SCALE", scale)
        grads = []
        for dtype in ("float32", "float16"):
            model = backbone("llama", dtype=dtype)
            trainer, everything = (
                PairTrainer(model, PAIRS),
                Ownership.of(model.layout, lambda entry: Owner.SHARED),
            )
            start = away(model.layout, model.initial)
            tiny = Objective("dpo", {"beta": 1e-5})
            grads.append(trainer.visit(ROWS, Key(5), everything).gradient(start, tiny)[0])
        return apart(grads[1], grads[0])

    assert error(2.0**10) < 0.03 < error(1.0)


def test_a_step_that_overflows_is_left_out_and_the_scale_halved(half_on_the_cpu, monkeypatch) -> None:
    """At 2^60 times itself no gradient is finite in float16: three steps are left out, each halving the
    scale. The next phase begins anew."""
    monkeypatch.setattr(optimizer_steps, "LOSS_SCALE", 2.0**60)
    model = backbone("llama", dtype="float16")
    trainer, parts = PairTrainer(model, PAIRS), Ownership.of(model.layout, lambda entry: Owner.SHARED)
    start = away(model.layout, model.initial)
    phase = Phase(
        "test", parts.names(Owner.SHARED), Objective("dpo"), Optimizer("sgd", lr=1.0), batch_size=4, steps=3
    )
    scales = []
    take = optimizer_steps.PhaseSteps.take

    def watched(self, batch, figures) -> None:
        scales.append(model.loss_scale)
        take(self, batch, figures)

    monkeypatch.setattr(optimizer_steps.PhaseSteps, "take", watched)
    result = trainer.visit(ROWS, Key(5), parts).train(start, phase)
    assert scales == [2.0**60, 2.0**59, 2.0**58]
    assert model.loss_scale == 2.0**60
    assert result.figures["skipped"] == 1.0
    assert torch.equal(result.tensors.flat, start.flat)


@GPU
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.1), ("float16", 0.02)])
@pytest.mark.parametrize("fast", [True, False])
def test_a_gpu_gives_the_gradient_of_the_cpu(dtype: str, bound: float, fast: bool) -> None:
    want, _ = gradient(backbone("llama", fast=fast), fast)
    got, _ = gradient(backbone("llama", fast=fast, dtype=dtype, device="cuda"), fast)
    assert apart(got, want) < bound


def test_float16_on_a_cpu_is_refused() -> None:
    with pytest.raises(ModelError, match="dtype = 'float16' requires a GPU, but the model is on the CPU"):
        backbone("gpt2", dtype="float16")


def test_four_bits_without_their_package_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    config = ModelConfig(name="gpt2", quantize="nf4", device="cpu")
    with pytest.raises(ModelError, match=r"'nf4' requires bitsandbytes: pip install 'prefed\[quantized\]'"):
        load_causal(config)


@pytest.mark.parametrize("parts", [{"lora", "residual"}, {"lora", "personal_lora", "gate"}])
def test_parts_that_need_whole_weights_are_refused_over_four_bits(parts) -> None:
    """FedEx-LoRA adds to the weights themselves, and FedSDG's two branches are fused with them."""
    config = ModelConfig(name="gpt2", quantize="nf4", device="cpu")
    with pytest.raises(ModelError, match=r"needs full weights \(for .*\); remove quantize or use another"):
        make_backbone(causal("gpt2"), None, config, Key(1), frozenset(parts))


def test_every_weight_does_not_train_in_four_bits() -> None:
    with pytest.raises(ValueError, match="'full' cannot train 4-bit weights: remove quantize = 'nf4'"):
        ModelConfig(name="gpt2", quantize="nf4", train="full")


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs the extra prefed[quantized]"
)


@needs_bitsandbytes
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_four_bits_give_the_gradient_of_the_weights_that_they_stand_for(
    tmp_path, family: str, kind: str, device: str
) -> None:
    """The twin is a model in float32 whose linear weights are what bitsandbytes makes of the 4 bits: its
    gradient is the same within rounding, and that of the original model is another."""
    from bitsandbytes.functional import dequantize_4bit

    model = causal(family)
    model.save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path), quantize=kind, device=device, lora={"rank": 3, "dropout": 0.0})
    quantized = make_backbone(load_causal(config), None, config, Key(1))
    start = away(quantized.layout, quantized.initial)
    whole, count = {}, 0
    for path, module in quantized.causal.named_modules():
        if type(module).__name__ == "Linear4bit" and hasattr(module, "weight"):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state).float().cpu()
            whole[path.removesuffix(".base_layer")] = weight
    original = causal(family)
    for path, module in original.named_modules():
        if path in whole:
            transposed = type(module).__name__ == "Conv1D"
            module.weight.data.copy_(whole[path].t() if transposed else whole[path])
            count += 1
    assert count == (8 if family == "gpt2" else 14)
    plain = config.model_copy(update={"quantize": None, "device": "cpu"})
    twin = make_backbone(original, None, plain, Key(1))
    want, loss = gradient(twin, start=start)
    got, value = gradient(quantized, start=start)
    assert value == pytest.approx(loss, rel=1e-4)
    assert apart(got, want) < 1e-3
    assert apart(gradient(make_backbone(causal(family), None, plain, Key(1)), start=start)[0], want) > 0.02
    with pytest.raises(ModelError, match="cannot be merged into 4-bit weights; export the adapter"):
        save_merged(quantized, start, tmp_path / "merged")


@needs_bitsandbytes
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_four_bits_keep_nothing_for_dropout(tmp_path, monkeypatch, family: str) -> None:
    """Where a draw is repeated, as on a GPU, a step keeps as many bytes for its backward pass with dropout as
    without; and with the same draw it returns the same gradient."""
    causal(family).save_pretrained(tmp_path)
    monkeypatch.setattr(fused_lora, "redraws", lambda x: True)
    kept, found = [], []
    for dropout in (0.0, 0.3, 0.3):
        lora = {"rank": 3, "dropout": dropout}
        config = ModelConfig(name=str(tmp_path), quantize="nf4", device="cpu", lora=lora)
        model = make_backbone(load_causal(config), None, config, Key(1))
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, torch.UntypedStorage] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found.append(gradient(model, start=away(model.layout, model.initial))[0])
        kept.append(sum(storage.nbytes() for storage in saved.values()))
    assert kept[1] == kept[0]
    assert apart(found[1], found[0]) > 0.02
    assert apart(found[2], found[1]) == 0
