"""A frozen causal language model with the trainable tensors of a client."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from prefed.core import Key, Layout, Tensors
from prefed.core.tensors import Layered
from prefed.models.config import DECODER, TASTE_MAP, ModelConfig
from prefed.models.families import Family, find_family, trunk_of
from prefed.models.fused_lora import convert_together, fuse
from prefed.models.lora_targets import with_lora
from prefed.models.pretrained import (
    ModelError,
    check_dtype,
    check_kernels,
    check_language_model,
    check_vocabulary,
    find_device,
    head_width,
    keep_four_bits,
    load_causal,
    load_tokenizer,
    own_forward,
    rope_settings,
    text_config,
    with_dtype,
    with_kernels,
)
from prefed.models.trainable_parts import (
    PART_BUILDERS,
    WEIGHTS,
    FinalNorm,
    ParameterSpec,
    PartContext,
    RewardHead,
    lora_layers,
)

if TYPE_CHECKING:
    from prefed.models.tastes import TasteMap

_TRUNK_PARTS = frozenset({WEIGHTS, "lora", "residual", "personal_lora", "gate", "norm", TASTE_MAP})
"""Parts inside the trunk. While none of them trains, the trunk's output for a pair is constant."""

_FLAGS = frozenset({"outputs", "factors", "cap"})
"""Flags in ``needs``: LoRA on output projections only; FedSDG's factor space; a cap on log σ²."""

_PRODUCTS = frozenset({"residual", "personal_lora"})
"""Parts that require unquantised weights of linear layers."""


@dataclass
class Backbone:
    """A frozen model, one per process. Clients are vectors that are swapped in and out.

    Attributes:
        model: Hugging Face causal language model, wrapped by PEFT unless all weights train.
        layout: names and shapes of the trainable tensors, ``lora/<block>/<module>/<A|B>`` and so on.
        initial: initial tensors of every client: A from one seeded draw, B zero, weights as loaded.
        reference: tensors of the base model: zero for every LoRA B, personal LoRA, taste map and decoder
            of a variational selector. A shared LoRA applied over them acts alone.
        scaling: alpha / rank.
        family: the model's family; ``None`` if unknown.
        device: device of the head, of what follows it, and of the trainable tensors. Blocks of a model on
            several devices get copies of their tensors in each pass.
        parameters: the trainable tensors inside the model, views of ``flat`` with gradients in ``grad``.
        final: forward of the final norm; ``None`` if the family is unknown.
        logit_factor: factor of the logits that the model applies to its head's output, on the packed path.
        loss_scale: loss scale for gradients (see :mod:`~prefed.train.optimizer_steps`); 1 except in float16.
        needs: parts and flags that the model was created with.
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
    logit_factor: float = 1.0
    loss_scale: float = 1.0
    _bases: dict[str, tuple[torch.Tensor, torch.Tensor, bool]] = field(default_factory=dict)

    @cached_property
    def causal(self) -> Any:
        """The Hugging Face model itself."""
        return self.model if WEIGHTS in self.needs else self.model.get_base_model()

    @cached_property
    def trunk(self) -> Any:
        """The causal language model without its head."""
        return self.causal.base_model if self.family is None else trunk_of(self.causal)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the frozen weights."""
        dtype: torch.dtype = self.causal.dtype
        return dtype

    @property
    def window(self) -> int | None:
        """Maximum sequence length; ``None`` if the configuration does not specify one.

        With LongRoPE this is the original context, see :attr:`stretches`.
        """
        known = [getattr(self.text_config, "max_position_embeddings", None)]
        long = [rope for rope in rope_settings(self.text_config) if rope["rope_type"] == "longrope"]
        known += [rope.get("original_max_position_embeddings") for rope in long]
        return min((length for length in known if length is not None), default=None)

    @property
    def stretches(self) -> bool:
        """Whether sequences longer than :attr:`window` are processed like shorter ones.

        This requires rotary positions with fixed frequencies. With LongRoPE or dynamic NTK scaling the
        longest sequence of a batch changes all positions, so policy and reference could be different models.
        """
        kinds = [rope["rope_type"] for rope in rope_settings(self.text_config)]
        return bool(kinds) and not any(kind == "longrope" or "dynamic" in kind for kind in kinds)

    @cached_property
    def text_config(self) -> Any:
        """Configuration of the language model, which may be one part of a larger model."""
        return text_config(self.causal.config)

    @property
    def width(self) -> int:
        """Width of the hidden states that the head reads."""
        return head_width(self.causal)

    def for_head(self, states: torch.Tensor) -> torch.Tensor:
        """Return states whose products with the head's weight are the model's logits."""
        return states if self.logit_factor == 1 else states * self.logit_factor

    def load(self, tensors: Tensors) -> None:
        """Copy a client's tensors (full layout) into the model.

        Raises:
            ValueError: ``tensors`` has another layout.
        """
        if tensors.layout is not self.layout and tensors.layout.names != self.layout.names:
            raise ValueError("tensors must have the model's layout")
        tensors.copy_to(self.flat)
        for name, (weight, original, transposed) in self._bases.items():
            residual = self.parameters[name]
            weight.data.copy_(original + (residual.t() if transposed else residual).to(original))

    @contextmanager
    def without_idle_lora(self) -> Iterator[None]:
        """Within the block, skip fused LoRA layers if all B are zero, as in the base model."""
        b = [self.parameters[entry.name] for entry in self.layout.entries if entry.factor == "B"]
        idle = not any(bool(factor.any()) for factor in b)
        for layer in self._adapted:
            layer.idle = idle
        try:
            yield
        finally:
            for layer in self._adapted:
                layer.idle = False

    def extract(self) -> Tensors:
        """Return a copy of the tensors in the model, on the CPU."""
        return Tensors(self.layout, self.flat.detach().to("cpu", copy=True))

    def train_only(self, names: Iterable[str]) -> None:
        """Enable gradients for ``names`` only."""
        trained = set(names)
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name in trained)

    @cached_property
    def _adapted(self) -> list[Any]:
        """PEFT layers, cached: searching all modules takes longer than a step over kept features."""
        return [layer for _, _, layer in lora_layers(self.causal)]

    @property
    def reward(self) -> RewardHead | None:
        """The reward head, if the model has one."""
        return getattr(self.causal, "prefed_reward", None)

    @property
    def taste_map(self) -> TasteMap | None:
        """The map from a taste to the input embeddings, if the model has one."""
        return getattr(self.causal, "prefed_taste_map", None)

    def tasting(
        self, tastes: torch.Tensor | None, lengths: Sequence[int] | None = None
    ) -> AbstractContextManager[None]:
        """Apply tastes in forward passes within the block; see :func:`prefed.models.tastes.tasting`."""
        if tastes is None:
            return nullcontext()
        from prefed.models.tastes import tasting

        return tasting(self.taste_map, tastes, lengths)

    def trains_trunk(self, names: Iterable[str]) -> bool:
        """Return whether any of ``names`` is inside the trunk."""
        return any(self.layout[name].part in _TRUNK_PARTS for name in names)

    def dropout(self, *, trunk: bool = False, top: bool = False) -> None:
        """Switch dropout of adapters in the trunk, and of bottleneck and reward head on top.

        Dropout of the frozen model stays off.
        """
        for layer in self._adapted:
            layer.lora_dropout.train(trunk)
        if self.final is not None:
            self.final.dropout.train(top)
        if self.reward is not None:
            self.reward.train(top)


