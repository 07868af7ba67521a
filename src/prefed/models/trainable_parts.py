"""Parts that can be added to a frozen backbone: each lists its tensors and places them in the model."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from prefed.core import Entry, Key
from prefed.core.random_keys import uniform
from prefed.models.config import (
    BASIS,
    IDEAL,
    LATENT,
    MIXTURE,
    POSTERIOR,
    PROTOTYPES,
    TASTE_MAP,
    VARIATIONAL,
    ModelConfig,
)
from prefed.models.families import Family, trunk_of
from prefed.models.fused_lora import fuse_lora
from prefed.models.pretrained import head_width

EXAMPLES = "examples"
"""Part with the number of examples before a prompt."""
EXAMPLE_COUNT = f"{EXAMPLES}/count"
WEIGHTS = "weights"
"""Part with all weights of the model: nothing is frozen, and there is no LoRA."""


@dataclass
class PartContext:
    """Input of part builders: the model that gets a part, and its settings.

    Attributes:
        causal: Hugging Face model that contains PEFT's layers.
    """

    causal: Any
    family: Family | None
    config: ModelConfig
    key: Key
    needs: frozenset[str]

    @property
    def final_norm(self) -> Any:
        """The norm after the last block.

        Raises:
            ValueError: the model's family is unknown.
        """
        if self.family is None:
            kind = self.causal.config.model_type
            raise ValueError(f"the final norm of model type {kind!r} is unknown")
        return getattr(trunk_of(self.causal), self.family.final_norm)


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor of a part.

    Attributes:
        place: puts a parameter, a view of the backbone's flat buffer, into the model. By default the
            parameter is only in the backbone's ``parameters``.
    """

    entry: Entry
    start: torch.Tensor
    place: Callable[[nn.Parameter], None] = lambda parameter: None


def lora_layers(causal: Any) -> Iterator[tuple[str, int | None, Any]]:
    """Yield ``<block>/<module>``, block and PEFT layer of every adapted module, in the model's order.

    If several stacks have modules with equal names, the full path replaces ``<module>``.
    """
    found = []
    for path, module in causal.named_modules():
        if hasattr(module, "lora_A"):
            match = re.search(r"\.(\d+)\.(.+)$", path)
            block, name = (int(match[1]), match[2]) if match else (None, path)
            found.append(("-" if block is None else str(block), name, path, block, module))
    taken = Counter((label, name) for label, name, *_ in found)
    for label, name, path, block, module in found:
        yield f"{label}/{name if taken[label, name] == 1 else path}", block, module


def _set(holder: Any, name: str) -> Callable[[nn.Parameter], None]:
    return functools.partial(setattr, holder, name)


