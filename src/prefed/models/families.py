"""Model families: names of their modules, and the modules that LoRA adapts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prefed.core.text import did_you_mean, listed
from prefed.models.config import ModelConfig
from prefed.models.pretrained import ModelError, text_config


@dataclass(frozen=True)
class Family:
    """Module names of a model family.

    The logits are the output embedding applied to the output of the final norm. If the norms of a block are
    named, it computes ``h = h + attention(norm1(h)); h = h + mlp(norm2(h))`` and nothing else.

    Attributes:
        blocks: attribute of the trunk with the list of blocks.
        norm1: norm before attention; empty if only the block's own forward is used.
        norm2: norm before the feed-forward network.
        final_norm: attribute of the trunk with the norm after the last block.
        targets: modules that LoRA adapts by default; empty for :data:`ALL`.
        outputs: targets that write to the residual stream.
        shortens: the attention module supports attention functions that return fewer rows.
        static_cache: generation supports a cache of fixed size.
    """

    blocks: str
    final_norm: str
    norm1: str = ""
    attention: str = ""
    norm2: str = ""
    mlp: str = ""
    targets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    shortens: bool = False
    static_cache: bool = True


_LLAMA = Family(
    blocks="layers",
    norm1="input_layernorm",
    attention="self_attn",
    norm2="post_attention_layernorm",
    mlp="mlp",
    final_norm="norm",
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    outputs=("o_proj", "down_proj"),
)

FAMILIES = {
    "gpt2": Family(
        blocks="h",
        norm1="ln_1",
        attention="attn",
        norm2="ln_2",
        mlp="mlp",
        final_norm="ln_f",
        targets=("c_attn", "c_proj", "c_fc"),
        outputs=("c_proj",),
        shortens=True,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
}
"""Model type, as in a Hugging Face ``config.json`` → family."""


# Used only if packed input then computes the same; see :func:`prefed.train.packed.enable_packing`.
_LIKE_LLAMA = Family(blocks="layers", final_norm="norm", static_cache=False)
_PROJECTIONS = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"})
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def trunk_of(causal: Any) -> Any:
    """Return the language model without its head; in a model with image or audio towers, that part of it."""
    return causal.base_model if text_config(causal.config) is causal.config else causal.get_decoder()


def find_family(causal: Any) -> Family | None:
    """Return the family of a model: by its name, or by modules with the names of Llama's; else ``None``."""
    if causal.config.model_type in FAMILIES:
        return FAMILIES[causal.config.model_type]
    trunk, text = trunk_of(causal), text_config(causal.config)
    blocks = getattr(trunk, _LIKE_LLAMA.blocks, None)
    if not isinstance(blocks, nn.ModuleList) or not hasattr(trunk, _LIKE_LLAMA.final_norm):
        return None
    attention = [getattr(block, "self_attn", None) or nn.Module() for block in blocks]
    known = all(any(names <= set(own._modules) for names in _PROJECTIONS) for own in attention)
    types = set(getattr(text, "layer_types", None) or ()) <= _LAYER_TYPES
    one_stream = getattr(text, "altup_num_inputs", 1) == 1  # Gemma 3n has several residual streams
    supported = known and types and one_stream and getattr(causal, "_supports_sdpa", False)
    return _LIKE_LLAMA if supported else None


ALL = "all-linear"
"""Selects all linear modules except the head."""

_BYPASSED = {
    "falcon_h1": ("out_proj",),
    "falcon_mamba": ("dt_proj", "out_proj"),
    "jamba": ("dt_proj",),
    "longcat_flash": ("classifier",),
    "mamba": ("dt_proj", "out_proj"),
    "mamba2": ("out_proj",),
    "nemotron_h": ("out_proj",),
}
"""Model type → linear modules whose weight is read directly, so an adapter would have no effect."""

_log = logging.getLogger("prefed")


