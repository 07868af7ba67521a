"""Whole runs on offline PPO: what a client keeps, resuming, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import toy
from finished import small_experiment
from prefed import Experiment, run
from prefed.core import Key
from prefed.models.tiny import make_tiny
from prefed.runs.loaded_run import load_run
from prefed.store import RunReader
from small_models import save_reward_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two small blocks, a random reward model of one, and 18 pairs of two workers."""
    folder: Path = tmp_path_factory.mktemp("place")
    draw, lines = np.random.default_rng(0), []
    for number in range(24):
        prompt = f"Question {draw.integers(1000)}?"
        line = {"prompt": prompt, "chosen": f" yes please {number}", "rejected": f" no thanks {number}"}
        lines.append({**line, "worker": f"w{number % 2}", "split": "train" if number < 18 else "test"})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [line["prompt"] + line["chosen"] for line in lines]
    make_tiny(folder / "model", texts, Key(0), layers=2, width=32, heads=2, vocabulary=280, steps=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    save_reward_model(folder / "reward", tokenizer)
    return folder


def experiment(place: Path, method: str = "feddpo", **changes: Any) -> Experiment:
    ppo = {"objective": "ppo", "reward_model": str(place / "reward")}
    tables = small_experiment(place, method={"name": method, "lr": 0.01, "local_steps": 2, **ppo})
    tables["data"] |= {"train": str(place / "data.jsonl"), "test": None}
    tables["model"]["lora"]["dropout"] = 0.1
    return Experiment.model_validate({**tables, **changes})


def test_a_baseline_runs_on_it(place: Path, tmp_path: Path) -> None:
    """The critic moves, is personal and never at the server; scores are kept with the run."""
    result = run(experiment(place, "fedrep"), tmp_path / "run")
    assert all(np.isfinite(record["loss"]) for record in result.rounds)
    left = RunReader(tmp_path / "run")
    critics = []
    for client in ("w0", "w1"):
        state = left.client(client)
        assert state is not None
        critics.append(state.tensors["personal"]["value/weight"])
        assert critics[-1].any()
    assert not torch.equal(*critics)
    server = left.server()
    assert not [name for group in server.tensors.values() for name in group if name.startswith("value")]
    scores = list((tmp_path / "run/cache/reference").glob("rewards-*.f32"))
    assert len(scores) == 1
    assert np.isfinite(np.fromfile(scores[0], np.float32)).any()


def test_interrupted_and_resumed_it_ends_the_same(place: Path, tmp_path: Path) -> None:
    """The second process computes the reference's tokens anew, bit for bit."""
    run(experiment(place), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(experiment(place), tmp_path / "parts", callbacks=[toy.InterruptAt(5)])
    run(experiment(place), tmp_path / "parts", resume=True)
    assert toy.outcome(tmp_path / "parts") == toy.outcome(tmp_path / "whole")


def test_a_finished_run_predicts_after_steps_of_it(place: Path, tmp_path: Path) -> None:
    """Per-FedAvg takes inner steps before it predicts, here on PPO: an opened run finds its reward model."""
    run(experiment(place, "perfedavg"), tmp_path / "run")
    opened = load_run(tmp_path / "run", data=True)
    adapted, shared = opened.model("w0"), opened.job.shared(opened.method.publish(opened.server, "w0"))
    lora = [name for name in shared if name.startswith("lora")]
    assert not adapted.select(lora).equal(shared.select(lora))
