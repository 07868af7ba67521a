"""Models that are not causal are refused, and so are lengths at which their positions change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import zoo
from tests.small_models import Pair, Pairs

from prefed.core import Key
from prefed.models import Backbone, ModelConfig, ModelError, make_backbone
from prefed.train import PairTrainer
from prefed.train.forward_passes import check_lengths, longest_input
from prefed.train.generation import Sampling, room_for

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": 24,
}
STRETCHED = [
    ("llama", {"max_position_embeddings": 24, "rope_parameters": DYNAMIC}),
    (
        "phi3",
        {"max_position_embeddings": 96, "original_max_position_embeddings": 24, "rope_parameters": LONG},
    ),
]
FIXED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 24}


def made(kind: str, dtype: str = "float32", **more: Any) -> Backbone:
    config = ModelConfig.model_validate({"name": kind, "device": "cpu", "dtype": dtype, "lora": {"rank": 2}})
    return make_backbone(zoo.make(kind, **more).to(getattr(torch, dtype)), None, config, Key(1))


class Lengths(Pairs):
    """A pair of 13 tokens and one of as many as are asked for."""

    def __init__(self, longest: int) -> None:
        super().__init__(2)
        draw = np.random.default_rng(0)
        lengths = [(8, 5, 4), (longest - 5, 5, 4)]
        self._pairs = [Pair(*(draw.integers(1, 99, n).astype(np.int32) for n in each)) for each in lengths]
        self.lengths = np.array(lengths, np.int32)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "megatron-bert"])
def test_attention_to_later_tokens_is_refused(kind: str, dtype: str) -> None:
    """Encoders, as their configurations come. The same with is_decoder attend to the left alone."""
    with pytest.raises(ModelError, match=rf"name = '{kind}' is not causal"):
        made(kind, dtype, is_decoder=False)
    assert made(kind, dtype, is_decoder=True).layout.names


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_oss", "mamba", "rwkv", "gemma3", "bloom"])
def test_causal_models_are_taken_in_bfloat16(kind: str) -> None:
    """Also those whose earlier logits a later token changes by rounding, since it goes to other experts."""
    assert made(kind, "bfloat16").layout.names


def test_a_gemma_that_attends_both_ways_is_refused() -> None:
    """The family is one of the packed path, whose attention would be causal all the same."""
    causal = zoo.make("gemma")
    for block in causal.model.layers:
        block.self_attn.is_causal = False
    causal.set_attn_implementation("sdpa")
    causal.model.forward = _without_mask(causal.model.forward)
    with pytest.raises(ModelError, match="is not causal"):
        make_backbone(causal, None, ModelConfig(name="gemma", device="cpu"), Key(1))


def _without_mask(forward: Any) -> Any:
    def both_ways(*args: Any, **kwargs: Any) -> Any:
        size = kwargs["input_ids"].shape[1]
        return forward(*args, **{**kwargs, "attention_mask": torch.zeros(1, 1, size, size)})

    return both_ways


def test_a_model_that_does_not_read_text_alone_is_refused_by_its_type() -> None:
    """Reformer computes no gradient in evaluation mode; its own message is passed on."""
    with pytest.raises(ModelError, match=r"name = 'reformer': model type 'reformer' does not accept token"):
        made("reformer")


@pytest.mark.parametrize(("kind", "more"), STRETCHED)
def test_positions_that_depend_on_the_longest_sequence_end_at_the_threshold(
    kind: str, more: dict[str, Any]
) -> None:
    """24 tokens are taken, 25 are refused, and generation and features stop there too. Beyond, the numbers of
    the short pair would depend on its neighbour, as the last lines show."""
    model = made(kind, **more)
    assert model.window == 24
    assert longest_input(model, 4096) == 24
    assert room_for(model, 20, Sampling(max_tokens=50)) == 4
    check_lengths(model, Lengths(24))
    with pytest.raises(ModelError, match=r"context is 24 tokens, but .* has 25; set .data. max_length = 24"):
        check_lengths(model, Lengths(25))

    def neighbours(longest: int) -> float:
        trainer = PairTrainer(made(kind, **more), Lengths(longest))
        alone, both = (trainer.model.outputs(np.arange(count)) for count in (1, 2))
        return float(np.abs(alone[0] - both[0]).max())

    assert neighbours(24) < 1e-4
    assert neighbours(90) > 1e-3


def test_fixed_frequencies_go_on_beyond_the_window() -> None:
    """YaRN changes frequencies once for all: a longer pair is a warning, as with plain rotary positions."""
    for rope in (FIXED, {"rope_type": "default", "rope_theta": 10000.0}):
        model = made("llama", max_position_embeddings=96, rope_parameters=rope)
        assert model.window == 96
        check_lengths(model, Lengths(97))


def test_the_text_part_of_a_model_says_how_long_a_sequence_is() -> None:
    """Gemma 3 has the language model's settings one level down, and rotary settings by type of layer."""
    model = made("gemma3")
    assert model.window == 512
    assert model.stretches
    assert model.width == 32
