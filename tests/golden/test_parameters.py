"""The parts of a personalised model against their equations in plain torch, with gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.small_models import Pairs, away, backbone, float64

from prefed.core import Tensors
from prefed.models.backbone import Backbone
from prefed.models.trainable_parts import lora_layers
from prefed.train import PairTrainer
from prefed.train.packed import PackedForward
from prefed.train.padded import PaddedForward

FAMILIES = ["gpt2", "llama"]
SDG = frozenset({"lora", "personal_lora", "gate"})
TOP = frozenset({"lora", "bottleneck", "head", "reward"})


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(family: str, needs: frozenset[str], scale: float = 0.3) -> Backbone:
    """A model away from its start, with all gradients on."""
    model = backbone(family, needs)
    model.load(away(model.layout, model.initial, scale))
    model.train_only(model.layout.names)
    model.grad.zero_()
    return model


def leaves(model: Backbone, *names: str) -> list[torch.Tensor]:
    return [model.parameters[name].detach().clone().requires_grad_() for name in names]


def agree(got: torch.Tensor, want: torch.Tensor, model: Backbone, named: dict[str, torch.Tensor]) -> None:
    """Equal outputs, and equal gradients of one fixed weighting of them, nothing falling on other tensors."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    slope = normal(7, *got.shape)
    (got * slope).sum().backward()
    expected = torch.autograd.grad((want * slope).sum(), list(named.values()))
    for name, gradient in zip(named, expected, strict=True):
        torch.testing.assert_close(
            model.parameters[name].grad, gradient, rtol=1e-4, atol=1e-4 * float(gradient.norm())
        )
        assert gradient.any()
    whole = Tensors(model.layout, model.grad)
    assert not any(whole[name].any() for name in model.layout.names if name not in named)


# FedSDG


@pytest.mark.parametrize("factors", [False, True], ids=["branches", "factors"])
@pytest.mark.parametrize("family", FAMILIES)
@float64()
def test_block_output_of_fedsdg(family: str, factors: bool) -> None:
    """With m = σ(a) of its block's a, each adapted layer gives W0 x + b + s (B_g A_g + m B_p A_p) x, or in
    factor space W0 x + b + s (B_g + m B_p)(A_g + m A_p) x; s = alpha / rank = 2, and a is ±1.3, where m
    is not what it is at 0. The gradients of all five tensors are autograd's."""
    model = moved(family, SDG | ({"factors"} if factors else set()))
    gates = {0: 1.3, 1: -1.3}
    for block, a in gates.items():
        model.parameters[f"gate/{block}"].data.fill_(a)
    blocks_tested = set()
    for stem, block, layer in lora_layers(model.causal):
        names = [f"{part}/{stem}/{factor}" for part in ("lora", "personal_lora") for factor in "AB"]
        names.append(f"gate/{block}")
        a_g, b_g, a_p, b_p, a = values = leaves(model, *names)
        m = 1 / (1 + torch.exp(-a))
        w0 = layer.base_layer.weight.detach()
        w0 = w0.t() if family == "gpt2" else w0  # GPT-2 keeps W0 transposed
        product = (b_g + m * b_p) @ (a_g + m * a_p) if factors else b_g @ a_g + m * (b_p @ a_p)
        x = normal(len(blocks_tested), 5, w0.shape[1])
        want = x @ (w0 + 2.0 * product).t()
        if layer.base_layer.bias is not None:
            want = want + layer.base_layer.bias.detach()
        model.grad.zero_()
        agree(layer(x), want, model, dict(zip(names, values, strict=True)))
        blocks_tested.add(block)
    assert blocks_tested == set(gates)


def test_gradient_reaches_through_a_block_of_fedsdg() -> None:
    """∂y/∂x = W0 + s (B_g A_g + m B_p A_p), a = ln 3 and so m = ¾: what earlier blocks learn from."""
    model = moved("llama", SDG)
    stem, block, layer = next(iter(lora_layers(model.causal)))
    model.parameters[f"gate/{block}"].data.fill_(math.log(3))
    names = [f"{part}/{stem}/{factor}" for part in ("lora", "personal_lora") for factor in "AB"]
    a_g, b_g, a_p, b_p = (value.detach() for value in leaves(model, *names))
    jacobian = layer.base_layer.weight + 2.0 * (b_g @ a_g + 0.75 * (b_p @ a_p))
    x = normal(0, 1, jacobian.shape[1]).requires_grad_()
    slope = normal(1, 1, jacobian.shape[0])
    (got,) = torch.autograd.grad((layer(x) * slope).sum(), x)
    torch.testing.assert_close(got, slope @ jacobian.detach(), rtol=1e-5, atol=1e-5)


# The bottleneck


