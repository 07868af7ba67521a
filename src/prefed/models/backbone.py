"""A frozen causal language model with the movable tensors of a client over it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from prefed.core import Key, Layout, Tensors
from prefed.core.tensors import Layered
from prefed.models.config import ModelConfig
from prefed.models.families import FAMILIES, Family, with_lora
from prefed.models.fused_lora import fuse
from prefed.models.parts import (
    PART_BUILDERS,
    WEIGHTS,
    FinalNorm,
    ParameterSpec,
    PartContext,
    RewardHead,
    lora_layers,
)
from prefed.models.pretrained import (
    ModelError,
    check_dtype,
    check_language_model,
    find_device,
    head_width,
    keep_four_bits,
    load_causal,
    load_pretrained,
    stretches,
    text_config,
    window,
)
from prefed.models.tastes import DECODER, TASTE_MAP, TasteMap

_TRUNK_PARTS = frozenset({WEIGHTS, "lora", "residual", "personal_lora", "gate", "norm", TASTE_MAP})
"""Parts inside the trunk; while none of them trains, the trunk's output for a pair does not change."""

_FLAGS = frozenset({"outputs", "factors", "cap"})
"""Needs that are no parts: LoRA on output projections only; FedSDG's factor space; a bound on log σ²."""

_PRODUCTS = frozenset({"residual", "personal_lora"})
"""Parts that need the weights of the linear layers as they are, not in 4 bits."""


@dataclass
class Backbone:
    """One frozen model per process; clients are vectors swapped in and out of it.

    Attributes:
        model: the PEFT-wrapped Hugging Face causal language model; with the part ``weights`` not wrapped.
        layout: names and shapes of the movable tensors, ``lora/<block>/<module>/<A|B>`` and so on.
        initial: the tensors every client starts from: A from one seeded draw, B zero, weights as loaded.
        reference: the tensors that make the untouched model: every B is zero, and a personal LoRA is zero
            throughout. So a shared LoRA put over them acts by itself, however the two branches join. A
            variational selector's decoder is zero, so it adds nothing to the base model's log-odds, and a
            taste map is zero, so it adds nothing at any taste.
        scaling: alpha / rank.
        family: the model's family; ``None`` if it is not known.
        parameters: the movable tensors inside the model, views of ``flat``, with gradients in ``grad``.
        final: the forward of the final norm; ``None`` if the family is not known.
        loss_scale: the factor of losses while their gradients are computed (see
            :mod:`~prefed.train.optimizer_steps`); 1 unless the frozen model is in float16.
        needs: the parts and flags that the model is made with.
    """

    model: Any
    tokenizer: Any
    layout: Layout
    initial: Tensors
    reference: Tensors
    scaling: float
    family: Family | None
    device: torch.device
    parameters: dict[str, nn.Parameter]
    flat: torch.Tensor
    grad: torch.Tensor
    config: ModelConfig
    needs: frozenset[str]
    final: FinalNorm | None = None
    loss_scale: float = 1.0
    _bases: dict[str, tuple[torch.Tensor, torch.Tensor, bool]] = field(default_factory=dict)

    @property
    def causal(self) -> Any:
        """The Hugging Face model itself."""
        return self.model if WEIGHTS in self.needs else self.model.get_base_model()

    @property
    def trunk(self) -> Any:
        """The causal language model without its head."""
        return self.causal.base_model

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the frozen weights."""
        dtype: torch.dtype = self.causal.dtype
        return dtype

    @property
    def window(self) -> int | None:
        """The most tokens of a sequence; ``None`` if the configuration does not say. See :func:`window`."""
        return window(self.causal.config)

    @property
    def stretches(self) -> bool:
        """Whether the model also takes sequences longer than its window."""
        return stretches(self.causal.config)

    @property
    def text_config(self) -> Any:
        """The configuration of the language model, which may be one of several parts of a model."""
        return text_config(self.causal.config)

    @property
    def width(self) -> int:
        """Numbers of a hidden state after the final norm, as the head reads it."""
        return head_width(self.causal)

    def load(self, tensors: Tensors) -> None:
        """Put a client's tensors (full layout) into the model: one copy of one vector.

        Raises:
            ValueError: ``tensors`` has another layout.
        """
        if tensors.layout is not self.layout and tensors.layout.names != self.layout.names:
            raise ValueError("the tensors do not have the model's layout")
        tensors.copy_to(self.flat)
        for name, (weight, original, transposed) in self._bases.items():
            residual = self.parameters[name]
            weight.data.copy_(original + (residual.t() if transposed else residual).to(original.dtype))

    def extract(self) -> Tensors:
        """A copy of the tensors in the model, on the CPU."""
        return Tensors(self.layout, self.flat.detach().to("cpu", copy=True))

    def train_only(self, names: Iterable[str]) -> None:
        """Let gradients flow to ``names`` only."""
        trained = set(names)
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name in trained)

    @cached_property
    def _adapted(self) -> list[Any]:
        """PEFT's layers; searching all modules takes longer than a step over kept features."""
        return [layer for _, _, layer in lora_layers(self.causal)]

    @property
    def reward(self) -> RewardHead | None:
        """The reward head, if the model has one."""
        return getattr(self.causal, "prefed_reward", None)

    @property
    def taste_map(self) -> TasteMap | None:
        """The map from a taste to the input embeddings, if the model has one."""
        return getattr(self.causal, "prefed_taste_map", None)

    def trains_trunk(self, names: Iterable[str]) -> bool:
        """Whether any of ``names`` lies inside the trunk."""
        return any(self.layout[name].part in _TRUNK_PARTS for name in names)

    def dropout(self, *, trunk: bool = False, top: bool = False) -> None:
        """Switch dropout of the adapters in the trunk, and of the bottleneck and the reward head on top.

        The frozen model's own dropout stays off.
        """
        for layer in self._adapted:
            layer.lora_dropout.train(trunk)
        if self.final is not None:
            self.final.dropout.train(top)
        if self.reward is not None:
            self.reward.train(top)


