"""An alignment without a run: a tiny model, prompts, and selectors at random places."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from finished import small_place
from prefed.align import Alignment, ClientPrompts, Selectors, align
from prefed.config import AlignConfig
from prefed.core import Key
from prefed.data import DataConfig, SelectorConfig
from prefed.data.tokens import prompt_hash
from prefed.models import ModelConfig, load_backbone
from small_models import away

HELD = [f"Case {number}:" for number in range(24)]
"""The prompts that clients hold."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny model; a file of twelve prompts, of which clients hold two and one is there twice."""
    folder = small_place(tmp_path_factory.mktemp("place"))
    texts = [*(f"Case {number}:" for number in range(22, 31)), "Case 30:", "A word", "Two words", "Up"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="module")
def selectors(place):
    """Three selectors at random places."""
    model = ModelConfig(name=str(place / "model"), lora={"rank": 2})
    backbone = load_backbone(model, Key(0))
    models = {f"selector-{k}": away(backbone.layout, backbone.initial, scale=0.3, seed=k) for k in range(3)}
    return Selectors(backbone, models, SelectorConfig(), max_length=64)


voters = selectors


@pytest.fixture
def alignment(place, selectors, tmp_path):
    return make_alignment(place, selectors, tmp_path / "align")


def make_alignment(place, selectors, folder):
    config = AlignConfig(
        prompts=str(place / "prompts.jsonl"),
        completions=3,
        pairs="all",
        max_new_tokens=6,
        temperature=1.0,
        generate=5,
        lr=1e-3,
        batch_size=4,
        epochs=2,
        held_out=0.25,
    )
    return Alignment(
        folder=folder,
        config=config,
        seed=5,
        model=ModelConfig(name=str(place / "model"), lora={"rank": 2, "dropout": 0.1}),
        data=DataConfig(train="x.jsonl", partition={"by": "iid", "clients": 1}, max_length=64),
        max_tokens=4096,
        client_prompts=lambda: ClientPrompts(
            np.array([prompt_hash(text) for text in HELD], np.uint64), HELD[0]
        ),
        selectors=lambda: selectors,
        sources={"clients": "a", "selectors": "b"},
    )


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def content(folder):
    """File → its bytes; a JSON file without its clocks."""
    clocks = ("seconds", "tokens_per_second", "digest")

    def unclocked(value):
        if isinstance(value, dict):
            return {key: unclocked(item) for key, item in value.items() if key not in clocks}
        return [unclocked(item) for item in value] if isinstance(value, list) else value

    return {
        str(path.relative_to(folder)): unclocked(json.loads(path.read_bytes()))
        if path.suffix == ".json"
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_relative_to(folder / "cache")
    }


class Killed(BaseException):
    """What ends a process."""


def align_killed(alignment, monkeypatch, *, at, most):
    """Align in processes that are each killed in the middle of write or rename number ``at``, until one comes
    through; how many there were. After ``most`` of them it gives up."""
    left, write, rename = [0], os.write, Path.rename

    def killed():
        left[0] -= 1
        return left[0] == 0

    def half(handle, data):
        if killed():
            write(handle, data[: len(data) // 2])
            raise Killed
        return write(handle, data)

    def no_rename(self, target):
        if killed():
            raise Killed
        return rename(self, target)

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(Path, "rename", no_rename)
    processes = 0
    while processes < most:
        left[0], processes = at, processes + 1
        # A new process has nothing in memory.
        try:
            align(replace(alignment))
            break
        except Killed:
            continue
    return processes
