"""The memory plan of a dry run, against real tensors and against sums by hand."""

import json
import shutil

import numpy as np
import pytest
import tomli_w
import torch
from benchmarks import zoo
from transformers import AutoModelForCausalLM, GPT2Config, GPT2ForSequenceClassification, MixtralConfig

from commands import prefed_
from finished import small_experiment, small_place
from prefed.core import Key
from prefed.models import ModelConfig, load_causal, make_backbone
from prefed.runs.memory_plan import FOUR_BITS, PlannedModel
from prefed.train import packed
from prefed.train.forward_passes import PairModel
from prefed.train.packed import PackedForward
from small_models import VOCABULARY, Pair, Pairs, backbone, causal


class LongPairs(Pairs):
    """Three pairs of 40, 25 and 31 tokens."""

    def __init__(self):
        super().__init__(3)
        parts = (40, 25, 31)
        self._pairs = [Pair(*(np.ones(n, np.int32) for n in parts)) for _ in self._pairs]
        self.lengths = np.array([parts] * 3, np.int32)


PDPO = frozenset({"lora", "bottleneck", "head", "reward"})


def planned(fast, dropout, checkpointing, needs=frozenset({"lora"}), **more):
    config = {"name": "llama", "dtype": "float32", "fast": fast, "checkpointing": checkpointing, **more}
    config |= {"lora": {"rank": 3, "alpha": 6.0, "dropout": dropout}}
    return PlannedModel(causal("llama").config, ModelConfig.model_validate(config), needs, LongPairs())


