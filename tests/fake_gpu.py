"""GPUs in Python: their tensors compute on the CPU, and refuse operands that are elsewhere, as CUDA's do.

Numbers are real, so a run can be compared with one on the CPU. Kernels of a GPU (flash attention, products of
16 bits with a sum in 32) are not run. As a program it makes runs on both devices, and prints how far apart
their tensors are: all methods and all of :data:`CASES`, or those that are named. With ``@2``, the model is
spread over two devices.

    python tests/fake_gpu.py feddpo moe@2

It needs a process of its own, since PyTorch counts devices at the first backward pass.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.optim import optimizer
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class _Module(_DummyBackendModule):
    """Dropout of the devices draws from the CPU's generator. Checkpointing asks for dtypes of autocast."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass


# Before the first backward pass of the process, which counts the devices.
_setup_privateuseone_for_python_backend("fake_gpu", backend_module=_Module())

DEVICE, SECOND = torch.device("fake_gpu", 0), torch.device("lazy", 0)
"""The fake GPUs. A device in Python has one index, so the second is of the only other type with gradients."""
_aten = torch.ops.aten
_CROSSING = {
    *(_aten.copy_.default, _aten._to_copy.default),
    *(_aten.to.device, _aten.to.dtype, _aten.to.dtype_layout),
}
"""Operations whose operands may be on two devices."""
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
"""Operations whose indices may be on the CPU."""


class OnGpu(torch.Tensor):
    """A tensor of a fake GPU; ``inner`` holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device = DEVICE, requires_grad: bool = False) -> Any:
        if isinstance(inner, OnGpu):  # accelerate makes a parameter by its class
            return torch.nn.Parameter(inner, requires_grad)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves = tree_leaves((args, dict(kwargs)))
    on = [leaf for leaf in leaves if isinstance(leaf, OnGpu)]
    off = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnGpu)]
    devices = {each.device for each in on}
    if func in _INDEXED:
        off = [each for each in (args[0], *args[2:3]) if not isinstance(each, OnGpu)]
    if on and func not in _CROSSING and (len(devices) > 1 or any(each.dim() for each in off)):
        raise RuntimeError(f"{func} has operands on two devices: {[tuple(t.shape) for t in (*on, *off)]}")
    if on and func is _aten._fused_sdp_choice.default:
        return 0  # attention without a kernel of the device
    named = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    target = args[0].device if func is _aten.copy_.default else next(iter([*named, *devices]), None)
    to_gpu = target is not None and target.type in (DEVICE.type, SECOND.type)
    target = torch.device(target.type, 0) if to_gpu else target
    wrapped = args, dict(kwargs)
    there = tree_map_only(torch.device, lambda device: torch.device("cpu"), (args, dict(kwargs)))
    args, kwargs = tree_map_only(OnGpu, lambda tensor: tensor.inner, there)
    if on and func is _aten.histc.default and not args[0].is_floating_point():  # CUDA's counts integers
        return OnGpu(func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype), target)
    known = {id(each.inner): each for each in on}

    def placed(result: torch.Tensor) -> torch.Tensor:
        own = known.get(id(result))
        if own is not None and own.device == target:
            return own  # in place
        if own is not None or any(result is each for each in off):
            result = result.clone()
        return OnGpu(result, target) if to_gpu else result

    results = tree_map_only(torch.Tensor, placed, func(*args, **kwargs))
    if torch.Tag.inplace_view in func.tags and args[0].shape != wrapped[0][0].shape:
        with no_dispatch():  # the shape of the wrapper, as of what is in it
            func(*wrapped[0], **wrapped[1])
    return results


def _empty_strided(size: Any, stride: Any, **options: Any) -> torch.Tensor:
    """For constructors in C++ and in other threads, which pass by the mode."""
    return OnGpu(torch.empty_strided(size, stride, dtype=options.get("dtype")), options["device"])


def _empty(size: Any, **options: Any) -> torch.Tensor:
    return OnGpu(torch.empty(size, dtype=options.get("dtype")), options["device"])


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    source, result = (each.inner if isinstance(each, OnGpu) else each for each in (source, target))
    result.copy_(source)
    return target


_LIBRARY = torch.library.Library("aten", "IMPL")
for _backend in ("PrivateUse1", "Lazy"):
    _LIBRARY.impl("empty_strided", _empty_strided, _backend)
    _LIBRARY.impl("empty.memory_format", _empty, _backend)
    _LIBRARY.impl("_copy_from", _copy_from, _backend)


class _Mode(TorchDispatchMode):
    """Makes tensors on the fake GPU for calls that name it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Generator(torch.Generator):
    """On the CPU, whatever the device."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls, "cpu")


def _device_map(model: Any, device_map: Any, max_memory: Any, quantizer: Any) -> Any:
    """Split the model in the middle of its blocks, where transformers would go by memory."""
    if device_map != "auto":
        return device_map
    trunk, found = model.base_model_prefix, {}
    for name, child in model.base_model.named_children():
        blocks = isinstance(child, torch.nn.ModuleList)
        names = [f"{name}.{number}" for number in range(len(child))] if blocks else [name]
        half = len(names) // 2 if blocks else len(names) * (not any("." in path for path in found))
        found |= {path: int(place >= half) for place, path in enumerate(names)}
    head = 0 if model.config.tie_word_embeddings else 1
    places = {**{f"{trunk}.{path}": number for path, number in found.items()}, "lm_head": head}
    return {path: str((DEVICE, SECOND)[number]) for path, number in places.items()}


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let prefed find the fake GPU as its device."""
    with pytest.MonkeyPatch.context() as patch:
        for room in ("models.backbone", "models.pretrained", "align.judge.local"):
            patch.setattr(f"prefed.{room}.find_device", lambda name: DEVICE)
        patch.setattr("transformers.modeling_utils._get_device_map", _device_map)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "get_device_name", str)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 34, 1 << 34))
        patch.setattr(
            optimizer, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE.type, SECOND.type]
        )
        patch.setattr("prefed.core.lazy.torch.Generator", _Generator)
        patch.setattr(torch, "Generator", _Generator)
        # Views of a wrapped tensor cannot be inference tensors.
        patch.setattr(torch, "inference_mode", torch.no_grad)
        with _Mode():
            yield