def load_backbone(config: ModelConfig, key: Key, needs: frozenset[str] = frozenset({"lora"})) -> Backbone:
    """Load a causal language model and its tokenizer, and make a backbone.

    Args:
        needs: parts that the method and the merge rule need; see
            :data:`prefed.models.trainable_parts.PART_BUILDERS`.

    Raises:
        ModelError: the model cannot be loaded, has no module to adapt, or does not support a part.
    """
    config = with_kernels(with_dtype(config))
    tokenizer = load_tokenizer(config)
    return make_backbone(load_causal(config), tokenizer, config, key, needs)


def make_backbone(
    model: Any, tokenizer: Any, config: ModelConfig, key: Key, needs: frozenset[str] = frozenset({"lora"})
) -> Backbone:
    """Freeze ``model``, adapt it with PEFT and gather its trainable tensors in one buffer.

    With the part ``weights`` there is no adapter, and the buffer contains all weights.

    Args:
        model: Hugging Face causal language model, modified in place.
        tokenizer: its tokenizer; ``None`` if no text is read.
        config: settings of LoRA, device and fused modules.
        needs: see :func:`load_backbone`.

    Raises:
        ModelError: the model has no module to adapt, or does not support a part, its dtype, its kernels or
            ``checkpointing``.
    """
    device = find_device(config.device)
    if tokenizer is not None:
        check_vocabulary(model, tokenizer, config.name)
    wrapped = adapted(model, config, needs)
    check_dtype(config, device)
    check_kernels(config, device)
    if device.type == "cuda":
        # No TF32: an implicit reward is a small difference of large sums, and bfloat16 is there for speed.
        torch.set_float32_matmul_precision("highest")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        device = _join_top(model)
    else:
        wrapped.to(device)
    wrapped.eval()
    keep_four_bits(wrapped)
    check_language_model(wrapped, config.name)
    return with_parts(wrapped, tokenizer, config, key, needs, device)


