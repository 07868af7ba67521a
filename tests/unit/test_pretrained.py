"""Folders of models from somebody else: nothing in them is run."""

import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    modeling_utils,
)
from transformers.integrations.accelerate import _get_device_map
from transformers.utils import logging as transformers_logging

from prefed.config import ConfigError, Experiment
from prefed.core import Key
from prefed.models import ModelConfig, make_backbone
from prefed.models.pretrained import (
    ModelError,
    find_device,
    load_causal,
    load_pretrained,
    placement,
    precision_notes,
    with_dtype,
)
from prefed.runs.build import of_parent
from prefed.runs.start_or_resume import fitted
from preferences import jsonl, tokenizer
from small_models import causal
from waiting import WATCHDOG


class Touch:
    """Unpickled without care, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def load(folder):
    return load_pretrained(AutoModelForCausalLM, "[model] name", str(folder), "causal language model")


def test_code_that_comes_with_a_model_is_not_run_nor_asked_about(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    about = {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ModelError, match="it requires custom code, which prefed does not run"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_weights_that_hold_code_are_refused(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 1, "n_layer": 1, "vocab_size": 8, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"x": Touch(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"its weights may contain code; convert them to safetensors$"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


MODEL = {"model_type": "gpt2", "n_embd": 8, "n_head": 1, "n_layer": 1, "vocab_size": 8, "n_positions": 64}
MODEL |= {"bos_token_id": 0, "eos_token_id": 0}
EXPERIMENT = """
rounds = 1
data = {{ train = "pairs.jsonl", partition = {{ by = "iid", clients = 1 }} }}
method = "feddpo"
model = {{ name = "./{name}", device = "cpu" }}
"""


def folder_of(path, *parts):
    """A folder with these parts of a model: ``config``, ``weights`` and ``vocabulary``, or others' files."""
    path.mkdir()
    if "config" in parts:
        (path / "config.json").write_text(json.dumps(MODEL))
    if "weights" in parts:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL)).save_pretrained(path / "made")
        (path / "made" / "model.safetensors").rename(path / "model.safetensors")
    if "vocabulary" in parts:
        tokenizer().save_pretrained(path)
    if "settings" in parts:
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    if "garbage" in parts:
        (path / "tokenizer.model").write_text("garbage")
    if "notes" in parts:
        (path / "notes.txt").write_text("nothing of a model")


FOLDERS = {
    "empty": ((), ["is empty"]),
    "notes": (("notes",), ["no config.json, no weights, no tokenizer"]),
    "no-tokenizer": (("config", "weights"), ["no tokenizer"]),
    "no-weights": (("config", "vocabulary"), ["no weights"]),
    "no-config": (("vocabulary", "weights"), ["no config.json"]),
    "no-vocabulary": (("config", "weights", "settings"), ["tokenizer", "no vocabulary"]),
}
"""Folder → what it holds, and what the message names."""
EACH = """
import sys
import prefed
from prefed.ui.cli import app
for name in sys.argv[1:]:
    for how in ("python", "command"):
        for stream in (sys.stdout, sys.stderr):
            print("##", name, how, file=stream, flush=True)
        try:
            if how == "python":
                prefed.run(prefed.Experiment.load(f"{name}.toml"), f"{name}-run")
            app(["run", f"{name}.toml", "--out", f"{name}-out"])
        except ValueError as error:
            print(type(error).__name__, error)
        except SystemExit:
            pass
"""


@pytest.mark.parametrize("part", ["attn", "experts"])
def test_a_kernel_that_a_model_names_is_not_fetched(tmp_path, monkeypatch, part):
    """Transformers would download and run it. The control for attention is transformers alone."""
    asked = []
    monkeypatch.setattr(modeling_utils, "is_kernel", lambda name: asked.append(name))
    about = {**MODEL, f"_{part}_implementation": "eve/kernel:run"}
    GPT2LMHeadModel(GPT2Config(**MODEL)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ModelError, match="it requires custom code, which prefed does not run"):
        load(tmp_path)
    assert "eve/kernel:run" not in asked
    if part == "attn":
        with suppress(ValueError, KeyError):
            AutoModelForCausalLM.from_pretrained(tmp_path)
        assert "eve/kernel:run" in asked


