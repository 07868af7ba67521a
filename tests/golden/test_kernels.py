"""Liger's kernels: which models use them, what is refused, and whether they compute what PyTorch's do.

Kernels run on a GPU, or on a CPU under Triton's interpreter, with liger-kernel and Triton 3.7 or later:
``TRITON_INTERPRET=1 python -m pytest tests/golden/test_kernels.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from tests.small_models import _SMALL, FAMILIES, Pairs, away, backbone, causal
from torch import nn
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama

from prefed.config import Experiment
from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
from prefed.core.strict_settings import differing
from prefed.models import ModelConfig, ModelError
from prefed.models import backbone as backbones
from prefed.models.liger_kernels import use_liger
from prefed.models.pretrained import LIGER_CLASSES, check_kernels, precision_notes, with_kernels
from prefed.runs.build import of_parent
from prefed.runs.loaded_run import recorded_experiment
from prefed.runs.start_or_resume import fitted
from prefed.train import PairTrainer

PAIRS = Pairs(4)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED


@pytest.fixture
def machine(monkeypatch):
    """A machine with a CUDA device and liger-kernel, or without what is called with ``False``."""

    def have(cuda: bool = True, liger: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        found = importlib.util.find_spec
        monkeypatch.setattr(
            "prefed.models.pretrained.find_spec",
            lambda name: liger or None if name == "liger_kernel" else found(name),
        )

    have()
    return have


def checkpoint(folder, kind="llama"):
    (folder / kind).mkdir(exist_ok=True)
    (folder / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(folder / kind)


def chosen(folder, kind="llama", **settings):
    return with_kernels(ModelConfig(name=checkpoint(folder, kind), **settings)).kernels


def test_without_a_choice_supported_models_on_a_cuda_device_take_ligers_kernels(machine, tmp_path) -> None:
    assert chosen(tmp_path) == "liger"
    assert chosen(tmp_path, "gpt2") == "torch"
    assert chosen(tmp_path, gpus=2) == "torch"
    assert chosen(tmp_path, fast=False) == "torch"
    assert chosen(tmp_path, kernels="torch") == "torch"
    assert chosen(tmp_path, device="cpu") is None
    machine(liger=False)
    assert chosen(tmp_path) == "torch"


@pytest.mark.parametrize(
    ("liger", "device", "settings", "message"),
    [
        (True, "cpu", {}, r"requires a CUDA device, but the model is on cpu"),
        (False, "cuda", {}, r"requires liger-kernel: pip install 'prefed\[kernels\]'"),
        (True, "cuda", {"gpus": 2}, r"not possible with gpus = 2"),
        (True, "cuda", {"fast": False}, r"not possible with fast = false"),
    ],
)
def test_kernels_that_cannot_run_are_refused_with_what_would_do(machine, liger, device, settings, message):
    machine(liger=liger)
    config = ModelConfig(name="m", kernels="liger", **settings)
    with pytest.raises(ModelError, match=r"^\[model\] kernels = 'liger' .*" + message):
        check_kernels(config, torch.device(device))
    check_kernels(config.model_copy(update={"kernels": "torch"}), torch.device(device))


def test_a_model_on_a_cpu_is_refused_when_it_is_made() -> None:
    with pytest.raises(ModelError, match="kernels = 'liger' requires a CUDA device"):
        backbone("llama", kernels="liger")


def test_a_run_records_its_kernels_and_keeps_them_when_it_is_resumed(machine, tmp_path) -> None:
    """A resumed run with other kernels has a changed setting. A run that started on a CPU records none."""
    data = {"train": "t.jsonl", "partition": {"by": "iid", "clients": 1}}

    def experiment(**model):
        tables = {"name": checkpoint(tmp_path), "dtype": "float32", **model}
        rest = {"method": "feddpo", "engine": {"workers": 2}, "evaluate": {"text": 0}}
        return Experiment.from_tables({"rounds": 1, "data": data, "model": tables, **rest}, "file")

    run = fitted(experiment())
    assert run.tables()["model"]["kernels"] == "liger"
    assert precision_notes(run.model) == ["the model is in float32 on cuda, with Liger's kernels"]
    on_cpu = fitted(experiment(device="cpu"))
    assert "kernels" not in on_cpu.tables()["model"]
    machine(liger=False)
    assert differing(run.tables(), fitted(experiment(), run).tables()) == {}
    other = fitted(experiment(kernels="torch"), run)
    assert differing(run.tables(), other.tables()) == {"model.kernels": ("liger", "torch")}
    machine()
    assert fitted(experiment(), on_cpu).model.kernels is None
    assert of_parent(run).model.kernels is None, "its model is on the CPU"
    record = SimpleNamespace(path=tmp_path, fingerprint={}, config=run.tables(), summary={})
    assert recorded_experiment(record).model == run.model.model_copy(update={"kernels": None})


@pytest.fixture
def plain_liger(monkeypatch):
    """A package of Liger's names, with transformers' functions; returns how often each was called."""
    calls: Counter[str] = Counter()
    norms = {"llama": modeling_llama.LlamaRMSNorm, "gemma": modeling_gemma.GemmaRMSNorm}

    def norm(x, weight, eps, offset, casting, in_place):
        calls["norm"] += 1
        assert (offset, in_place) == (float(casting == "gemma"), False)
        own = norms[casting](x.shape[-1], eps)
        own.weight = weight
        return own(x)

    def gate(kind, activation):
        def forward(self, x):
            calls[kind] += 1
            return self.down_proj(activation(self.gate_proj(x)) * self.up_proj(x))

        return type(kind, (), {"forward": forward})

    def rotary(*args):
        calls["rotary"] += 1
        return modeling_llama.apply_rotary_pos_emb(*args)

    names = {
        "ops.rms_norm": {"LigerRMSNormFunction": SimpleNamespace(apply=norm)},
        "transformers.swiglu": {"LigerSwiGLUMLP": gate("swiglu", nn.functional.silu)},
        "transformers.geglu": {"LigerGEGLUMLP": gate("geglu", nn.GELU("tanh"))},
        "transformers.rope": {"liger_rotary_pos_emb": rotary},
    }
    for path in ("", ".ops", ".transformers", *(f".{name}" for name in names)):
        module = ModuleType("liger_kernel" + path)
        vars(module).update(names.get(path[1:], {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


IDS = torch.arange(1, 13).view(2, 6)


@pytest.mark.parametrize(("family", "gate"), [("llama", "swiglu"), ("gemma", "geglu")])
def test_kernels_replace_two_norms_a_gate_and_a_rotary_embedding_of_each_block(
    plain_liger, family, gate
) -> None:
    """Two blocks and the final norm. Another model of the process keeps its own functions."""
    model, other = causal(family), causal(family)
    use_liger(model, "m")
    plain_liger.clear()
    logits = model(IDS).logits
    assert plain_liger == {"norm": 5, gate: 2, "rotary": 2}
    assert torch.equal(other(IDS).logits, logits)
    assert plain_liger.total() == 9


def test_kernels_that_compute_something_else_are_refused(plain_liger, monkeypatch) -> None:
    """Keys that are not rotated change logits; an activation that keeps its slope from autograd changes
    gradients only."""
    swiglu, rope = (sys.modules[f"liger_kernel.transformers.{name}"] for name in ("swiglu", "rope"))
    with monkeypatch.context() as patch:
        patch.setattr(rope, "liger_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
        with pytest.raises(ModelError, match=r"changes the logits of 'm' by .*set it to 'torch'"):
            use_liger(causal("llama"), "m")
    own = swiglu.LigerSwiGLUMLP.forward
    monkeypatch.setattr(swiglu.LigerSwiGLUMLP, "forward", lambda self, x: own(self, x).detach())
    with pytest.raises(ModelError, match="changes the gradients of 'm'"):
        use_liger(causal("llama"), "m")


def test_a_model_without_kernels_is_refused_by_its_type(plain_liger) -> None:
    with pytest.raises(ModelError, match="kernels = 'liger' does not support model type 'gpt2'"):
        use_liger(causal("gpt2"), "m")


@pytest.fixture
def device(monkeypatch):
    """The GPU, or the CPU with three corrections of Triton's interpreter.

    It passes numbers to kernels as Python's, of which Liger wants the Triton type, and CUDA's rsqrt and tanh
    return nothing.
    """
    if GPU:
        return "cuda"
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    usual = interpreter._implicit_cvt

    def convert(value):
        if not isinstance(value, float):
            return usual(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
    monkeypatch.setattr(backbones, "check_kernels", lambda config, device: None)
    return "cpu"


runs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None or not (GPU or INTERPRETED),
    reason="needs the extra prefed[kernels], and a GPU or TRITON_INTERPRET=1",
)
_MORE = {
    "granite": transformers.GraniteConfig,
    "qwen3": transformers.Qwen3Config,
    "smollm3": transformers.SmolLM3Config,
}


@runs_kernels
@pytest.mark.parametrize("needs", ["lora", "lora+bottleneck", "lora+norm", "weights"])
def test_a_step_of_feddpo_with_ligers_kernels_on_a_gpu_is_that_with_pytorchs(device, needs) -> None:
    """In float32. A kernel rounds each number a few times, by 6e-8 each, and the two blocks have nine kernels
    in each direction: less than 1e-5 of the step, which is SGD's, so the gradient. The pairs are packed."""
    parts, steps = frozenset(needs.split("+")), []
    settings = {"train": "full"} if needs == "weights" else {}
    for kernels in ("torch", "liger"):
        model = backbone("llama", parts, device=device, kernels=kernels, **settings)
        trainer = PairTrainer(model, PAIRS, max_tokens=60)
        everything = Ownership.of(model.layout, lambda entry: Owner.SHARED)
        goal, start = Objective("dpo", {"beta": 0.5}), away(model.layout, model.initial)
        phase = Phase("train", model.layout.names, goal, Optimizer("sgd", lr=1.0), batch_size=4, steps=1)
        result = trainer.visit(np.arange(4), Key(5), everything).train(start, phase)
        steps.append(result.tensors - start)
    assert steps[0].norm() > 0.01
    assert float((steps[1] - steps[0]).norm() / steps[0].norm()) < 1e-5


@runs_kernels
@pytest.mark.parametrize("family", sorted(LIGER_CLASSES))
def test_every_family_with_ligers_kernels_on_a_gpu_computes_what_it_does_without(
    device, family, monkeypatch
) -> None:
    """Logits and gradients of a batch of two sequences; 1e-5 as above."""
    if family in _MORE:
        monkeypatch.setitem(
            FAMILIES,
            family,
            lambda: _MORE[family](num_key_value_heads=2, head_dim=8, pad_token_id=0, **_SMALL),
        )
    results = []
    for liger in (False, True):
        model = causal(family).to(device)
        if liger:
            use_liger(model, family)
        logits = model(IDS.to(device), use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        results.append([logits.detach(), *(each.grad for each in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert float((other - one).norm()) <= 1e-5 * float(one.norm())