def load_backbone(config: ModelConfig, key: Key, needs: frozenset[str] = frozenset({"lora"})) -> Backbone:
    """Load a causal language model and its tokenizer, freeze it and put LoRA on it.

    Args:
        key: randomness of the LoRA's A factors.
        needs: parts that the method and the merge rule need; see
            :data:`prefed.models.parts.PART_BUILDERS`.

    Raises:
        ModelError: no model under that name, no module to adapt, or a part that the model cannot have.
    """
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(
        AutoTokenizer, "[model] name", config.name, "tokenizer", revision=config.revision
    )
    return make_backbone(load_causal(config), tokenizer, config, key, needs)


def make_backbone(
    model: Any,
    tokenizer: Any,
    config: ModelConfig,
    key: Key,
    needs: frozenset[str] = frozenset({"lora"}),
) -> Backbone:
    """Freeze ``model``, adapt it with PEFT and gather its movable tensors in one buffer.

    With the part ``weights`` there is no adapter, and every weight lies in the buffer.

    Args:
        model: a Hugging Face causal language model; it is changed in place.
        tokenizer: its tokenizer; ``None`` if no text is read.
        config: LoRA settings, device, and whether to use the fused modules.
        key: randomness of starting values.
        needs: as for :func:`load_backbone`.

    Raises:
        ModelError: none of the modules to adapt is in the model, or it cannot have a part, its dtype or
            ``checkpointing``.
    """
    unknown = needs - PART_BUILDERS.keys() - _FLAGS
    if unknown:
        raise ModelError(f"no such part of a model: {', '.join(sorted(unknown))}")
    if config.quantize is not None and (parts := sorted(needs & _PRODUCTS)):
        raise ModelError(
            f"[model] quantize = {config.quantize!r}: the method or the merge rule needs whole weights (for "
            f"{' and '.join(parts)}), not 4 bits of each: leave it out, or take another method"
        )
    family = FAMILIES.get(model.config.model_type)
    model.requires_grad_(False)
    wrapped: Any = model if WEIGHTS in needs else with_lora(model, config, family, "outputs" in needs)
    device = find_device(config.device)
    check_dtype(config, device)
    wrapped.to(device).eval()
    keep_four_bits(wrapped)
    check_language_model(wrapped, config.name)
    if config.fast:
        fuse(wrapped)
    causal = wrapped if WEIGHTS in needs else wrapped.get_base_model()
    if config.checkpointing:
        recompute_blocks(causal)
    final = None if family is None else FinalNorm(getattr(causal.base_model, family.final_norm))
    context = PartContext(causal, family, config, key, needs)
    try:
        specs = [spec for part, build in PART_BUILDERS.items() if part in needs for spec in build(context)]
    except ValueError as error:
        raise ModelError(f"[model] name = {config.name!r}: {error}") from error
    layout = Layout(tuple(spec.entry for spec in specs))
    initial, flat = _start(layout, specs), torch.empty(layout.size, device=device)
    initial.copy_to(flat)
    grad = torch.zeros(layout.size, device=device)
    parameters: dict[str, nn.Parameter] = {}
    for spec in specs:
        span = slice(*layout.span(spec.entry.name))
        parameter = nn.Parameter(flat[span].view(spec.entry.shape), requires_grad=False)
        parameter.grad = grad[span].view(spec.entry.shape)
        parameters[spec.entry.name] = parameter
        spec.place(parameter)
    bases = {}
    for stem, _, layer in lora_layers(causal):
        if f"residual/{stem}/W" in layout:
            weight, transposed = layer.base_layer.weight, not isinstance(layer.base_layer, nn.Linear)
            bases[f"residual/{stem}/W"] = (weight, weight.detach().clone(), transposed)
    silent = [
        entry.name
        for entry in layout.entries
        if entry.factor == "B" or entry.part in ("personal_lora", TASTE_MAP) or entry.name in DECODER
    ]
    # The two share all that is untouched as it starts.
    reference = Layered(layout, initial, Tensors.zeros(layout.select(silent))) if silent else initial
    return Backbone(
        model=wrapped,
        tokenizer=tokenizer,
        layout=layout,
        initial=initial,
        reference=reference,
        scaling=config.lora.alpha / config.lora.rank,
        family=family,
        device=device,
        parameters=parameters,
        flat=flat,
        grad=grad,
        final=final,
        config=config,
        needs=needs,
        _bases=bases,
    )


