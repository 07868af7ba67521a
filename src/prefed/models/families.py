"""Model families: the names of their modules, and the modules that LoRA adapts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """The names inside one family's decoder block.

    A block of a listed family computes ``h = h + attention(norm1(h)); h = h + mlp(norm2(h))`` and
    nothing else. The family's logits are the output embedding applied to the final norm's output.

    Attributes:
        blocks: attribute of the trunk that holds the list of blocks.
        norm1: the norm before attention.
        norm2: the norm before the feed-forward network.
        final_norm: attribute of the trunk that holds the norm after the last block.
        targets: modules that LoRA adapts by default.
        outputs: the targets that write to the residual stream.
        shortens: the attention module accepts fewer rows from its attention function than it passed in.
    """

    blocks: str
    norm1: str
    attention: str
    norm2: str
    mlp: str
    final_norm: str
    targets: tuple[str, ...]
    outputs: tuple[str, ...]
    shortens: bool = False


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
"""Model type, as in a Hugging Face ``config.json``, → its family."""