class _Copied(nn.Module):
    """Copies a weight to a device, differentiably."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.device)


def _set_in_trunk(holder: Any, name: str) -> Callable[[nn.Parameter], None]:
    """Place a parameter in a module that may be on another device, and then read it through a copy."""
    device = getattr(holder, name).device

    def place(parameter: nn.Parameter) -> None:
        setattr(holder, name, parameter)
        if parameter.device != device:
            parametrize.register_parametrization(holder, name, _Copied(device), unsafe=True)

    return place


def _lora(context: PartContext) -> Iterator[ParameterSpec]:
    """Factors A, from one draw shared by all clients, and B = 0."""
    for stem, block, layer in lora_layers(context.causal):
        for factor in ("A", "B"):
            holder = getattr(layer, f"lora_{factor}")["default"]
            shape = tuple(holder.weight.shape)
            name = f"lora/{stem}/{factor}"
            start = torch.zeros(shape)
            if factor == "A":
                start = uniform(context.key.at("lora", name), shape, shape[1])
            place = _set_in_trunk(holder, "weight")
            yield ParameterSpec(Entry(name, shape, "lora", block, factor), start, place)


def _weights(context: PartContext) -> Iterator[ParameterSpec]:
    """Every weight with its pretrained value. Weights that several modules share appear once."""
    holders: dict[nn.Parameter, list[Callable[[nn.Parameter], None]]] = {}
    for _, module in context.causal.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            holders.setdefault(weight, []).append(_set(module, name))
    for path, weight in context.causal.named_parameters():

        def place(
            parameter: nn.Parameter, places: list[Callable[[nn.Parameter], None]] = holders[weight]
        ) -> None:
            for into in places:
                into(parameter)

        match = re.search(r"\.(\d+)\.", path)
        entry = Entry(f"{WEIGHTS}/{path}", tuple(weight.shape), WEIGHTS, int(match[1]) if match else None)
        yield ParameterSpec(entry, weight.detach().float(), place)


class _Personal:
    """Personal branch of a LoRA layer, and the gate logit of its block."""

    def __init__(self, factors: bool) -> None:
        self.factors = factors
        self.a = self.b = self.gate = nn.Parameter(torch.zeros(1), requires_grad=False)


def _personal_lora(context: PartContext) -> Iterator[ParameterSpec]:
    """A second LoRA; B ~ N(0, 0.01²), because the gate has no task gradient at B = 0."""
    for stem, block, layer in lora_layers(context.causal):
        layer.personal = _Personal("factors" in context.needs)
        fuse_lora(layer)
        for factor in ("A", "B"):
            shape = tuple(getattr(layer, f"lora_{factor}")["default"].weight.shape)
            name = f"personal_lora/{stem}/{factor}"
            key = context.key.at("personal_lora", name)
            if factor == "A":
                start = uniform(key, shape, shape[1])
            else:
                start = 0.01 * torch.randn(shape, generator=key.torch())
            entry = Entry(name, shape, "personal_lora", block, factor)
            yield ParameterSpec(entry, start, _set(layer.personal, factor.lower()))


def _gate(context: PartContext) -> Iterator[ParameterSpec]:
    """One logit a per block, initially 0: m = sigmoid(a) = ½."""
    by_block: dict[int | None, list[Any]] = {}
    for _, block, layer in lora_layers(context.causal):
        by_block.setdefault(block, []).append(layer.personal)
    for block, branches in by_block.items():

        def place(parameter: nn.Parameter, branches: list[Any] = branches) -> None:
            for branch in branches:
                branch.gate = parameter

        name = f"gate/{'-' if block is None else block}"
        yield ParameterSpec(Entry(name, (1,), "gate", block), torch.zeros(1), place)


class FinalNorm:
    """Forward of the final norm, or of the bottleneck M(z) = Norm(z + Decode(Dropout(GELU(Encode z)))).

    FedPDPO (arXiv:2603.19741), section 4. With ``bypass`` it returns hidden states unchanged.

    Args:
        dtype: dtype of the result; ``None`` for that of the hidden states.
    """

    def __init__(self, norm: Any, dtype: torch.dtype | None = None) -> None:
        self.norm, self.original, self.bypass, self.dtype = norm, norm.forward, False, dtype
        self.dropout = nn.Dropout(0.0).eval()
        self.encode: nn.Linear | None = None
        self.decode: nn.Linear | None = None
        norm.forward = self

    def __call__(self, z: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map ``[..., d]`` hidden states before the final norm to ``[..., d]`` after it.

        Further arguments, such as a gate, are passed to the norm.
        """
        if self.bypass:
            return z
        dtype = z.dtype
        if (own := next(self.norm.parameters(), None)) is not None:
            z = z.to(own.device)
        if self.encode is not None and self.decode is not None:
            w, b = self.encode.weight.to(dtype), self.encode.bias.to(dtype)
            inner = self.dropout(F.gelu(F.linear(z, w, b)))
            z = z + F.linear(inner, self.decode.weight.to(dtype), self.decode.bias.to(dtype))
        if own is not None:
            z = z.to(own.dtype)
        result: torch.Tensor = self.original(z, *args, **kwargs)
        return result.to(self.dtype or dtype)