def _start(layout: Layout, specs: Sequence[ParameterSpec]) -> Tensors:
    """The starting values on the CPU. A head on the CPU is not copied: it is the frozen model's own."""
    starts = {spec.entry.name: spec.start.cpu() for spec in specs}
    heads = {spec.entry.name: starts[spec.entry.name] for spec in specs if spec.entry.part == "head"}
    small = Tensors.gather(layout.select(starts.keys() - heads.keys()), starts)
    return Layered(layout, small, heads) if heads else small


def recompute_blocks(causal: Any) -> None:
    """Gradient checkpointing: every block computes its inner values again in the backward pass.

    Of each block a step then holds only the input (Chen et al. 2016, arXiv:1604.06174). The second pass has
    the inputs, the weights and the random state of the first, so the gradients are bit-identical. Without
    gradients, as in an evaluation, a block runs once.

    Raises:
        ModelError: it is not known which modules are the blocks.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise ModelError(
            f"[model] checkpointing: it is not known which modules of a model of type "
            f"{causal.config.model_type!r} are its blocks: leave it out, and lower [engine] max_tokens"
        )
    for block in blocks:
        block.forward = functools.partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward``, whose inner values are not kept where a gradient will be taken."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def model_digest(backbone: Backbone) -> str:
    """SHA-256 over the architecture, a sample of every weight, and the start of the adapter."""
    config = backbone.causal.config.to_dict()
    for where in ("_name_or_path", "transformers_version"):
        config.pop(where, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in backbone.causal.named_parameters():
        if ".lora_" in name or WEIGHTS in backbone.needs:
            continue  # ``initial`` has it
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].to("cpu", torch.float32)
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    digest.update(backbone.initial.flat.numpy().data)
    return digest.hexdigest()