def test_a_folder_that_is_no_model_gets_one_line(tmp_path):
    """The command prints its header and one line, with the key, the folder and what is missing. A Python
    program's own standard error and output hold nothing of transformers' either."""
    pairs = [{"prompt": "a", "chosen": str(n), "rejected": "b"} for n in range(20)]
    jsonl(tmp_path / "pairs.jsonl", pairs)
    for name, (parts, _) in FOLDERS.items():
        folder_of(tmp_path / name, *parts)
        (tmp_path / f"{name}.toml").write_text(EXPERIMENT.format(name=name))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    env.pop("TRANSFORMERS_VERBOSITY", None)
    words = [sys.executable, "-c", EACH, *FOLDERS]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=WATCHDOG)
    lines: dict[str, list[str]] = {}
    for stream in (done.stdout, done.stderr):
        for part in stream.split("## ")[1:]:
            heading, *rest = part.splitlines()
            lines.setdefault(heading, []).extend(rest)
    assert len(lines) == 2 * len(FOLDERS), done.stderr
    for name, (_, named) in FOLDERS.items():
        for heading in (f"{name} python", f"{name} command"):
            (line,) = lines[heading][heading.endswith("command") :]
            assert f"[model] name = '{tmp_path / name}'" in line
            assert all(words in line for words in named)
            assert len(line) < 400


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path):
    """Transformers makes one of a folder that has none, and every text would have no tokens."""
    folder_of(tmp_path / "mine", "config", "weights", "settings")
    assert AutoTokenizer.from_pretrained(tmp_path / "mine")("a text")["input_ids"] == []
    with pytest.raises(ModelError, match="its tokenizer has no vocabulary except special tokens"):
        load_pretrained(AutoTokenizer, "[model] name", str(tmp_path / "mine"), "tokenizer")


@pytest.mark.parametrize("name", ["cuda:0", "cuda:3", "gpu", 0])
def test_the_error_for_an_unknown_device_lists_what_there_is(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"'auto', 'cpu', 'cuda', 'mps'; this machine has cpu") as error:
        ModelConfig(name="m", device=name)
    assert ('[engine] devices = ["cuda:' in str(error.value)) == str(name).startswith("cuda:")
    with pytest.raises(ModelError, match=r"device = 'cuda' is not available; this machine has cpu"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"this machine has cuda \(2 of them\), cpu") as error:
        ModelConfig(name="m", device=name)
    assert ('[engine] devices = ["cuda:' in str(error.value)) == str(name).startswith("cuda:")


COMPLETE = {"missing_keys": (), "mismatched_keys": (), "unexpected_keys": ()}
"""What transformers reports of a checkpoint that fits its model."""