def kept_bytes(model, run, length=0):
    """What autograd saves of a real forward pass, without the model's own tensors, and without the attention
    weights of texts of ``length`` tokens."""
    saved = {}

    def pack(tensor):
        if tensor.shape[-2:] != (length, length):
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert run().requires_grad
    for each in (*model.causal.parameters(), *model.causal.buffers(), model.flat):
        saved.pop(each.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_kept_bytes_are_those_of_a_real_step(fast, checkpointing, monkeypatch):
    """The oracle is autograd: the storages that a real step on the CPU saves for the backward pass. More is
    kept, derived here: by the head's function the mean of its rows (K x d), the targets' rows (M x d) and the
    normaliser (K); by recomputed blocks on padded batches their mask (6 x 71 x 71 bools). Both sides use the
    attention of a GPU in fp32."""
    monkeypatch.setattr(packed, "_kernel", lambda query: packed._one_by_one)
    rows = np.arange(3)
    plan = planned(fast, 0.0, checkpointing)
    assert plan.packed == fast
    model = backbone("llama", fast=fast, checkpointing=checkpointing)
    model.train_only(model.layout.names)
    pairs = PairModel(model, LongPairs(), max_tokens=1 << 30, fast=fast)
    kept = kept_bytes(model, lambda: pairs.run(rows))
    width, count = 32, 3 * (25 + 31)
    if fast:
        kept += 4 * (count - 3) * (width + 1) + 4 * count * width
    elif checkpointing:
        kept += 6 * 71**2
    assert plan.step(rows).kept == pytest.approx(kept, rel=0.03)


def test_personal_heads_keep_what_a_real_step_keeps(monkeypatch):
    """FedPDPO's parts on the packed path, by the same oracle: the reward head reads every row, and the output
    embedding the 3 x (25 + 31) - 3 distinct rows that predict tokens. The plan takes all to be distinct."""
    monkeypatch.setattr(packed, "_kernel", lambda query: packed._one_by_one)
    rows, sizes = (
        np.arange(3),
        {"bottleneck": {"width": 8, "dropout": 0}, "reward": {"width": 8, "dropout": 0}},
    )
    step = planned(True, 0.0, False, PDPO, **sizes).step(rows)
    model = backbone("llama", PDPO)
    model.train_only(model.layout.names)
    kept = kept_bytes(
        model, lambda: PairModel(model, LongPairs(), max_tokens=1 << 30, fast=True).run(rows, rewards=True)
    )
    assert step.client == 2 * model.flat.nbytes
    assert step.kept == pytest.approx(kept, rel=0.1)


def test_experts_in_any_dtype():
    """The product of grouped matrices, which PyTorch refuses in float32 without data: weights have the bytes
    of the real model, and what a step keeps is mostly numbers of the model's dtype."""
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_local_experts=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    real = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    wide, narrow = (
        PlannedModel(config, ModelConfig(name="mixtral", dtype=dtype), frozenset({"lora"}), LongPairs()).step(
            np.arange(3)
        )
        for dtype in ("float32", "bfloat16")
    )
    frequencies = 2 * 4 * 4
    assert (wide.weights, narrow.weights) == (4 * real + frequencies, 2 * real + frequencies)
    assert 1.5 * narrow.kept < wide.kept <= 2 * narrow.kept


@pytest.mark.parametrize(
    ("kind", "length", "low", "high"),
    [("dbrx", 0, 0.9, 1.1), ("longcat_flash", 71, 1.0, 1.3), ("doge", 0, 0.9, 1.1)],
)
def test_a_plan_of_code_that_depends_on_values(kind, length, low, high):
    """Loops over the tokens of each expert, where autograd is again the oracle, and a mask of the model,
    because of which a real one takes the plain path. The plan counts LongCat's experts without weights like
    others. On a CPU its attention, whose keys and values differ in size, also keeps its weights, which are
    left out of what is measured."""
    config = ModelConfig(name=kind, dtype="float32", device="cpu", lora={"rank": 3})
    plan = PlannedModel(zoo.configuration(kind), config, frozenset({"lora"}), LongPairs())
    model = make_backbone(zoo.make(kind), None, config, Key(1), frozenset({"lora"}))
    model.train_only(model.layout.names)
    pairs = PairModel(model, LongPairs(), max_tokens=1 << 30, fast=True)
    assert not plan.packed
    assert not isinstance(pairs.forward, PackedForward)
    kept = kept_bytes(model, lambda: pairs.run(np.arange(3)), length)
    assert low < plan.step(np.arange(3)).kept / kept < high


@pytest.mark.parametrize("checkpointing", [True, False])
def test_dropout_keeps_nothing_for_the_backward_pass(checkpointing):
    """Its draw is repeated."""
    rows = np.arange(3)
    without, with_dropout = (planned(True, p, checkpointing).step(rows) for p in (0.0, 0.2))
    assert with_dropout.kept == without.kept


def test_a_configuration_serves_again():
    """The packed path changes a model's configuration, and must not change the given one: GPT-2's last block
    would then stay as it is, and its rows be missing."""
    config = causal("gpt2").config
    model = ModelConfig(name="gpt2", dtype="float32")
    steps = [PlannedModel(config, model, frozenset({"lora"}), LongPairs()).step(np.arange(1)) for _ in "12"]
    assert steps[0] == steps[1]


def test_parts_by_hand():
    """Llama of 2 blocks, width 32, 4 heads of 8 with 2 for keys, feed-forward 48, vocabulary 101, untied.
    LoRA of rank 3 on the 7 linear modules; AdamW keeps two numbers per trained one."""
    linear = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    lora = 3 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 48) * 3)
    whole = 2 * VOCABULARY * 32 + 2 * (linear + 2 * 32) + 32
    frequencies = 2 * 4 * 4  # rotary, and their original
    step = planned(True, 0.1, False).step(np.arange(1))
    assert (step.client, step.optimizer) == (2 * 4 * 2 * lora, 2 * 4 * 2 * lora)
    assert step.weights == 4 * whole + frequencies
    four = planned(True, 0.1, False, quantize="nf4").step(np.arange(1))
    assert four.weights == pytest.approx(step.weights - 2 * linear * (4 - FOUR_BITS), abs=14)
    assert four.client == step.client


