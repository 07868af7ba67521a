"""Which modules LoRA adapts, and what is said of targets that cannot be adapted."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from benchmarks import zoo
from torch import nn

from prefed.core import Key
from prefed.models import Backbone, ModelConfig, ModelError, make_backbone

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def adapted(
    kind: str, needs: frozenset[str] = frozenset({"lora"}), rank: int = 2, **lora: object
) -> Backbone:
    config = ModelConfig.model_validate({"name": kind, "device": "cpu", "lora": {"rank": rank, **lora}})
    return make_backbone(zoo.make(kind), None, config, Key(1), needs)


def modules(model: Backbone) -> set[str]:
    """Last names of the adapted modules."""
    return {entry.name.split("/")[-2].rpartition(".")[2] for entry in model.layout.entries}


@pytest.mark.parametrize(
    ("name", "near"), [("q_prj", "q_proj"), ("embed_tokens", None), ("c_attn", None), ("self_attn", None)]
)
def test_a_target_that_is_no_linear_module_is_refused_with_those_that_are(
    name: str, near: str | None
) -> None:
    """Every name once, that of the head among them, though the model has two blocks; the input embeddings are
    none."""
    with pytest.raises(ModelError) as error:
        adapted("llama", targets=["v_proj", name])
    message = str(error.value)
    assert repr(name) in message
    assert "[model.lora] targets" in message
    listed = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    assert message.count(listed) == 1
    assert (f"did you mean {near!r}" in message) is (near is not None)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "phi3"])
def test_all_linear_is_every_linear_module_but_the_head(kind: str) -> None:
    model = adapted(kind, targets=["all-linear"])
    plain = zoo.make(kind)
    linear = [m for m in plain.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    assert len(model.layout.names) == 2 * (len(linear) - 1)
    assert model.layout.names == adapted(kind).layout.names


def test_all_linear_with_the_head() -> None:
    assert modules(adapted("llama", targets=["all-linear", "lm_head"])) - modules(adapted("llama")) == {
        "lm_head"
    }


def test_a_path_names_one_of_several_modules() -> None:
    """GPT-2's attention and feed-forward network both have a c_proj."""
    model = adapted("gpt2", targets=["attn.c_proj"])
    assert model.layout.names == tuple(f"lora/{b}/attn.c_proj/{f}" for b in (0, 1) for f in "AB")


@pytest.mark.sample
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mixtral", ATTENTION),
        ("qwen3_moe", ATTENTION),
        ("qwen2_moe", ATTENTION | {"gate_proj", "up_proj", "down_proj", "shared_expert_gate"}),
    ],
)
@pytest.mark.parametrize("needs", [{"lora"}, {"lora", "personal_lora", "gate"}, {"lora", "residual"}])
def test_experts_in_one_tensor_stay_frozen(kind: str, expected: set[str], needs: set[str]) -> None:
    """With the default dropout, which PEFT's layer for such tensors refuses. A shared expert is linear."""
    model = adapted(kind, frozenset(needs), dropout=0.1)
    assert modules(model) - {"gate"} == expected
    assert not any(type(module).__name__ == "ParamWrapper" for module in model.causal.modules())
    assert all(len(entry.shape) <= 2 for entry in model.layout.entries)


def test_a_name_that_peft_reads_as_the_experts_is_refused() -> None:
    """A dense block next to blocks with experts has linear modules of the experts' names."""
    with pytest.raises(ModelError, match=r"PEFT cannot adapt 'down_proj'.*'deepseek_v3'"):
        adapted("deepseek_v3", targets=["down_proj"])
    assert "down_proj" not in modules(adapted("deepseek_v3"))


@pytest.mark.parametrize(
    ("kind", "name"), [("mamba", "out_proj"), ("jamba", "dt_proj"), ("longcat_flash", "classifier")]
)
def test_modules_past_which_the_model_reads_stay_frozen(kind: str, name: str) -> None:
    """A wrapped module's forward is never called, or its weight is read all the same: an adapter would do
    nothing until it is merged."""
    with pytest.raises(ModelError, match=rf"PEFT cannot adapt '{name}'.*'{kind}'"):
        adapted(kind, targets=[name])
    model = adapted(kind)
    assert name not in modules(model)
    called = set()
    for path, module in model.causal.named_modules():
        module.register_forward_hook(lambda *_, path=path: called.add(path))
    with torch.no_grad():
        model.causal(input_ids=torch.arange(1, 40)[None], use_cache=False)
    assert {path for path, module in model.causal.named_modules() if hasattr(module, "lora_A")} <= called


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"], ["all-linear"]])
def test_a_vision_tower_is_not_adapted(targets: list[str] | None) -> None:
    """Text does not pass it, so a LoRA there would be sent and never train. Its modules have the names of the
    language model's."""
    model = adapted("gemma3", targets=targets)
    paths = [path for path, module in model.causal.named_modules() if hasattr(module, "lora_A")]
    assert paths
    assert all(".language_model." in path for path in paths)
    assert any("vision_tower" in path and path.endswith("q_proj") for path, _ in model.causal.named_modules())


def test_a_rank_above_a_dimension_is_warned_of_with_names(caplog: pytest.LogCaptureFixture) -> None:
    """Llama's keys and values have 2 heads of 8 here: rank 17 is above 16, and below all other dimensions."""
    with caplog.at_level(logging.WARNING, "prefed"):
        adapted("llama", rank=16)
        assert not caplog.records
        adapted("llama", rank=17)
    (record,) = caplog.records
    assert "rank = 17" in record.getMessage()
    assert "k_proj (16), v_proj (16)" in record.getMessage()
    assert "q_proj" not in record.getMessage()


def test_the_start_of_a_lora_is_that_of_its_name() -> None:
    """A ~ U(±1/√32) by a draw at the module's name, whatever other modules are adapted."""
    whole, part = adapted("llama"), adapted("llama", targets=["q_proj"])
    for name in part.layout.names:
        assert torch.equal(part.initial[name], whole.initial[name])
    assert float(whole.initial["lora/0/self_attn.q_proj/A"].abs().max()) <= 1 / math.sqrt(32)
