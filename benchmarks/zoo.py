"""A tiny model of every family that transformers has for causal language modelling, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Model types, as in a ``config.json``."""

QUICK = (
    *("gpt2", "llama", "gemma", "qwen3"),
    *("opt", "bloom", "phi3", "gemma2", "falcon", "deepseek_v3"),
    *("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "laguna"),
    *("mamba", "rwkv", "recurrent_gemma", "gemma3", "hrm_text", "bert"),
)
"""Types that every run of the tests looks at: packed, plain, with experts, recurrent, with a vision tower,
with two stacks of blocks."""

LEFT_OUT = {
    "dots3_note": "its configuration needs more blocks; the language model itself is `dots3_note_text`",
    "gemma3n": "its vision tower needs the package timm; the language model itself is `gemma3n_text`",
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "a draft model for another model"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "it generates audio codes, not text"),
}
"""Type → why there is no tiny model of it."""

VOCABULARY = 400

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("emb_dim", "conv_dim", "word_embed_proj_dim", "input_embedding_size"), 32),
    **dict.fromkeys(("output_embedding_size", "attention_hidden_size", "dim_model", "n_inner"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "dff", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "attention_head_dim", "rotary_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("image_size", "num_mel_bins"), 28),
    "patch_size": 14,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("index_head_dim", "index_n_heads"), 8),
    "is_decoder": True,
}
"""Sizes, for the keys that a configuration has."""

_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8}
_LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_GEMMA3N: dict[str, Any] = {
    **_PER_LAYER,
    **_SLIDING,
    "num_kv_shared_layers": 0,
    "intermediate_size": [48, 48],
    "activation_sparsity_pattern": [0.0, 0.0],
    "laurel_rank": 8,
}
_GEMMA4: dict[str, Any] = {**_PER_LAYER, **_SLIDING, "global_head_dim": 8}
_MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "minicpm3"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "youtu", "nemotron"), _LATENT),
    **{k: {**_LATENT, "mlp_layer_types": ["dense", "sparse"]} for k in ("dots3_note_text",)},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, **_LINEAR, "shared_intermediate_size": 48},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "adapter_rank": 4,
        "n_mamba_heads": 8,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "kimi_linear": {
        "num_key_value_heads": 4,
        "num_experts_per_token": 2,
        **_LINEAR,
        "mlp_layer_types": ["dense", "sparse"],
    },
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR),
    "gemma3": {"text_config": _SLIDING},
    "gemma3_text": _SLIDING,
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "got_ocr2": {
        "vision_config": {"output_channels": 8, "mlp_dim": 48, "global_attn_indexes": [1], "window_size": 2}
    },
    "dots3_note": {"text_config": {**_LATENT, "mlp_layer_types": ["dense", "sparse"]}},
    "phi4_multimodal": {
        "audio_config": {
            "ext_pw_out_channel": 32,
            "nemo_conv_channels": 8,
            "depthwise_separable_out_channel": 32,
        }
    },
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{k: {"head_dim": 8} for k in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "num_key_value_heads": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
        "hash_seed": 1,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
    },
    "xmod": {"default_language": "en_XX"},
    "xlm": {"causal": True},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
}
"""What else single families need."""


def configuration(kind: str, **more: Any) -> Any:
    """The configuration of two small blocks; ``more`` are further keys of it."""
    return _shrunk(transformers.CONFIG_MAPPING[kind], {**_MORE.get(kind, {}), **more})


def _shrunk(config: Any, more: dict[str, Any]) -> Any:
    default = config()
    have = default.to_dict()
    sizes = {key: value for key, value in _SMALL.items() if have.get(key) is not None}
    inner = {
        name: _shrunk(type(getattr(default, name)), more.get(name, {}))
        for name in getattr(config, "sub_configs", {})
        if getattr(default, name, None) is not None
    }
    return config(**{**sizes, **inner, **{k: v for k, v in more.items() if k not in inner}})


def make(kind: str, **more: Any) -> Any:
    """A model with weights far enough from zero for differences to show; the same every time."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configuration(kind, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dim() > 1:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()
