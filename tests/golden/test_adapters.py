"""A client's exported files give other tools the logits of the trainer's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from tests.small_models import VOCABULARY, away, causal
from tokenizers import Tokenizer, models, pre_tokenizers

from prefed.align.policy import load_base, save_over_start
from prefed.core import Key
from prefed.models import (
    ModelConfig,
    ModelError,
    load_backbone,
    load_client,
    make_backbone,
    save_adapter,
    save_client,
    save_merged,
)
from prefed.models.tastes import TASTE_MAP, tasting
from prefed.models.trainable_parts import PART_BUILDERS

IDS = torch.arange(1, 13)[None]


@pytest.fixture(scope="module", params=["gpt2", "llama", "gemma"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as a user has it."""
    folder = tmp_path_factory.mktemp(request.param)
    causal(request.param).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
    return folder


def load(base: Path, *needs: str):
    config = ModelConfig.model_validate(
        {"name": str(base), "device": "cpu", "lora": {"rank": 3}, "bottleneck": {"width": 8}}
    )
    model = load_backbone(config, Key(1), frozenset({"lora", *needs}))
    tensors = away(model.layout, model.initial)
    model.load(tensors)
    return model, tensors


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def plain(base: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(base).eval()


@pytest.mark.parametrize("needs", [(), ("personal_lora", "gate"), ("personal_lora", "gate", "factors")])
def test_adapter_in_peft(base: Path, tmp_path: Path, needs: tuple[str, ...]) -> None:
    """PEFT's own loader over the untouched base; a gated second branch lies in the same adapter."""
    model, tensors = load(base, *needs)
    want = logits(model.causal)
    save_adapter(model, tensors, tmp_path / "adapter")
    got = logits(PeftModel.from_pretrained(plain(base), tmp_path / "adapter").eval())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(plain(base)), want, atol=1e-2)


@pytest.mark.parametrize("needs", [(), ("head",), ("norm",), ("personal_lora", "gate"), ("residual",)])
def test_merged_is_a_plain_model(base: Path, tmp_path: Path, needs: tuple[str, ...]) -> None:
    model, tensors = load(base, *needs)
    want = logits(model.causal)
    save_merged(model, tensors, tmp_path / "merged")
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model.causal), want, rtol=0, atol=0)


def test_client_folder_holds_every_part(base: Path, tmp_path: Path) -> None:
    """All parts at once, saved and loaded, give the same logits and reward head, bit for bit. Every weight is
    a part without a LoRA."""
    model, tensors = load(base, *(part for part in PART_BUILDERS if part not in ("norm", "lora", "weights")))
    want = logits(model.causal)
    save_client(model, tensors, tmp_path / "client")
    again = load_client(tmp_path / "client")
    assert again.extract().equal(tensors)
    torch.testing.assert_close(logits(again.causal), want, rtol=0, atol=0)
    pooled = torch.ones(2, 32)
    assert torch.equal(again.reward(pooled), model.reward(pooled))


def test_what_cannot_be_done_says_so(base: Path, tmp_path: Path) -> None:
    model, tensors = load(base, "bottleneck", "residual")
    with pytest.raises(ModelError, match=r"bottleneck cannot be merged .*; export without --merge"):
        save_merged(model, tensors, tmp_path / "merged")
    with pytest.raises(ModelError, match=r"\[merge\] lora changed \d+ base weights, which an adapter cannot"):
        save_adapter(model, tensors, tmp_path / "adapter")
    with pytest.raises(ModelError, match="does not contain an exported client"):
        load_client(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_loading_a_residual_changes_the_base_and_unloading_restores_it(base: Path) -> None:
    """W0 + R while R is loaded; W0 bit for bit once R is zero again."""
    model, tensors = load(base, "residual")
    model.load(model.initial)
    before = logits(model.causal)
    model.load(tensors)
    assert not torch.equal(logits(model.causal), before)
    model.load(model.initial)
    assert torch.equal(logits(model.causal), before)


def test_loading_refuses_another_layout(base: Path) -> None:
    model, _ = load(base)
    other, tensors = load(base, "head")
    del other
    with pytest.raises(ValueError, match="layout"):
        model.load(tensors)


def test_unknown_names_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"unknown parts of a model: wings \(parts: .*head, "):
        load(base, "wings")
    for name in ("/nowhere/at/all", "./nowhere", "~/nowhere", "nowhere/at/all"):
        with pytest.raises(ModelError, match=rf"\[model\] name = '{name}': no such folder; give one with"):
            load_backbone(ModelConfig(name=name), Key(0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"the folder is empty; give one with config"):
        load_backbone(ModelConfig(name=str(tmp_path / "empty")), Key(0))
    with pytest.raises(ModelError, match="targets"):
        load_backbone(
            ModelConfig.model_validate({"name": str(base), "lora": {"targets": ["nothing"]}}), Key(0)
        )


# A policy that takes a taste, for one


TASTE = torch.linspace(-2, 2, 32)


def at_taste(model, taste=TASTE) -> torch.Tensor:
    with tasting(model.taste_map, taste[None]):
        return logits(model.causal)


@pytest.mark.parametrize("needs", [(), ("personal_lora", "gate")])
def test_an_adapter_for_one_taste_in_peft(base: Path, tmp_path: Path, needs: tuple[str, ...]) -> None:
    """The bare base and PEFT's own loader give our logits at this taste, and not those without it. Of the
    three models two have a head that is tied to the input embeddings, and Gemma scales what these give."""
    model, tensors = load(base, TASTE_MAP, *needs)
    want = at_taste(model)
    save_adapter(model, tensors, tmp_path / "adapter", TASTE)
    got = logits(PeftModel.from_pretrained(plain(base), tmp_path / "adapter").eval())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(model.causal), want, atol=1e-2)
    torch.testing.assert_close(at_taste(model), want, rtol=0, atol=0)