def with_lora(model: Any, config: ModelConfig, family: Family | None, outputs: bool) -> Any:
    """Add PEFT LoRA layers to linear modules of the language model.

    Experts in a single 3-D tensor stay frozen: PEFT's layers for them support neither dropout nor the
    products of FedSDG and FedEx-LoRA.

    Args:
        outputs: adapt output projections only, if the family is known.

    Raises:
        ModelError: a target is not a linear module, or PEFT cannot adapt it.
    """
    from peft import LoraConfig, get_peft_model

    names = config.lora.targets or [ALL]
    if config.lora.targets is None and family is not None and family.targets:
        names = list(family.outputs if outputs else family.targets)
    linear = _linear_modules(model)
    try:
        targets = _find(model, linear, names)
    except ValueError as error:
        raise ModelError(f"[model.lora] targets = {names!r}: {error}") from error
    _check_rank(config, {path: linear[path] for path in targets})
    adapter = LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=_short(model, targets),
        fan_in_fan_out=any(not isinstance(linear[path], nn.Linear) for path in targets),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapter, autocast_adapter_dtype=False)


def _linear_modules(model: Any) -> dict[str, Any]:
    """Return path → linear module of the language model, without image or audio towers."""
    from transformers.pytorch_utils import Conv1D

    inside = {id(module) for module in model.modules()}
    if text_config(model.config) is not model.config:
        inside = {id(module) for module in model.get_decoder().modules()} | {
            id(model.get_output_embeddings())
        }
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and id(module) in inside and not _is_special(module)
    }


def _is_special(module: Any) -> bool:
    """Return whether a linear module has its own forward, such as a router."""
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and kind.__name__ != "FalconLinear"


def _find(model: Any, linear: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return the paths of the modules that ``names`` select, in the model's order."""
    known = sorted({path.rpartition(".")[2] for path in linear})
    barred, head = _barred(model, linear), model.get_output_embeddings()
    found: set[str] = set()
    for name in names:
        if name == ALL:
            found |= {p for p, module in linear.items() if module is not head} - barred
            continue
        matches = {path for path in linear if f".{path}".endswith(f".{name}")}
        if not matches:
            raise ValueError(
                f"the model has no linear module {name!r}{did_you_mean(name, known)}; it has "
                f"{listed(known, str, most=20)}; {ALL!r} selects all except the head"
            )
        if matches & barred:
            raise ValueError(
                f"PEFT cannot adapt {name!r} in models of type {model.config.model_type!r}; remove it, or "
                f"use {ALL!r} for all modules that can be adapted"
            )
        found |= matches
    if not found:
        raise ValueError("the model has no linear module that a LoRA can adapt")
    return [path for path in linear if path in found]


def _barred(model: Any, paths: Collection[str]) -> set[str]:
    """Return the modules that PEFT rejects, or whose adapter it could not load again.

    PEFT interprets some names as those of older checkpoints with experts in one tensor, or renames them.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers,
        convert_peft_config_for_transformers,
    )

    keys = {path: f"base_model.model.{path}.lora_A.weight" for path in paths}
    found = convert_peft_adapter_state_dict_for_transformers(
        model, LoraConfig(), {key: torch.zeros(1, 1) for key in keys.values()}
    )
    barred = {path for path, key in keys.items() if key not in found}
    bypassed = _BYPASSED.get(model.config.model_type, ())
    barred |= {path for path in paths if path.rpartition(".")[2] in bypassed}
    for path in paths:
        config = LoraConfig(target_modules=[path])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:
            barred.add(path)
        if path not in config.target_modules:
            barred.add(path)
    return barred


def _short(model: Any, targets: list[str]) -> list[str]:
    """Return the last components of ``targets`` if they are unambiguous, else the full paths."""
    names = sorted({path.rpartition(".")[2] for path in targets})
    same = {path for path, _ in model.named_modules() if path.rpartition(".")[2] in names}
    return names if same == set(targets) else targets


def _check_rank(config: ModelConfig, targets: dict[str, Any]) -> None:
    """Warn about modules with fewer dimensions than the rank."""
    narrow = {
        f"{path.rpartition('.')[2]} ({min(module.weight.shape)})"
        for path, module in targets.items()
        if config.quantize is None and min(module.weight.shape) < config.lora.rank
    }
    if narrow:
        _log.warning(
            "[model.lora] rank = %d exceeds the smaller dimension of %s: the additional ranks add parameters "
            "to train and send, but no capacity",
            config.lora.rank,
            listed(sorted(narrow), str),
        )