def _bottleneck(context: PartContext) -> Iterator[ParameterSpec]:
    """Encode, Decode = 0, and a copy of the final norm's parameters, which replaces them."""
    norm, settings = context.final_norm, context.config.bottleneck
    final: FinalNorm = norm.forward
    width, dim = settings.width, head_width(context.causal)
    final.encode, final.decode = nn.Linear(dim, width), nn.Linear(width, dim)
    final.dropout = nn.Dropout(settings.dropout).eval()
    key = context.key.at("bottleneck")
    starts = {
        "encode/weight": (uniform(key.at("weight"), (width, dim), dim), final.encode, "weight"),
        "encode/bias": (uniform(key.at("bias"), (width,), dim), final.encode, "bias"),
        "decode/weight": (torch.zeros(dim, width), final.decode, "weight"),
        "decode/bias": (torch.zeros(dim), final.decode, "bias"),
    }
    for name, parameter in norm.named_parameters():
        starts[f"norm/{name}"] = (parameter.detach().float().clone(), norm, name)
    for name, (start, holder, attribute) in starts.items():
        entry = Entry(f"bottleneck/{name}", tuple(start.shape), "bottleneck")
        yield ParameterSpec(entry, start, _set(holder, attribute))


def _linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def _head(context: PartContext) -> Iterator[ParameterSpec]:
    """A copy of the LM head, untied from the input embeddings."""
    head = context.causal.get_output_embeddings()
    if hasattr(head, "lora_A"):
        raise ValueError("[model.lora] targets contains the head, which this method trains fully; remove it")
    start = head.weight.detach()
    if head.weight.dtype != torch.float32:
        head.forward = functools.partial(_linear, head)
    yield ParameterSpec(Entry("head/weight", tuple(start.shape), "head"), start, _set(head, "weight"))


class RewardHead(nn.Module):
    """h2: mean over tokens → Linear → dropout → tanh → Linear 1 (FedPDPO, arXiv:2603.19741, section 4)."""

    def __init__(self, dim: int, width: int, dropout: float) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(dim, width), nn.Linear(width, 1)
        self.dropout = nn.Dropout(dropout)
        self.eval()

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map ``[n, d]`` mean hidden states to ``[n]`` scores."""
        scores: torch.Tensor = self.out(torch.tanh(self.dropout(self.hidden(pooled.float()))))[:, 0]
        return scores


def _reward(context: PartContext) -> Iterator[ParameterSpec]:
    """Both layers of the reward head, stored as the non-module attribute ``prefed_reward`` of the model."""
    settings, dim = context.config.reward, head_width(context.causal)
    head = RewardHead(dim, settings.width, settings.dropout)
    object.__setattr__(context.causal, "prefed_reward", head)
    for path, parameter in list(head.named_parameters()):
        layer, name = path.split(".")
        fan_in = dim if layer == "hidden" else settings.width
        start = uniform(context.key.at("reward", path), tuple(parameter.shape), fan_in)
        entry = Entry(f"reward/{layer}/{name}", tuple(parameter.shape), "reward")
        yield ParameterSpec(entry, start, _set(getattr(head, layer), name))


def _value(context: PartContext) -> Iterator[ParameterSpec]:
    """A linear critic for PPO, initially zero, which PPO reads from the backbone's parameters."""
    dim = head_width(context.causal)
    yield ParameterSpec(Entry("value/weight", (1, dim), "value"), torch.zeros(1, dim))
    yield ParameterSpec(Entry("value/bias", (1,), "value"), torch.zeros(1))


def _norm(context: PartContext) -> Iterator[ParameterSpec]:
    """The affine parameters of every norm, with their pretrained values (FedBN, arXiv:2102.07623)."""
    for path, module in context.causal.base_model.named_modules():
        own = list(module.named_parameters(recurse=False))
        if "norm" not in type(module).__name__.lower() or not own:
            continue
        match = re.search(r"\.?(\d+)\.", path)
        if own[0][1].dtype != torch.float32 and not isinstance(module.forward, FinalNorm):
            # Mamba 2 casts the input of a norm to the weight's dtype, which is the part's, not the model's.
            FinalNorm(module, own[0][1].dtype)
        for name, parameter in own:
            start = parameter.detach().float().clone()
            entry = Entry(f"norm/{path}/{name}", tuple(start.shape), "norm", int(match[1]) if match else None)
            yield ParameterSpec(entry, start, _set_in_trunk(module, name))


