"""Families of models against plain transformers and PEFT; ``benchmarks/models.py`` has all of them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from benchmarks import zoo
from peft import PeftModel
from tests.finished import logprobs
from tests.small_models import Choices, Pairs, away, backbone, float64

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
from prefed.models import Backbone, ModelConfig, ModelError, make_backbone, save_adapter, save_merged
from prefed.train import PairTrainer, packed
from prefed.train.forward_passes import PairModel
from prefed.train.packed import PackedForward
from prefed.train.padded import PaddedForward
from prefed.train.tastes import ResponseFeatures

ROWS = np.arange(4)
SDG = frozenset({"lora", "personal_lora", "gate", "outputs"})


@functools.cache
def _model(kind: str, more: tuple[tuple[str, Any], ...] = ()) -> Any:
    return zoo.make(kind, **dict(more))


def adapted(
    kind: str, needs: frozenset[str] = frozenset({"lora"}), more: dict[str, Any] | None = None, **lora: Any
) -> tuple[Any, Backbone]:
    """A plain model, and a copy with an adapter of the default dropout."""
    plain = _model(kind, tuple((more or {}).items()))
    config = ModelConfig.model_validate(
        {"name": kind, "device": "cpu", "lora": {"rank": 2, "alpha": 4, **lora}}
    )
    return copy.deepcopy(plain), make_backbone(copy.deepcopy(plain), None, config, Key(1), needs)


def agree(got: np.ndarray, want: np.ndarray, tokens: Pairs) -> None:
    """To 5e-5 nats a token."""
    assert (np.abs(got - want) / tokens.lengths[ROWS, 1:]).max() < 5e-5


@pytest.mark.parametrize("kind", zoo.QUICK)
def test_an_exported_adapter_gives_in_peft_what_the_trainer_gives(kind: str, tmp_path: Path) -> None:
    """A gated personal branch next to the shared one, dropout left at its default, a forward pass for each
    response. Merged, the model is one that transformers alone loads."""
    plain, model = adapted(kind, SDG)
    tensors, tokens = away(model.layout, model.initial), Pairs(4)
    scores = PairTrainer(model, tokens).score(tensors, ROWS)
    save_adapter(model, tensors, tmp_path / "adapter")
    save_merged(model, tensors, tmp_path / "merged")
    agree(scores.reference, logprobs(plain, tokens, ROWS), tokens)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    agree(scores.policy, logprobs(merged, tokens, ROWS), tokens)
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    agree(scores.policy, logprobs(peft, tokens, ROWS), tokens)
    assert np.abs(scores.policy - scores.reference).max() > 0.01


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_a_lora_on_the_head_trains(kind: str, tmp_path: Path) -> None:
    """The packed path reads the head's weight and passes its LoRA by, so such a model takes the plain path. A
    tied head is written apart from the embeddings, which have no LoRA."""
    more = {"tie_word_embeddings": True} if kind == "qwen2" else {}
    plain, model = adapted(kind, more=more, targets=["lm_head"])
    tokens, everything = Pairs(4), Ownership.of(model.layout, lambda entry: Owner.SHARED)
    trainer = PairTrainer(model, tokens)
    names, optimizer = everything.names(Owner.SHARED), Optimizer("adamw", lr=0.1)
    phase = Phase("test", names, Objective("dpo"), optimizer, batch_size=4, steps=2)
    tensors = trainer.visit(ROWS, Key(5), everything).train(model.initial, phase).tensors
    scores = trainer.score(tensors, ROWS)
    assert np.abs(scores.policy - scores.reference).max() > 0.01
    save_adapter(model, tensors, tmp_path / "adapter")
    save_merged(model, tensors, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    agree(scores.policy, logprobs(merged, tokens, ROWS), tokens)
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    agree(scores.policy, logprobs(peft, tokens, ROWS), tokens)


def test_a_selectors_lora_on_the_head_counts() -> None:
    """Its two rows of the head have a share of the adapter too."""
    _, model = adapted("llama", targets=["lm_head"])
    trainer, tensors = PairTrainer(model, Choices(4)), away(model.layout, model.initial, 0.5)
    scores = trainer.score(tensors, ROWS)
    assert np.abs(scores.orders - scores.baseline).max() > 0.01


@pytest.mark.parametrize(("part", "tied"), [("head", False), ("residual", True)])
def test_a_lora_on_a_head_that_changes_otherwise_is_refused(part: str, tied: bool) -> None:
    with pytest.raises(ModelError, match=r"\[model.lora\] targets contains .*(head|share).*"):
        adapted("llama", frozenset({"lora", part}), {"tie_word_embeddings": tied}, targets=["lm_head"])


@pytest.mark.parametrize(
    ("kind", "more", "width"), [("opt", {"word_embed_proj_dim": 16}, 16), ("gemma3n_text", {}, 32)]
)
def test_what_the_head_reads_is_what_all_parts_above_the_trunk_read(
    kind: str, more: dict[str, Any], width: int
) -> None:
    """OPT-350m: blocks of width 32, embeddings and head of width 16. Gemma 3n: four streams, which are joined
    after the last block. Hidden states of responses, which a selector with a latent taste reads, are those of
    the plain model."""
    needs = frozenset({"variational", "prototypes", "posterior", "latent", "value"})
    plain, model = adapted(kind, needs | {"lora"}, more)
    assert model.width == width
    assert model.layout["variational/response/0/weight"].shape == (512, width)
    tokens = Choices(4)
    tokens.record = int
    features = ResponseFeatures(
        PairModel(model, tokens, max_tokens=99, fast=True), _Encoder(tokens), None, ""
    )
    features.fill(ROWS)
    for row, hidden in zip(ROWS, features.get(ROWS), strict=True):
        pair = tokens.pair(int(row))
        for got, response in zip(hidden, (pair.chosen, pair.rejected), strict=True):
            ids = torch.from_numpy(np.concatenate([pair.prompt, response]).astype(np.int64))[None]
            with torch.no_grad():
                want = plain.base_model(input_ids=ids).last_hidden_state[0, len(pair.prompt) :].mean(0)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class _Encoder:
    """Gives the pairs themselves as the responses to read."""

    def __init__(self, tokens: Pairs) -> None:
        self._tokens = tokens

    def encode(self, rows: list[int]) -> list[Any]:
        return [self._tokens.pair(row) for row in rows]


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_personal_norms_with_a_gate_in_bfloat16(kind: str) -> None:
    """A gated norm takes its gate as a second argument; its affine parameters are in float32."""
    config = ModelConfig.model_validate({"name": kind, "device": "cpu", "dtype": "bfloat16"})
    causal = copy.deepcopy(_model(kind)).to(torch.bfloat16)
    model = make_backbone(causal, None, config, Key(1), frozenset({"lora", "norm"}))
    trainer, tensors = PairTrainer(model, Pairs(4)), away(model.layout, model.initial)
    scores = trainer.score(tensors, ROWS)
    assert np.isfinite(scores.policy).all()
    assert np.abs(scores.policy - scores.reference).max() > 0.01


def test_norms_without_parameters_are_no_part() -> None:
    """OLMo's norms have none; its LoRA trains all the same."""
    _, model = adapted("olmo", frozenset({"lora", "norm"}))
    assert {entry.part for entry in model.layout.entries} == {"lora"}