@pytest.fixture
def gpu(monkeypatch):
    """PyTorch reports a CUDA device with bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: True)


def checkpoint(folder, **more):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **more}))
    return {"name": str(folder)}


@pytest.mark.parametrize(
    ("about", "settings", "dtype"),
    [
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({"torch_dtype": "float16"}, {}, "float16"),  # as transformers 4 wrote it
        ({"dtype": "float64"}, {}, "float32"),
        ({}, {}, "float32"),
        ({"dtype": "bfloat16"}, {"train": "full"}, "float32"),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, {"device": "cpu"}, "float32"),
    ],
)
def test_without_a_dtype_a_gpu_takes_the_checkpoints_and_a_cpu_float32(about, settings, dtype, gpu, tmp_path):
    model = ModelConfig.model_validate({**checkpoint(tmp_path / "m", **about), **settings})
    assert with_dtype(model) == model.model_copy(update={"dtype": dtype})
    cpu = model.device == "cpu"
    assert precision_notes(model) == ([] if cpu else [f"the model is in {dtype} on cuda"])


def test_a_resumed_run_keeps_the_dtype_that_it_started_with(gpu, tmp_path):
    """A run that started on a GPU in bfloat16 is resumed on a CPU, and one of a CPU on a GPU."""
    place = checkpoint(tmp_path / "m", dtype="bfloat16")
    data = {"train": "t.jsonl", "partition": {"by": "iid", "clients": 1}}

    def experiment(**model):
        tables = {"rounds": 1, "data": data, "method": "feddpo", "model": {**place, **model}}
        return Experiment.from_tables(tables, "file")

    on_gpu, on_cpu = fitted(experiment()), fitted(experiment(device="cpu"))
    assert (on_gpu.model.dtype, on_cpu.model.dtype) == ("bfloat16", "float32")
    assert fitted(experiment(device="cpu"), on_gpu).model.dtype == "bfloat16"
    assert fitted(experiment(), on_cpu).model.dtype == "float32"
    assert fitted(experiment(dtype="float16"), on_cpu).model.dtype == "float16"


@pytest.mark.parametrize("cost", [0.4, 1.0, 112.3])
def test_bfloat16_on_a_cpu_that_multiplies_it_more_slowly_is_noted(cost, monkeypatch):
    monkeypatch.setattr("prefed.models.pretrained.bfloat16_cost", lambda: cost)
    first, *hint = precision_notes(ModelConfig(name="m", device="cpu", dtype="bfloat16"))
    assert first == "the model is in bfloat16 on cpu"
    assert ["takes 112 times as long" in line for line in hint] == ([] if cost <= 1 else [True])


def test_products_in_float32_on_a_gpu_do_not_use_tf32(gpu, monkeypatch):
    """The choice is made on a GPU only, before anything is computed."""
    chosen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *args, **more: module)
    monkeypatch.setattr("prefed.models.backbone.with_parts", lambda *args: None)
    for device in ("cpu", "cuda"):
        make_backbone(causal("llama"), None, ModelConfig(name="m", device=device, dtype="float32"), Key(0))
    assert chosen == ["highest"]


@pytest.fixture
def two_gpus(gpu, monkeypatch):
    """Two devices of 80 GB, and the names of CUDA devices that transformers takes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_a_model_on_two_gpus_has_half_of_its_blocks_on_each(two_gpus):
    """A Llama of 70 billion parameters takes 141 GB in bfloat16, more than one device of 80 GB. Its equal
    blocks stay whole and in order, embeddings and head are 1.2 blocks each, so either device has 36 to 44 of
    80 blocks. The head and the norm before it are on the last device, and nothing is on the disk."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    config = LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    assert sum(weight.nbytes for weight in model.parameters()) > 141 * 10**9
    found = _get_device_map(model, **placement(torch.device("cuda"), 2), hf_quantizer=None)
    blocks = [found[f"model.layers.{number}"] for number in range(80)]
    assert blocks == sorted(blocks)
    assert 36 <= blocks.count(0) <= 44
    assert (found["model.embed_tokens"], found["model.norm"], found["lm_head"]) == (0, 1, 1)
    assert set(found.values()) == {0, 1}
    assert placement(torch.device("cuda")) == {"device_map": {"": 1}}


def test_a_process_with_fewer_gpus_than_the_model_needs_is_refused(two_gpus):
    with pytest.raises(ModelError, match=r"gpus = 3, but a process here has 2; lower gpus, or start fewer"):
        placement(torch.device("cuda"), 3)


def test_a_model_that_does_not_fit_on_its_gpus_is_refused(two_gpus, tmp_path, monkeypatch):
    places = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": "disk"}
    made = SimpleNamespace(hf_device_map=places, named_parameters=dict)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, **more: (made, COMPLETE))
    with pytest.raises(ModelError, match=r"does not fit in the free memory of 2 GPUs; raise \[model\] gpus"):
        load_causal(ModelConfig(**checkpoint(tmp_path / "m", dtype="bfloat16"), gpus=2))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"model": {"train": "full"}}, "gpus = 2 spreads a frozen model over CUDA devices: remove train"),
        ({"model": {"device": "cpu"}}, "gpus = 2 spreads a frozen model over CUDA devices: remove device"),
        ({"engine": {"devices": ["cuda:1"]}}, r"remove \[engine\] devices, and name devices in CUDA_VISIBLE"),
        ({"engine": {"name": "ray"}}, "set ray.num_gpus = 2"),
        ({"engine": {"name": "ray", "ray": {"num_gpus": 1}}}, "set ray.num_gpus = 2"),
        ({"engine": {"stack": 2}}, "stack = 2 needs the model on one device"),
    ],
)
def test_settings_that_contradict_several_gpus_are_refused(tables, words):
    data = {"train": "t.jsonl", "partition": {"by": "iid", "clients": 2}}
    base = {"rounds": 1, "data": data, "method": "feddpo"}
    model = {"name": "m", "gpus": 2, **tables.get("model", {})}
    with pytest.raises(ConfigError, match=words):
        Experiment.from_tables({**base, **tables, "model": model}, "file")


@pytest.mark.parametrize(
    ("tables", "device"),
    [
        ({"engine": {"workers": 2}}, "cpu"),
        ({"engine": {"name": "ray"}}, "cpu"),
        ({}, "auto"),  # it trains
        ({"engine": {"workers": 2}, "report": {"prompts": ["Hello"]}}, "auto"),  # it writes answers
        ({"engine": {"workers": 2}, "method": "fedvpa"}, "auto"),  # it infers tastes
        ({"engine": {"workers": 2}, "model": {"dtype": "float16"}}, "auto"),
        ({"engine": {"workers": 2}, "model": {"quantize": "nf4"}}, "auto"),
    ],
)
def test_a_process_whose_workers_do_the_work_leaves_the_gpu_to_them(tables, device, gpu, tmp_path):
    model = {**checkpoint(tmp_path / "m", dtype="bfloat16"), **tables.get("model", {})}
    tokenizer().save_pretrained(tmp_path / "m")
    data = {"train": "t.jsonl", "partition": {"by": "iid", "clients": 2}}
    base = {"rounds": 1, "data": data, "method": "feddpo"}
    experiment = fitted(Experiment.from_tables({**base, **tables, "model": model}, "file"))
    own = {"device": device, "kernels": None if device == "cpu" else experiment.model.kernels}
    assert of_parent(experiment).model == experiment.model.model_copy(update=own)


TINY = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
LAYER = "model.layers.1.input_layernorm.weight"


def changed_weights(folder, change):
    """Write a Llama of two layers whose weights, by name, went through ``change``."""
    LlamaForCausalLM(LlamaConfig(**TINY, num_hidden_layers=2, tie_word_embeddings=True)).save_pretrained(
        folder
    )
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: {f"base_model.model.{name}": value for name, value in w.items()},
            r"no weights for .* and \d+ more; remove the prefix 'base_model.model.'",
        ),
        (lambda w: {f"module.{name}": value for name, value in w.items()}, "remove the prefix 'module.'"),
        (
            lambda w: {name: value for name, value in w.items() if name != LAYER},
            f"no weights for {LAYER}; complete it, or correct config.json",
        ),
        (
            lambda w: {name.replace("q_proj.", "q_proj.base_layer."): value for name, value in w.items()},
            "q_proj.weight; it holds an adapter; merge it",
        ),
        (lambda w: {**w, LAYER: w[LAYER] * torch.nan}, f"not finite in float32: {LAYER}; the checkpoint is"),
        (lambda w: {**w, LAYER: w[LAYER][:4].clone()}, "size mismatch|mismatch|no weights for"),
    ],
)
def test_a_checkpoint_without_all_weights_is_refused(change, words, tmp_path):
    """Transformers would initialise them at random, so that two equal runs differ."""
    changed_weights(tmp_path / "m", change)
    with pytest.raises(ModelError, match=words) as error:
        load(tmp_path / "m")
    assert f"[model] name = '{tmp_path / 'm'}'" in str(error.value)


def test_a_config_with_more_layers_than_the_file_is_refused_and_with_fewer_is_reported(tmp_path, caplog):
    changed_weights(tmp_path / "m", lambda weights: weights)
    load(tmp_path / "m")
    assert not caplog.records  # the head is tied, and needs no weights of its own
    path = tmp_path / "m" / "config.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.2\."):
        load(tmp_path / "m")
    path.write_text(json.dumps({**about, "tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"no weights for lm_head\.weight"):
        load(tmp_path / "m")
    path.write_text(json.dumps({**about, "num_hidden_layers": 1}))
    load(tmp_path / "m")
    (record,) = caplog.records
    assert "the model does not read these weights of the checkpoint: model.layers.1." in record.getMessage()


@pytest.mark.parametrize("propagate", [False, True])
def test_what_transformers_warns_of_is_logged_once(tmp_path, caplog, monkeypatch, propagate):
    """An unknown key of the rotary settings is ignored, so the model may not be the one that was trained.

    Transformers hands its messages on to Python's root logger where the variable CI is set.
    """
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", propagate)
    changed_weights(tmp_path / "m", lambda weights: weights)
    path = tmp_path / "m" / "config.json"
    rope = {"rope_type": "default", "rope_theta": 10000.0, "stretch": 2.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": rope}))
    load(tmp_path / "m")
    (record,) = caplog.records
    assert "transformers warns: Unrecognized keys in `rope_parameters`" in record.getMessage()


def test_an_adapter_next_to_the_weights_is_refused(tmp_path):
    """Transformers would add it to the model without a word."""
    changed_weights(tmp_path / "m", lambda weights: weights)
    (tmp_path / "m" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelError, match=r"an adapter \(adapter_config\.json\) next to the weights"):
        load(tmp_path / "m")


def test_every_token_needs_a_row_of_the_embedding():
    """Of ids 0 to 260, 261 rows have all and 260 lack the last; padding is never embedded."""
    made, config = tokenizer(), ModelConfig(name="m", device="cpu")
    model = {rows: LlamaForCausalLM(LlamaConfig(**{**TINY, "vocab_size": rows})) for rows in (260, 261)}
    make_backbone(model[261], made, config, Key(0))
    made.add_special_tokens({"pad_token": "<blank>"})
    model[261] = LlamaForCausalLM(LlamaConfig(**{**TINY, "vocab_size": 261}))
    make_backbone(model[261], made, config, Key(0))
    made.chat_template = "{{ '<|turn|>' }}"
    made.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    message = (
        r"token ids up to 262, but the model's embedding 261 rows, for ids up to 260: none for '<\|turn\|>', "
        r"which the chat template uses; use .*resize_token_embeddings\(263\)"
    )
    with pytest.raises(ModelError, match=message):
        make_backbone(LlamaForCausalLM(LlamaConfig(**{**TINY, "vocab_size": 261})), made, config, Key(0))


def test_loading_writes_nothing_to_the_terminal(tmp_path, capfd, monkeypatch):
    """Also from Python, where no command has silenced transformers; unless the user sets its verbosity."""
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    folder = tmp_path / "model"
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity_warning()
    capfd.readouterr()
    AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err
    load(folder)
    assert capfd.readouterr() == ("", "")
    transformers_logging.enable_progress_bar()
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
    load(folder)
    assert "Loading weights" in capfd.readouterr().err
    transformers_logging.disable_progress_bar()
