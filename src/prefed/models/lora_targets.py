"""Add LoRA to a model: which linear modules it adapts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from prefed.core.text import did_you_mean, listed
from prefed.models.config import ModelConfig
from prefed.models.families import Family
from prefed.models.pretrained import ModelError, text_config

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