def test_which_families_are_packed() -> None:
    tokens = Pairs(4)
    paths = {
        kind: isinstance(PairTrainer(adapted(kind)[1], tokens).model.forward, PackedForward)
        for kind in (
            "gpt2",
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "opt",
            "mixtral",
            "gpt_oss",
            "mamba",
        )
    }
    assert {kind for kind, packed in paths.items() if not packed} == {"opt", "gpt_oss", "mamba"}


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("olmo2", {}, ""),
        ("granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.7}, ""),
        ("granite", {"logits_scaling": 3.0}, ""),
        ("cohere", {"logit_scale": 0.3}, ""),
        ("cohere2", {"logit_scale": 0.3, "sliding_window": 5}, ""),
        ("gemma3_text", {"sliding_window": 5}, ""),
        ("gemma3", {}, ""),
        ("gemma3_text", {"final_logit_softcapping": 2.0}, "its logits are not the product"),
        ("doge", {}, "packed attention does not support a mask"),
        ("gemma2", {}, "there is no fast path for model type 'gemma2'"),
        ("nemotron", {}, "packed input changes its hidden states by"),
    ],
)
@float64()
def test_the_path_of_a_model_with_modules_like_llamas(
    kind: str, more: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Norms after attention, multipliers of residuals, scores and logits, and windows shorter than a pair are
    packed and score as the padded path does. Capped logits, masks of the model's own, and states that differ
    are not: the model is as before. The check draws no random numbers."""
    before = torch.get_rng_state()
    _, model = adapted(kind, more=more)
    torch.set_rng_state(before)
    usual = model.causal.config._attn_implementation
    fast = PairTrainer(model, Pairs(4)).model
    assert torch.equal(torch.get_rng_state(), before)
    if reason:
        assert isinstance(fast.forward, PaddedForward)
        assert reason in caplog.text
        assert model.causal.config._attn_implementation == usual
        return
    plain = PairTrainer(adapted(kind, more=more)[1], Pairs(4), fast=False).model
    assert isinstance(fast.forward, PackedForward)
    rows = np.arange(4)
    np.testing.assert_allclose(fast.outputs(rows), plain.outputs(rows), rtol=1e-6)


def test_a_window_that_attention_does_not_keep_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check has a sequence as long as the longest pair, where a lost window changes hidden states."""

    def without(query: Any, key: Any, value: Any, scale: float | None, window: int) -> torch.Tensor:
        return whole(query, key, value, scale, 99)

    whole = packed._in_window
    monkeypatch.setattr(packed, "_in_window", without)
    _, model = adapted("gemma3_text", more={"sliding_window": 5})
    assert isinstance(PairTrainer(model, Pairs(4)).model.forward, PaddedForward)
    assert "packed input changes its hidden states by" in caplog.text


def test_a_small_difference_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Embeddings that also depend on the place in the input, which is another one in packed input. It changes
    hidden states by some 7e-4, and rounding in float32 changes them by less than 1e-6."""
    model = backbone("llama")
    assert isinstance(PairTrainer(backbone("llama"), Pairs(4)).model.forward, PackedForward)

    def with_place(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 2e-4 * torch.linspace(0, 1, output.shape[1])[:, None]

    model.causal.get_input_embeddings().register_forward_hook(with_place)
    assert isinstance(PairTrainer(model, Pairs(4)).model.forward, PaddedForward)
    assert "packed input changes its hidden states by 0.0" in caplog.text


def test_stacks_of_blocks_do_not_share_names() -> None:
    """HRM has two stacks, both with a block 0: every tensor has a name of its own."""
    _, model = adapted("hrm_text")
    names = model.layout.names
    assert len(set(names)) == len(names)
    assert (
        sum(name.startswith("lora/0/") for name in names)
        > sum(name.startswith("lora/1/") for name in names) - 1
    )
    assert any(".L_module." in name for name in names)


def test_blocks_that_share_weights_and_not_their_adapters_are_not_merged(tmp_path: Path) -> None:
    """Zamba's blocks share a transformer's weights, and PEFT gives each block an adapter of its own: one W
    cannot be W + B₁A₁ and W + B₂A₂. FedEx-LoRA would change W twice."""
    plain, model = adapted("zamba")
    tensors, tokens = away(model.layout, model.initial), Pairs(4)
    with pytest.raises(ModelError, match=r"share weights.*export the adapter"):
        save_merged(model, tensors, tmp_path / "merged")
    assert not list(tmp_path.iterdir())
    scores = PairTrainer(model, tokens).score(tensors, ROWS)
    save_adapter(model, tensors, tmp_path / "adapter")
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    agree(scores.policy, logprobs(peft, tokens, ROWS), tokens)
    with pytest.raises(ModelError, match="share a weight"):
        adapted("zamba", frozenset({"lora", "residual"}))
