"""What a model is loaded from, in which numbers its weights are kept, and where."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from prefed.core import hub
from prefed.models.config import ModelConfig, present_devices

_REASON = 400
"""Most characters of a library's message to repeat."""


class ModelError(ValueError):
    """A model cannot be loaded or adapted; the message names it and says what to do."""


def find_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the fastest one.

    Raises:
        ModelError: PyTorch finds none on this machine.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device in available if available[device])
    if not available[name]:
        raise ModelError(
            f"[model] device = {name!r}: PyTorch finds none on this machine, which has {present_devices()}; "
            "use auto or cpu"
        )
    return torch.device(name)


def load_pretrained(kind: Any, key: str, name: str, what: str, **options: Any) -> Any:
    """``kind.from_pretrained(name, **options)``: from a folder, the hub, or the hub's local cache.

    Args:
        kind: one of transformers' ``Auto`` classes.
        key: the setting that holds the name, for messages.
        name: a folder or a hub name.
        what: the kind of thing to load in words, for messages.

    Raises:
        ModelError: nothing of that name can be loaded.
    """
    folder, needed = Path(name), "give one with config.json, weights and tokenizer"
    absent = _absent(folder) if folder.is_dir() else []
    empty = folder.is_dir() and not any(folder.iterdir())
    what_lacks = "is empty" if empty else f"has no {', no '.join(absent)}"
    lacks = ModelError(f"{key} = {name!r}: the folder {what_lacks}; {needed}")
    if folder.is_dir():
        # Transformers would print what it looks for, or make a tokenizer without a vocabulary.
        if ("tokenizer" if what == "tokenizer" else "config.json") in absent:
            raise lacks
    elif folder.exists():
        raise ModelError(f"{key} = {name!r}: this is a file; give a folder")
    # The hub has no such names, so a folder is meant. The hub client's message would mislead.
    elif name[:1] in ("/", ".", "~") or name.count("/") > 1:
        raise ModelError(f"{key} = {name!r}: no such folder; {needed}")
    with nullcontext(True) if folder.is_dir() else hub.in_reach() as answers:
        try:
            # Otherwise transformers asks on the terminal, and takes a line of standard input for the answer.
            loaded = kind.from_pretrained(name, trust_remote_code=False, **options)
            if _is_empty(loaded):
                raise ValueError("its tokenizer has no vocabulary but special tokens")
            return loaded
        except Exception as error:  # a folder from elsewhere may hold anything
            if not answers:
                raise ModelError(
                    f"{key} = {name!r}: the Hugging Face hub does not answer (or HF_HUB_OFFLINE is set), "
                    f"its local cache holds no {what} of that name, and there is no such folder; give one "
                    "with config.json, weights and tokenizer, or run once where there is a network"
                ) from error
            reason = brief(error)
            if "trust_remote_code" in str(error):
                reason = "it comes with code of its own, and prefed runs none that comes with a model"
            elif "weights_only" in str(error):
                reason = "its weights are no plain tensors, and may hold code; give them as safetensors"
            elif "weights" in absent and what != "tokenizer":
                raise lacks from error
            elif "backend tokenizer" in reason:
                reason = "its tokenizer has no vocabulary: no tokenizer.json, and none of the older files"
            raise ModelError(
                f"{key} = {name!r}: no {what} could be loaded from there "
                f"(a folder with config.json, weights and tokenizer, or a hub name): {reason}"
            ) from error


def _is_empty(loaded: Any) -> bool:
    """Whether it is a tokenizer without a vocabulary: what transformers makes of a folder that has none."""
    words: dict[str, int] = getattr(loaded, "get_vocab", dict)()
    return bool(words) and not words.keys() - loaded.get_added_vocab().keys()


def _absent(folder: Path) -> list[str]:
    """What a folder with a model has and this one lacks."""
    files = {
        "config.json": ("config.json",),
        "weights": ("*.safetensors", "*.bin"),
        "tokenizer": ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json"),
    }
    return [what for what, names in files.items() if not any(any(folder.glob(name)) for name in names)]


def brief(error: Exception) -> str:
    """The first part of a library's message, on one line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:_REASON]


def load_causal(config: ModelConfig) -> Any:
    """The base model: its weights in ``dtype``, or those of its linear layers in 4 bits.

    The 4 bits are QLoRA's (arXiv:2305.14314, section 3): blocks of weights in ``quantize``, and their scales
    quantised again. A layer takes its weights to ``dtype`` before each product.

    Raises:
        ModelError: it cannot be loaded, the device has no such numbers, or bitsandbytes is not installed.
    """
    from transformers import AutoModelForCausalLM

    device, options = find_device(config.device), dict[str, Any]()
    check_dtype(config, device)
    if config.quantize is not None:
        options = _four_bits(config, device)
    return load_pretrained(
        AutoModelForCausalLM,
        "[model] name",
        config.name,
        "causal language model",
        revision=config.revision,
        dtype=getattr(torch, config.dtype),
        **options,
    )


def check_dtype(config: ModelConfig, device: torch.device) -> None:
    """Refuse float16 on a CPU.

    Raises:
        ModelError: that is asked for.
    """
    if config.dtype == "float16" and device.type == "cpu":
        raise ModelError(
            "[model] dtype = 'float16' is for GPUs, and the model is on the CPU: take bfloat16 or float32"
        )


def _four_bits(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """What ``from_pretrained`` needs for weights in 4 bits."""
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"[model] quantize = {config.quantize!r} needs the package bitsandbytes: "
            "pip install 'prefed[quantized]'"
        )
    from transformers import BitsAndBytesConfig

    scheme = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.quantize,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
        bnb_4bit_use_double_quant=True,
    )
    # Weights are quantised where they arrive, so they go to their device as they are read.
    place = torch.cuda.current_device() if device.type == "cuda" else device.type
    return {"quantization_config": scheme, "device_map": {"": place}}


def keep_four_bits(model: Any) -> None:
    """See that layers of 4 bits compute alike with and without gradients.

    On some CPUs such a layer repacks its weights at its first pass without gradients, for products in
    bfloat16. Scores would then not be those that training sees.
    """
    for module in model.modules():
        if hasattr(module, "quant_state"):
            module.training = True
