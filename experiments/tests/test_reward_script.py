"""The script that trains a reward model on one's own pairs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from experiment_scripts import script
from prefed.align.judge import Question
from prefed.align.judge.local import RewardJudge
from prefed.config.align import JudgeOptions
from prefed.core import Key
from prefed.data.record import parse_prompt
from prefed.models.tiny import make_tiny
from prefed.train.reward_model import RewardModel

CHAT = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant> {% endif %}"
TRUNKS = {"lora": ("--lr", 3e-2), "frozen": ("--lr", 1e-1), "full": ("--lr", 1e-2)}


def pairs(start: int, stop: int) -> list[dict[str, Any]]:
    """Pairs whose responses differ in one word; every other prompt is a message."""
    rows = []
    for k in range(start, stop):
        text = f"Question {k}?"
        prompt = [{"role": "user", "content": text}] if k % 2 else text
        rows.append({"prompt": prompt, "chosen": f" I say {k} yes", "rejected": f" I say {k} no"})
    return rows


def swapped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of two layers, with a chat template."""
    folder = tmp_path_factory.mktemp("trunk") / "model"
    texts = [
        f"<user> Question {k}?\n<assistant> I say {k} {word}" for k in range(40) for word in ("yes", "no")
    ]
    make_tiny(folder, texts, Key(0), layers=2, width=32, heads=2, vocabulary=320, steps=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("reverse", [False, True])
def test_it_learns_the_preference_and_its_reverse(
    model: Path, tmp_path: Path, trunk: str, reverse: bool
) -> None:
    """No scorer is right on more than half of the pairs and of their reverses together, so one that is not
    trained for them cannot get both right; each trained one orders all held-out pairs correctly.
    The judge's scores are those of the folder's model for the whole text, one text at a time. LoRA moves the
    linear layers of the blocks, next to the head."""
    rows, held = pairs(0, 32), pairs(32, 40)
    if reverse:
        rows, held = swapped(rows), swapped(held)
    files = write(tmp_path / "train.jsonl", rows), write(tmp_path / "test.jsonl", held)
    out = tmp_path / "reward"
    options = ["--trunk", trunk, "--epochs", 6, *TRUNKS[trunk], "--max-length", 32]
    printed = script("reward_model.py", *files, "--model", model, "--out", out, *options)
    assert f"{out}: held-out accuracy 1.000 on 8 pairs (trained on 32: trunk {trunk}, seed 0" in printed
    plain, report = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    base = AutoModelForSequenceClassification.from_pretrained(model).state_dict()
    moved = {name for name, tensor in plain.state_dict().items() if not torch.equal(tensor, base[name])}
    linear = {name for name in base if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight"))}
    assert len(linear) == 8
    expected_moves = {"frozen": set(), "lora": linear, "full": base.keys() - {"score.weight"}}
    assert moved == expected_moves[trunk] | {"score.weight"}
    tokenizer = AutoTokenizer.from_pretrained(out)

    def score(prompt: Any, response: str) -> float:
        if isinstance(prompt, str):
            ids = tokenizer(prompt + response)["input_ids"]
        else:
            turns = [*prompt, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip()
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            return float(plain.eval()(torch.tensor([ids])).logits)

    expected = [[score(row["prompt"], row[key]) for key in ("chosen", "rejected")] for row in held]
    questions = [Question(parse_prompt(row["prompt"]), row["chosen"], row["rejected"]) for row in held]
    verdicts = list(RewardJudge(str(out), JudgeOptions(device="cpu")).compare(questions))
    judged = [
        [float(x) for x in re.findall(r"-?[0-9.]+(?:e-?[0-9]+)?", verdict.text)] for verdict in verdicts
    ]
    np.testing.assert_allclose(judged, expected, rtol=1e-4, atol=1e-4)
    assert [verdict.preference for verdict in verdicts] == [1.0] * 8


def test_the_limit_of_the_length_is_the_judges_too(model: Path, tmp_path: Path) -> None:
    """A long prompt loses its beginning. Without a test file a tenth of the pairs, 2, is held out."""
    train, out = write(tmp_path / "train.jsonl", pairs(0, 20)), tmp_path / "reward"
    printed = script("reward_model.py", train, "--model", model, "--out", out, "--max-length", 24)
    assert "on 2 pairs (trained on 18: trunk lora" in printed
    assert "max length 24)" in printed
    chosen, _ = RewardModel(str(out), torch.device("cpu")).encode("again " * 99, " I say yes", " no")
    assert len(chosen["input_ids"]) == 24
