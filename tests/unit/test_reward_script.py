"""The script that trains a reward model of the personas."""

from __future__ import annotations

import gzip
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from prefed.core import Key
from prefed.data import Record
from prefed.models.tiny import make_tiny
from prefed.train.rewards import RewardModel

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "personas"
PAIRS = [
    {"prompt": f"Question {k}?", "chosen": f" Yes {k}", "rejected": f" No {k}", "persona": f"p{k % 2}"}
    for k in range(18)
]


def test_a_reward_model_of_the_personas_is_one_that_ppo_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says which share of the 4 test pairs it orders rightly, a multiple of a quarter, and gives every
    response one finite score."""
    for name, rows in (("train", PAIRS[:14]), ("test", PAIRS[14:])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    texts = [row["prompt"] + row["chosen"] + row["rejected"] for row in PAIRS]
    make_tiny(tmp_path / "model", texts, Key(0), layers=1, width=16, heads=2, vocabulary=280, steps=1)
    files = [str(tmp_path / f"{name}.jsonl.gz") for name in ("train", "test")]
    out = str(tmp_path / "reward")
    monkeypatch.setattr(sys, "argv", ["reward.py", *files, "--model", str(tmp_path / "model"), "--out", out])
    monkeypatch.syspath_prepend(FOLDER)
    runpy.run_path(str(FOLDER / "reward.py"), run_name="__main__")
    match = re.search(r"orders ([01]\.[0-9]+) of the test pairs", capsys.readouterr().out)
    assert match is not None
    assert float(match[1]) in (0, 0.25, 0.5, 0.75, 1)
    model = RewardModel(out, torch.device("cpu"))
    records = [Record(row["prompt"], row["chosen"], row["rejected"]) for row in PAIRS[14:]]
    texts = [(record.prompt, record.chosen, record.rejected) for record in records]
    scores = model.score([half for each in texts for half in model.encode(*each)])
    assert scores.shape == (8,)
    assert np.isfinite(scores).all()