CASES: dict[str, dict[str, Any]] = {
    "kept": {"rounds": 2, "method": {"name": "feddpo", "optimizer_state": "kept"}},
    "kept, personal": {"rounds": 2, "method": {"name": "fedpdpo", "optimizer_state": "kept"}},
    "moe": {"model": {"name": "moe"}},
    "moe, align": {"model": {"name": "moe"}, "method": {"name": "fedbis"}, "align": {}},
    "all weights": {"model": {"train": "full"}},
    "plain path": {"model": {"fast": False}, "method": {"name": "fedpdpo"}},
    "checkpointing": {"model": {"checkpointing": True}},
    "llama": {"model": {"name": "llama", "checkpointing": True}, "method": {"name": "fedper"}},
    "fedex": {"merge": {"lora": "fedex"}},
    "flora, ranks": {"rounds": 2, "merge": {"lora": "flora", "ranks": {"left": 1}}},
    "kto": {"data": {"format": "thumbs"}, "method": {"name": "ditto", "objective": "kto"}},
    "ppo": {"method": {"name": "feddpo", "objective": "ppo", "reward_model": "reward"}},
    "align": {"method": {"name": "fedbis"}, "align": {}},
    "align, tastes": {"method": {"name": "fedvpa"}, "align": {"tastes": "posteriors", "generations": 1}},
    "judge": {"judge": True},
}
"""Name → changes to a run of one step of FedDPO; ``align`` and ``judge`` follow the run."""
LIMIT = 1e-4
"""Other kernels round differently, and Adam divides by small numbers."""
_ALIGN = {"completions": 2, "max_new_tokens": 6, "temperature": 1.0, "lr": 1e-3, "batch_size": 4, "epochs": 1}
_LEAST_TEXTS = 6