def test_a_merged_model_for_one_taste(base: Path, tmp_path: Path) -> None:
    """Plain transformers alone. A tied head is written apart: e(z) in it would add h · e(z) to all logits."""
    model, tensors = load(base, TASTE_MAP)
    want = at_taste(model)
    save_merged(model, tensors, tmp_path / "merged", TASTE)
    merged = plain(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), want, rtol=1e-5, atol=1e-5)
    assert not merged.config.tie_word_embeddings
    for taste, message in ((None, "only be exported for one taste"), (torch.nan * TASTE, "z is NaN")):
        with pytest.raises(ModelError, match=message):
            save_merged(model, tensors, tmp_path / "it", taste)
    torch.testing.assert_close(at_taste(model), want, rtol=0, atol=0)


def test_an_adapter_for_one_taste_joins_the_one_at_the_start(base: Path, tmp_path: Path) -> None:
    """The policy lies over a base with an adapter of rank 2 in its weights. PEFT gives its logits from the
    bare base. So does what is loaded to be judged, where the adapter is merged: there a tied head parts from
    the embeddings first."""
    settings = {"name": str(base), "device": "cpu", "lora": {"rank": 2}}
    first = load_backbone(ModelConfig.model_validate(settings), Key(2))
    save_adapter(first, away(first.layout, first.initial, seed=8), tmp_path / "start")
    config = ModelConfig.model_validate({**settings, "lora": {"rank": 3}})
    causal = PeftModel.from_pretrained(plain(base), tmp_path / "start").merge_and_unload()
    policy = make_backbone(causal, None, config, Key(1), frozenset({"lora", TASTE_MAP}))
    tensors = away(policy.layout, policy.initial)
    policy.load(tensors)
    want = at_taste(policy)
    save_over_start(policy, tensors, tmp_path / "start", tmp_path / "joined", TASTE)
    got = logits(PeftModel.from_pretrained(plain(base), tmp_path / "joined").eval())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    merged = load_base(config, 0, tmp_path / "joined")
    torch.testing.assert_close(logits(merged.causal), want, rtol=1e-4, atol=1e-5)


def test_capped_logits_of_a_tied_head(tmp_path: Path) -> None:
    """Gemma 2 puts logits through c · tanh(logit / c). With e(z) in a tied head that would change the
    probabilities; in the files it is in the embeddings alone, also where it is merged."""
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    causal = transformers.Gemma2ForCausalLM(config).eval()
    assert causal.lm_head.weight is causal.model.embed_tokens.weight
    causal.save_pretrained(tmp_path / "base")
    settings = {"name": "gemma2", "device": "cpu", "lora": {"rank": 3}}
    needs = frozenset({"lora", TASTE_MAP})
    model = make_backbone(causal, None, ModelConfig.model_validate(settings), Key(1), needs)
    tensors = away(model.layout, model.initial)
    model.load(tensors)
    want = at_taste(model)
    save_adapter(model, tensors, tmp_path / "adapter", TASTE)
    save_merged(model, tensors, tmp_path / "merged", TASTE)
    adapted = PeftModel.from_pretrained(plain(tmp_path / "base"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(adapted), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "module"), [("cuda", "torch.cuda"), ("mps", "torch.backends.mps")])
def test_a_device_that_is_not_there_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch, device: str, module: str
) -> None:
    monkeypatch.setattr(f"{module}.is_available", lambda: False)
    config = ModelConfig.model_validate({"name": str(base), "device": device})
    with pytest.raises(
        ModelError, match=rf"\[model\] device = '{device}' is not available; this machine has"
    ):
        load_backbone(config, Key(0))