def norm_written_out(family: str, z: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    """GPT-2's LayerNorm (z − mean) / √(var + 1e-5) · w + b, or Llama's RMSNorm z / √(mean z² + 1e-6) · w."""
    if family == "gpt2":
        z = z - z.mean(-1, keepdim=True)
        return z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias[0]
    return z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x Φ(x), Φ the normal distribution function."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def bottleneck(model: Backbone) -> dict[str, torch.Tensor]:
    names = [name for name in model.layout.names if name.startswith("bottleneck/")]
    return dict(zip(names, leaves(model, *names), strict=True))


def written_out(
    family: str, z: torch.Tensor, named: dict[str, torch.Tensor], mask: object = 1
) -> torch.Tensor:
    encode, shift, decode, back, *norm = named.values()
    return norm_written_out(family, z + mask * gelu(z @ encode.t() + shift) @ decode.t() + back, *norm)


@pytest.mark.parametrize("family", FAMILIES)
def test_bottleneck(family: str) -> None:
    """M(z) = Norm(z + Decode(GELU(Encode z))) with the bottleneck's own norm parameters, 32 → 8 → 32.
    Encode z reaches beyond ±1, where GELU is neither ReLU nor its tanh approximation to 1e-5."""
    model = moved(family, TOP)
    named = bottleneck(model)
    assert [tuple(value.shape) for value in named.values()][:4] == [(8, 32), (8,), (32, 8), (32,)]
    z = 2 * normal(0, 6, 32)
    agree(model.final.norm(z), written_out(family, z, named), model, named)


@pytest.mark.parametrize("family", FAMILIES)
def test_bottleneck_stands_in_the_place_of_the_final_norm(family: str) -> None:
    """The logits are h1 M(z), z what leaves the last block and h1 the client's own head: the model's
    original norm, which has other parameters by now, is nowhere on the way."""
    model = moved(family, TOP)
    blocks = getattr(model.trunk, model.family.blocks)
    outputs: list[torch.Tensor] = []
    hook = blocks[-1].register_forward_hook(
        lambda _, __, out: outputs.append(out if torch.is_tensor(out) else out[0])
    )
    ids = torch.arange(1, 10)[None]
    got = model.causal(input_ids=ids, use_cache=False).logits
    hook.remove()
    head = model.parameters["head/weight"].detach()
    want = written_out(family, outputs[0].detach(), bottleneck(model)) @ head.t()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bottleneck_starts_as_the_norm_it_replaces(family: str) -> None:
    """Decode = 0 adds 0 to z, and the norm is a copy of the model's: M(z) is its Norm(z) bit for bit."""
    model, bare = backbone(family, TOP), backbone(family)
    z = normal(0, 6, 32)
    with torch.no_grad():
        assert torch.equal(model.final.norm(z), bare.final.norm(z))
        assert not torch.equal(bare.final.norm.weight, torch.ones(32))
    for name, value in bare.final.norm.named_parameters():
        assert torch.equal(model.initial[f"bottleneck/norm/{name}"], value)


def test_bottleneck_drops_after_gelu() -> None:
    """Decode(Dropout(GELU(Encode z))): the mask, of 0 and 1/(1 − ½) = 2, lies on the 8 inner values."""
    model = moved("gpt2", TOP)
    model.final.dropout.p = 0.5
    model.dropout(top=True)
    z = 2 * normal(0, 6, 32)
    torch.manual_seed(3)
    got = model.final.norm(z)
    torch.manual_seed(3)
    mask = torch.nn.functional.dropout(torch.ones(6, 8), 0.5)
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(got, written_out("gpt2", z, bottleneck(model), mask), rtol=1e-5, atol=1e-5)


# The reward head


@pytest.mark.parametrize("dropped", [False, True])
def test_reward_head(dropped: bool) -> None:
    """h2 = W2 tanh(Dropout(W1 h + b1)) + b2 of pooled h, 32 → 8 → 1 and no sigmoid: scores of both signs
    beyond 1. The mask of a dropout of ½ lies inside the tanh."""
    model = moved("gpt2", TOP, scale=1.0)
    names = [f"reward/{layer}/{kind}" for layer in ("hidden", "out") for kind in ("weight", "bias")]
    w1, b1, w2, b2 = values = leaves(model, *names)
    assert [tuple(value.shape) for value in values] == [(8, 32), (8,), (1, 8), (1,)]
    pooled = 0.3 * normal(1, 20, 32)
    mask: object = 1
    if dropped:
        model.reward.dropout.p = 0.5
        model.dropout(top=True)
        torch.manual_seed(3)
        mask = torch.nn.functional.dropout(torch.ones(20, 8), 0.5)
        torch.manual_seed(3)
    inner = mask * (pooled @ w1.t() + b1)
    e = torch.exp(-2 * inner)
    want = ((1 - e) / (1 + e) @ w2.t() + b2)[:, 0]
    assert want.min() < -1 < 1 < want.max()
    agree(model.reward(pooled), want, model, dict(zip(names, values, strict=True)))


@pytest.mark.parametrize("way", [PaddedForward, PackedForward])
@pytest.mark.parametrize("pool", ["all", "completion"])
def test_pooling(pool: str, way: type[PaddedForward] | type[PackedForward]) -> None:
    """h2 reads the mean of M(z) over prompt and response, or over the response alone, padding never: each
    response goes through the model alone and unpadded, and its rows are averaged here."""
    pairs = Pairs(4)
    model = moved("gpt2", TOP, scale=0.1)
    settings = model.config.model_copy(
        update={"reward": model.config.reward.model_copy(update={"pool": pool})}
    )
    model = replace(model, config=settings)
    batch = [pairs.pair(row) for row in range(4)]
    means = []
    with torch.no_grad():
        for pair in batch:
            for response in (pair.chosen, pair.rejected):
                ids = torch.from_numpy(np.concatenate([pair.prompt, response]).astype(np.int64))[None]
                states = model.trunk(input_ids=ids, use_cache=False).last_hidden_state[0]
                means.append((states[len(pair.prompt) :] if pool == "completion" else states).mean(0))
        want = model.reward(torch.stack(means)).view(4, 2)
        forward = PaddedForward(model) if way is PaddedForward else PairTrainer(model, pairs).model.forward
        assert isinstance(forward, way)
        got = forward(batch, rewards=True)[:, 2:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# Starting values


def gathered(model: Backbone, part: str, factor: str, unit: bool = False) -> torch.Tensor:
    """All values of a factor end to end; with ``unit`` times √in, in which A's range is ±1."""
    pieces = [
        model.initial[entry.name].flatten() * (entry.shape[1] ** 0.5 if unit else 1)
        for entry in model.layout.entries
        if (entry.part, entry.factor) == (part, factor)
    ]
    return torch.cat(pieces).double()


@pytest.fixture(scope="module")
def wide() -> Backbone:
    return backbone("llama", SDG | TOP, rank=16)


def test_personal_b_starts_as_a_small_normal(wide: Backbone) -> None:
    """B_p ~ N(0, 0.01²), n > 7000 values. Five standard errors: a mean within 5 · 0.01/√n, a standard
    deviation within 5/√(2n) of 0.01, and a share erf(1/√2) = 0.6827 within one σ (a uniform: 0.577)."""
    b = gathered(wide, "personal_lora", "B")
    n = len(b)
    assert n == 16 * 2 * (32 + 16 + 16 + 32 + 48 + 48 + 32)
    assert abs(float(b.mean())) < 5 * 0.01 / n**0.5
    assert float(b.square().mean().sqrt()) == pytest.approx(0.01, rel=5 / (2 * n) ** 0.5)
    within = math.erf(1 / math.sqrt(2))
    share = float((b.abs() < 0.01).double().mean())
    assert share == pytest.approx(within, abs=5 * (within * (1 - within) / n) ** 0.5)


def test_gates_start_half_open_and_shared_b_at_zero(wide: Backbone) -> None:
    """a = 0, so that m = ½, one for each of the two blocks; B_g = 0, so that the model is the bare one plus
    what B_p adds; the bottleneck's Decode = 0."""
    gates = [entry for entry in wide.layout.entries if entry.part == "gate"]
    assert [(entry.block, entry.shape) for entry in gates] == [(0, (1,)), (1, (1,))]
    assert not any(wide.initial[entry.name].any() for entry in gates)
    assert not gathered(wide, "lora", "B").any()
    assert not wide.initial["bottleneck/decode/weight"].any()
    assert not wide.initial["bottleneck/decode/bias"].any()


@pytest.mark.parametrize("part", ["lora", "personal_lora"])
def test_a_starts_uniform(wide: Backbone, part: str) -> None:
    """A ~ U(−1/√in, 1/√in): times √in all within ±1, the outermost of n > 7000 beyond 0.99 on both sides,
    and a standard deviation of 1/√3 within five standard errors, √(0.8/n)/2 of it (kurtosis 1.8)."""
    a = gathered(wide, part, "A", unit=True)
    n = len(a)
    assert n == 16 * 2 * (6 * 32 + 48)
    assert a.abs().max() <= 1 + 1e-6
    assert a.min() < -0.99
    assert a.max() > 0.99
    assert float(a.square().mean().sqrt()) == pytest.approx(3**-0.5, rel=2.5 * (0.8 / n) ** 0.5)


def test_the_two_branches_start_apart(wide: Backbone) -> None:
    """A_g and A_p are two draws: n products of independent zero-mean values with variance 1/3 have a mean
    within five standard errors, 5 / (3 √n), of 0."""
    a, own = (gathered(wide, part, "A", unit=True) for part in ("lora", "personal_lora"))
    assert abs(float((a * own).mean())) < 5 / 3 / len(a) ** 0.5