@functools.cache
def make_models(folder: Path) -> None:
    """A Llama, a mixture of four experts, two per token, and a reward model; with the place's tokenizer."""
    from transformers import AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig
    from transformers import GPT2ForSequenceClassification as Reward
    from transformers import Qwen3MoeForCausalLM as Moe

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, **heads, **ends}
    llama = LlamaConfig(intermediate_size=64, bos_token_id=None, **sizes)
    moe = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **sizes)
    reward = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, num_labels=1, **ends)
    torch.manual_seed(0)
    for name, model in (("llama", LlamaForCausalLM(llama)), ("moe", Moe(moe)), ("reward", Reward(reward))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def tables_of(folder: Path, case: str, gpus: int) -> dict[str, Any]:
    """The experiment of a method or of one of :data:`CASES`."""
    from finished import small_experiment

    tables, changes = small_experiment(folder, rounds=1), CASES.get(case, {"method": {"name": case}})
    tables["model"] |= {"gpus": gpus, **changes.get("model", {})}
    tables["method"] |= {"local_steps": 1, **changes.get("method", {})}
    tables["data"] |= changes.get("data", {})
    for table, key in (("model", "name"), ("method", "reward_model")):
        if (name := tables[table].get(key)) in ("llama", "moe", "reward"):
            make_models(folder)
            tables[table][key] = str(folder / name)
    return {**tables, **{name: changes[name] for name in ("rounds", "merge") if name in changes}}


def outcome(folder: Path, case: str, gpus: int, out: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Make a run; return its loss and all tensors that it leaves, and the texts that it generates."""
    from safetensors.torch import load_file

    from prefed import Experiment, run
    from prefed.align.judge.local import LocalJudge, RewardJudge
    from prefed.align.judge.questions import NumberedPrompt, Question
    from prefed.config import AlignConfig
    from prefed.config.align import JudgeOptions
    from prefed.runs.align import align
    from prefed.runs.loaded_run import load_run
    from prefed.runs.responses import Models
    from prefed.store import RunReader
    from prefed.train.generation import Sampling

    changes, texts = CASES.get(case, {}), list[str]()
    done = run(Experiment.model_validate(tables_of(folder, case, gpus)), out)
    left = {client: RunReader(out).client(client) for client in ("left", "right")}
    states = {"server": done.server, **{name: state for name, state in left.items() if state is not None}}
    found = {
        f"{name}/{group}": each.flat
        for name, state in states.items()
        for group, each in state.tensors.items()
    }
    measured = {name: done.rounds[-1][name] for name in ("loss", "preference_accuracy")}
    found |= {name: torch.tensor(each) for name, each in measured.items() if each is not None}
    prompts = [f"Case {number}:" for number in range(30, 36)]
    if "align" in changes:
        file = folder / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        align(out, AlignConfig.model_validate({"prompts": str(file), **_ALIGN, **changes["align"]}))
        rows = (out / "align/completions.jsonl").read_text().splitlines()
        texts = [json.loads(row)["completion"] for row in rows]
        found |= load_file(out / "align/adapter/adapter_model.safetensors")
    if "judge" in changes:
        make_models(folder)
        models = Models(load_run(out), Sampling(max_tokens=6, temperature=1.0))
        asked = [NumberedPrompt(*each) for each in enumerate(prompts)]
        texts = list(models.own(None).texts(asked, out / "texts", lambda *done: None).values())
        questions = [Question(prompts[0], one, other) for one, other in zip(texts, prompts, strict=True)]
        options = JudgeOptions(judge_tokens=4)
        for judge, name in ((LocalJudge, "moe"), (RewardJudge, "reward")):
            verdicts = list(judge(str(folder / name), options).compare(questions))
            # A reward has more digits than two devices share.
            texts += [each.text if judge is LocalJudge else str(each.preference) for each in verdicts]
    return found, texts


@functools.cache
def expected(folder: Path, case: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The outcome on the CPU."""
    return outcome(folder, case, 1, folder / f"{case}-cpu")


def apart(folder: Path, case: str) -> float:
    """The largest difference between the tensors and losses of a run on either device."""
    case, _, gpus = case.partition("@")
    on_cpu, texts = expected(folder, case)
    with fake_gpu():
        on_gpu, others = outcome(folder, case, int(gpus or 1), folder / f"{case}-{gpus or 1}")
    assert (on_cpu.keys(), texts) == (on_gpu.keys(), others), f"{case}: {texts} and {others}"
    assert len(texts) >= _LEAST_TEXTS or not {"align", "judge"} & CASES.get(case, {}).keys()
    return max(float((on_gpu[name] - each).abs().max()) for name, each in on_cpu.items())


def main() -> None:
    """Run the methods and cases that are named, or all."""
    from finished import small_place
    from prefed.methods import METHODS

    torch.set_num_threads(1)
    with fake_gpu(), pytest.raises(RuntimeError, match="two devices"):
        torch.ones(2, device=DEVICE) + torch.ones(2)
    with fake_gpu(), pytest.raises(RuntimeError, match="two devices"):
        torch.ones(2, device=DEVICE) + torch.ones(2, device=SECOND)
    with TemporaryDirectory() as name:
        folder = small_place(Path(name))
        far = {}
        every = [*METHODS, *CASES]
        for case in sys.argv[1:] or [*every, *(f"{case}@2" for case in every if case != "all weights")]:
            far[case] = apart(folder, case)
            print(json.dumps([case, far[case]]), flush=True)
    if not all(each < LIMIT for each in far.values()):
        raise SystemExit(f"more than {LIMIT:g} apart")


if __name__ == "__main__":
    main()
