"""Model families: the names of their modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from prefed.models.pretrained import text_config


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
        targets: modules that LoRA adapts by default; empty for :data:`~prefed.models.lora_targets.ALL`.
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