def _residual(context: PartContext) -> Iterator[ParameterSpec]:
    """A dense correction of every adapted weight, initially zero (FedEx-LoRA, arXiv:2410.09432)."""
    layers = [layer for _, _, layer in lora_layers(context.causal)]
    shared = [context.causal.get_input_embeddings(), *layers]
    if len({id(module.weight) for module in shared}) < len(shared):
        raise ValueError(
            "[model.lora] targets contains modules that share a weight with each other or with the input "
            "embeddings, which the merge rule would change for both; remove them"
        )
    for stem, block, layer in lora_layers(context.causal):
        shape = (layer.out_features, layer.in_features)
        entry = Entry(f"residual/{stem}/W", shape, "residual", block)
        yield ParameterSpec(entry, torch.zeros(shape))


def _check_layer(context: PartContext) -> int:
    """Return the width of the hidden states that represent responses; raise ``ValueError`` without them."""
    settings, width = context.config.variational, head_width(context.causal)
    text = context.causal.config.get_text_config()
    if settings.layer is not None and (settings.layer >= text.num_hidden_layers or text.hidden_size != width):
        raise ValueError(
            f"[model.variational] layer = {settings.layer}: the model has {text.num_hidden_layers} blocks of "
            f"width {text.hidden_size}, and its head reads states of width {width}; choose a block before "
            "the last, or remove the key, which is necessary if the widths differ"
        )
    return width


def _taste(part: str, context: PartContext) -> Iterator[ParameterSpec]:
    """A part of the variational selector, which reads it from the backbone's parameters."""
    from prefed.models.tastes import VariationalSelector

    settings, width = context.config.variational, _check_layer(context)
    selector = VariationalSelector(settings, width)
    for name, start in selector.starts(context.key, capped="cap" in context.needs)[part].items():
        yield ParameterSpec(Entry(name, tuple(start.shape), part), start)


def _examples(context: PartContext) -> Iterator[ParameterSpec]:
    """The number of examples before a prompt, initially 0; see :mod:`prefed.data.examples`."""
    yield ParameterSpec(Entry(EXAMPLE_COUNT, (1,), EXAMPLES), torch.zeros(1))


def _mixture(part: str, context: PartContext) -> Iterator[ParameterSpec]:
    """A part of rewards that clients mix, which are computed from the backbone's parameters."""
    from prefed.models.mixed_rewards import starts

    tensors = starts(part, context.config.mixture, _check_layer(context), context.key)
    for name, start in tensors.items():
        yield ParameterSpec(Entry(name, tuple(start.shape), part), start)


def _taste_map(context: PartContext) -> Iterator[ParameterSpec]:
    """W ~ N(0, 1e-3²) and b = 0, stored as the non-module attribute ``prefed_taste_map`` of the model."""
    from prefed.models.tastes import START, TasteMap

    embeddings = context.causal.get_input_embeddings()
    added = TasteMap(embeddings)
    object.__setattr__(context.causal, "prefed_taste_map", added)
    dim, width = embeddings.weight.shape[1], context.config.variational.latent
    name = f"{TASTE_MAP}/weight"
    start = START * torch.randn((dim, width), generator=context.key.at(TASTE_MAP, name).torch())
    yield ParameterSpec(Entry(name, (dim, width), TASTE_MAP), start, _set(added, "weight"))
    bias = Entry(f"{TASTE_MAP}/bias", (dim,), TASTE_MAP)
    yield ParameterSpec(bias, torch.zeros(dim), _set(added, "bias"))


PART_BUILDERS: dict[str, Callable[[PartContext], Iterator[ParameterSpec]]] = {
    WEIGHTS: _weights,
    "lora": _lora,
    "residual": _residual,
    "personal_lora": _personal_lora,
    "gate": _gate,
    "norm": _norm,
    "bottleneck": _bottleneck,
    "head": _head,
    "reward": _reward,
    "value": _value,
    EXAMPLES: _examples,
    TASTE_MAP: _taste_map,
    **{part: functools.partial(_taste, part) for part in (VARIATIONAL, PROTOTYPES, POSTERIOR, LATENT)},
    **{part: functools.partial(_mixture, part) for part in (BASIS, IDEAL, MIXTURE)},
}
"""Part → its builder, in the order of a layout; parts inside the trunk come first."""