def _join_top(causal: Any) -> torch.device:
    """Move the final norm of a model on several devices to the device of its head, and return that."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    device: torch.device = causal.get_output_embeddings().weight.device
    family = find_family(causal)
    if family is not None:
        add_hook_to_module(getattr(causal.base_model, family.final_norm), AlignDevicesHook(device))
    return device


def adapted(model: Any, config: ModelConfig, needs: frozenset[str]) -> Any:
    """Freeze ``model``, and adapt it with PEFT unless all weights train."""
    unknown = needs - PART_BUILDERS.keys() - _FLAGS
    if unknown:
        known = ", ".join(PART_BUILDERS)
        raise ModelError(f"unknown parts of a model: {', '.join(sorted(unknown))} (parts: {known})")
    if config.quantize is not None and (parts := sorted(needs & _PRODUCTS)):
        raise ModelError(
            f"[model] quantize = {config.quantize!r} is not possible, because the method or the merge rule "
            f"needs full weights (for {' and '.join(parts)}); remove quantize or use another method"
        )
    family = find_family(model)
    model.requires_grad_(False)
    wrapped: Any = model if WEIGHTS in needs else with_lora(model, config, family, "outputs" in needs)
    return wrapped


def with_parts(
    wrapped: Any, tokenizer: Any, config: ModelConfig, key: Key, needs: frozenset[str], device: torch.device
) -> Backbone:
    """Add the parts of :func:`make_backbone` to the model of :func:`adapted`."""
    if config.fast:
        fuse(wrapped)
    causal = wrapped if WEIGHTS in needs else wrapped.get_base_model()
    if config.kernels == "liger":
        from prefed.models.liger_kernels import use_liger

        use_liger(causal, config.name)
    if config.checkpointing:
        recompute_blocks(causal)
    family = find_family(causal)
    final = None if family is None else FinalNorm(getattr(trunk_of(causal), family.final_norm))
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
    if config.fast and "lora" in needs and "personal_lora" not in needs and causal.dtype.itemsize == 2:
        fused = [(stem, layer) for stem, _, layer in lora_layers(causal) if "forward" in vars(layer)]
        factors = [parameters[f"lora/{stem}/{factor}"] for stem, _ in fused for factor in "AB"]
        convert_together(trunk_of(causal), [layer for _, layer in fused], factors, causal.dtype)
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
    # ``initial`` and ``reference`` share memory except for these tensors.
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
    """Return the initial values on the CPU. A head on the CPU is shared with the frozen model."""
    starts = {spec.entry.name: spec.start.cpu() for spec in specs}
    heads = {spec.entry.name: starts[spec.entry.name] for spec in specs if spec.entry.part == "head"}
    small = Tensors.gather(layout.select(starts.keys() - heads.keys()), starts)
    return Layered(layout, small, heads) if heads else small


def recompute_blocks(causal: Any) -> None:
    """Enable gradient checkpointing for every block (Chen et al. 2016, arXiv:1604.06174).

    The second pass has the same inputs, weights and random state, so gradients are bit-identical. Without
    gradients a block runs once.

    Raises:
        ModelError: the blocks of the model are unknown.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise ModelError(
            f"[model] checkpointing does not support model type {causal.config.model_type!r}; remove it and "
            "lower [engine] max_tokens"
        )
    for block in blocks:
        # Dropout is repeated from the random state of the device that the inputs are on.
        own = own_forward(block)
        setattr(block, own, functools.partial(_recomputed, getattr(block, own)))


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``forward``, with checkpointing if gradients are enabled."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def model_digest(backbone: Backbone, *, idle: bool = True) -> str:
    """Return SHA-256 over the architecture, a sample of each weight, and the initial adapter.

    Args:
        idle: whether an initial adapter counts whose B are all zero, which changes no output.
    """
    config = backbone.causal.config.to_dict()
    for where in ("_name_or_path", "transformers_version"):
        config.pop(where, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in backbone.causal.named_parameters():
        if ".lora_" in name or WEIGHTS in backbone.needs:
            continue  # part of ``initial``
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].to("cpu", torch.float32)
        name = name.replace(".parametrizations", "").removesuffix(".original")
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    b = [entry.name for entry in backbone.layout.entries if entry.factor == "B"]
    if idle or WEIGHTS in backbone.needs or any(bool(backbone.initial[name].any()) for name in b):
        digest.update(backbone.initial.flat.numpy().data)
    return digest.hexdigest()