@pytest.fixture
def weightless(tmp_path, monkeypatch):
    """An experiment whose model folder has no weights, and the size of the weights."""
    small_place(tmp_path)
    model = tmp_path / "model"
    weights = load_causal(ModelConfig(name=str(model), device="cpu"))
    (model / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.toml").write_text(tomli_w.dumps(small_experiment(tmp_path)))
    return sum(parameter.nbytes for parameter in weights.parameters())


def test_the_command(weightless, tmp_path, monkeypatch):
    """The model's weights are absent, and their size is right. Memory grows with the pairs in a pass, so the
    largest number that fits is where the total reaches nine tenths of the device."""
    monkeypatch.setenv("COLUMNS", "200")
    before = sorted(tmp_path.rglob("*"))
    run = ["run", "exp.toml", "--dry-run", "--device"]
    found = json.loads(prefed_(*run, "cuda:0.01GB", "--json"))
    assert (found["usable"], found["path"], found["pass_pairs"]) == (9_000_000, "packed", 4)
    own = found["variants"][0]
    assert own["bytes"]["weights"] == weightless
    assert own["bytes"]["total"] == sum(v for k, v in own["bytes"].items() if k != "total") < 9_000_000
    assert own["fits"]
    assert [each["settings"] for each in found["variants"]] == [
        {}, {"checkpointing": True}, {"quantize": "nf4"}, {"quantize": "nf4", "checkpointing": True},
    ]  # fmt: skip
    assert own["max_tokens"] == own["most_pairs"] * found["pair_tokens"]
    each = (9_000_000 - own["bytes"]["total"]) / (own["most_pairs"] - 4)
    assert 0.5 * own["bytes"]["kept"] / 4 < each < 3 * own["bytes"]["kept"] / 4
    assert "no pair fits in the 90.0 kB" in prefed_(*run, "cuda:0.0001GB", "--quiet")
    assert sorted(tmp_path.rglob("*")) == before
    shutil.rmtree(tmp_path / "model")
    assert "give a GPU with its memory, such as cuda:80GB" in prefed_(*run, "cpu", code=1)


def own_plan(*settings):
    """The plan of the experiment with these settings, and its row without changes."""
    words = ["run", "exp.toml", "--dry-run", "--device", "cuda:1GB", "--json"]
    result = prefed_(*words, *(word for each in settings for word in ("--set", each)))
    found = json.loads(result)
    return found, found["variants"][0]


@pytest.mark.rare
@pytest.mark.usefixtures("weightless")
def test_a_pass_has_the_pairs_of_a_step():
    """Accumulated batches share a pass, PPO's minibatches and a selector's batches count responses and
    questions, two per pair; and a pass that is too short for one more of the longest pairs may have several
    shorter ones."""
    found, own = own_plan()
    assert found["pass_pairs"] == 4
    accumulated, more = own_plan("method.accumulate=3")
    assert accumulated["pass_pairs"] == 12
    assert more["bytes"]["kept"] == pytest.approx(3 * own["bytes"]["kept"], rel=0.01)
    assert own_plan('method.name="fedbis"', "method.batch_size=4")[0]["pass_pairs"] == 2
    whole = found["pair_tokens"] + 2  # with the last tokens of responses, which are no inputs
    assert own_plan(f"engine.max_tokens={2 * whole + 1}")[0]["pass_pairs"] == 3
    assert own_plan("engine.max_tokens=1")[0]["pass_pairs"] == 1


def test_offline_ppo_has_its_reward_model_on_the_device(weightless, tmp_path):
    """In float32, next to the frozen model, whatever dtype that has."""
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, num_labels=1)
    config.save_pretrained(tmp_path / "reward")
    reward = sum(parameter.nbytes for parameter in GPT2ForSequenceClassification(config).parameters())
    ppo = ('method.objective="ppo"', 'method.reward_model="reward"', "method.ppo_minibatch=6")
    found, own = own_plan(*ppo)
    assert own["bytes"]["weights"] == weightless + reward
    assert found["pass_pairs"] == 3
