"""Small randomly initialised models of every family, and pairs of random tokens, for tests of the trainer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers

from prefed.core import Key, Layout, Tensors
from prefed.data import Pair
from prefed.models import Backbone, ModelConfig, make_backbone

VOCABULARY = 101

FAMILIES = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    "llama": lambda: transformers.LlamaConfig(num_key_value_heads=2, **_SMALL),
    "qwen2": lambda: transformers.Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, **_SMALL),
    "gemma": lambda: transformers.GemmaConfig(num_key_value_heads=1, head_dim=8, **_SMALL),
    "mistral": lambda: transformers.MistralConfig(num_key_value_heads=2, head_dim=8, **_SMALL),
}
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


class Pairs:
    """Random pairs of unequal lengths in memory, with the face of a ``TokenSet``."""

    letters: tuple[int, int] | None = None

    def __init__(self, count: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self._pairs = [
            Pair(
                *(draw.integers(1, VOCABULARY, draw.integers(1, most)).astype(np.int32) for most in (9, 7, 7))
            )
            for _ in range(count)
        ]
        self.lengths = np.array(
            [[len(p.prompt), len(p.chosen), len(p.rejected)] for p in self._pairs], np.int32
        ).reshape(-1, 3)
        self.margins = np.full(count, np.nan, np.float32)

    def __len__(self) -> int:
        return len(self._pairs)

    def pair(self, row: int) -> Pair:
        return self._pairs[row]


class Choices(Pairs):
    """Random choices: a prompt, and two branches that end with the letters A and B (1 and 2)."""

    letters = (1, 2)

    def __init__(self, count: int, seed: int = 0, orientations: list[int] | None = None) -> None:
        super().__init__(count, seed)
        self._pairs = [
            Pair(p.prompt, np.append(p.chosen, np.int32(1)), np.append(p.rejected, np.int32(2)))
            for p in self._pairs
        ]
        self.lengths = self.lengths + np.array([0, 1, 1], np.int32)
        draw = np.random.default_rng(seed + 1)
        self.orientations = np.array(orientations or draw.integers(0, 2, count), np.uint8)


@contextmanager
def float64() -> Iterator[None]:
    """Compute in float64 what is fp32; also a decorator of a test. Two ways to one number then agree to 1e-12
    on every processor, and to 1e-6 if numbers are rounded to fp32 on the way, as in transformers' norms."""
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def causal(family: str) -> Any:
    """A model of a family with weights far enough from zero for differences to show."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.bos_token_id = config.eos_token_id = 0
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def backbone(
    family: str = "gpt2",
    needs: frozenset[str] = frozenset({"lora"}),
    *,
    fast: bool = True,
    dropout: float = 0.0,
    double: bool = False,
    rank: int = 3,
    **settings: Any,
) -> Backbone:
    """A small backbone; the same weights and the same start every time. ``settings`` are further keys of
    ``[model]``.
    """
    model = copy.deepcopy(causal(family))
    config = ModelConfig.model_validate(
        {
            "name": family,
            "fast": fast,
            "device": "cpu",
            "lora": {"rank": rank, "alpha": 2.0 * rank, "dropout": dropout},
            "bottleneck": {"width": 8, "dropout": dropout},
            "reward": {"width": 8, "dropout": dropout},
            **settings,
        }
    )
    double = double or torch.get_default_dtype() == torch.float64
    model = model.double() if double else model.to(getattr(torch, config.dtype or "float32"))
    return make_backbone(model, None, config, Key(1), needs)


def away(layout: Layout, initial: Tensors, scale: float = 0.05, seed: int = 3) -> Tensors:
    """Tensors at a distance from the start, so that no gradient vanishes."""
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    return Tensors(layout, initial.flat + scale * noise)


def save_llama(folder: Path, tokenizer: Any, **changes: Any) -> None:
    """A random Llama of two blocks that takes a tokenizer's texts, and the tokenizer."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **{**size, **changes})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_reward_model(folder: Path, tokenizer: Any, **changes: Any) -> None:
    """A random GPT-2 of one block that scores a tokenizer's texts, and the tokenizer."""
    torch.manual_seed(0)
    size = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "num_labels": 1}
    config = transformers.GPT2Config(vocab_size=len(tokenizer), **{**size, **changes})
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def put_lora(model: torch.nn.Module, tensors: Tensors) -> dict[str, torch.nn.Parameter]:
    """Copy every tensor of a LoRA into PEFT's model; returns its parameters by our names."""
    parameters = {}
    for path, parameter in model.named_parameters():
        for name in tensors:
            _, block, module, factor = name.split("/")
            if f".{block}.{module}.lora_{factor}." in path:
                parameter.data.copy_(tensors[name])
                parameters[name] = parameter
    assert parameters.keys() == set(tensors)
    return parameters


__all__ = ["FAMILIES", "VOCABULARY", "Choices", "Pair", "Pairs", "away", "backbone", "causal"]
__all__ += ["float64", "put_lora", "save_llama", "save_reward_model"]
