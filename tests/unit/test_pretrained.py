"""Folders of models from somebody else: nothing in them is run."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefed.models.pretrained import ModelError, load_pretrained


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
    with pytest.raises(ModelError, match="prefed runs none that comes with a model"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_weights_that_hold_code_are_refused(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 1, "n_layer": 1, "vocab_size": 8, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"x": Touch(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"may hold code; give them as safetensors$"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()
