"""The pages for those who come from another tool: prefed's side runs, what is said of either side exists."""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

from commands import prefed_
from pages import blocks, commands
from prefed.config import Experiment
from prefed.config.new_file import example_pairs
from prefed.core import Key, Round
from prefed.methods import METHODS
from prefed.methods.base.lr_schedule import rate
from prefed.models.tiny import make_tiny
from prefed.train.losses import OBJECTIVES

PAGES = Path(__file__).resolve().parents[2] / "docs" / "coming-from"
NAMES = ("trl", "flower", "openfedllm")
SMALLER = {
    "distilbert/distilgpt2": "tiny",
    "ehartford/Wizard-Vicuna-7B-Uncensored": "tiny",
    "Anthropic/hh-rlhf": "pairs.jsonl",
    '["q_proj", "v_proj"]': '["c_attn"]',
    "rounds = 200": "rounds = 2",
    "rounds = 10\n": "rounds = 2\n",
    "local_steps = 10": "local_steps = 2",
}
"""What a page says, and what stands in its place where there is no hub and little time."""


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text("utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's pairs of four clients, and a model."""
    folder = tmp_path_factory.mktemp("coming-from")
    (folder / "pairs.jsonl").write_text(example_pairs(), "utf-8")
    rows = [json.loads(line) for line in example_pairs().splitlines()]
    texts = [row["prompt"] + row[which] for row in rows for which in ("chosen", "rejected")]
    make_tiny(folder / "tiny", texts, Key(0), layers=1, width=32, heads=2, vocabulary=300, steps=2)
    return folder


@pytest.fixture
def folder(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the working folder."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def follow(name: str, folder: Path) -> dict[str, Any]:
    """Write the page's experiment and call its commands; return each run's summary."""
    (job,) = blocks(page(name), "toml")
    for said, instead in SMALLER.items():
        job = job.replace(said, instead)
    (folder / "job.toml").write_text(job, "utf-8")
    for block in blocks(page(name), "console"):
        for words in commands(block) if "$ prefed" in block else ():
            prefed_(*words)
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("runs/*/summary.json")}


@pytest.mark.rare
def test_trl_s_job_and_its_federation(folder: Path) -> None:
    """One client holds 360 of 400 pairs, and nothing is sent between owners; of four clients each holds 90,
    and sends in each of two rounds what it receives. PEFT loads the adapter as the page says."""
    runs = follow("trl", folder)
    (one,) = runs["one"]["clients"].values()
    assert (one["train"], one["test"]) == (360, 40)
    federated = runs["federated"]
    assert {client: sizes["train"] for client, sizes in federated["clients"].items()} == dict.fromkeys(
        ("ada", "ben", "cleo", "dan"), 90
    )
    model_bytes = 4 * federated["parameters"]["communicated"]
    assert federated["bytes"]["up"] >= 2 * 4 * model_bytes
    assert federated["bytes"]["up"] < 2 * 4 * model_bytes * 1.5
    base = AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype="float32")
    model = PeftModel.from_pretrained(base, folder / "runs/one/adapters/shared")
    lora = model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, set(lora.target_modules)) == (8, 16, {"c_attn", "c_proj", "c_fc"})


def test_flower_s_job(folder: Path) -> None:
    """Half of four clients take part in each of two rounds."""
    runs = follow("flower", folder)
    assert (runs["flower"]["method"], runs["flower"]["rounds"]) == ("feddpo", 2)
    rounds = [json.loads(line) for line in (folder / "runs/flower/rounds.jsonl").read_text().splitlines()]
    assert [len(record["cohort"]) for record in rounds] == [2, 2]
    assert (folder / "runs/flower/adapters/shared/adapter_config.json").exists()


@pytest.mark.rare
def test_openfedllm_s_job(folder: Path) -> None:
    """Five clients, two of them a round."""
    runs = follow("openfedllm", folder)
    assert len(runs["openfedllm"]["clients"]) == 5
    rounds = [json.loads(line) for line in (folder / "runs/openfedllm/rounds.jsonl").read_text().splitlines()]
    assert [len(record["cohort"]) for record in rounds] == [2, 2]


def test_openfedllm_s_rates() -> None:
    """Its ``cosine_learning_rate(round, rounds, lr, 1e-5)``, whose rounds count from 0, written out."""
    (job,) = blocks(page("openfedllm"), "toml")
    tables = tomllib.loads(job)
    settings = METHODS["feddpo"].Settings(**{k: v for k, v in tables["method"].items() if k != "name"})
    rounds = tables["rounds"]
    for index in (0, 1, 50, 199):
        theirs = 1e-5 + 0.5 * (5e-4 - 1e-5) * (1 + math.cos(math.pi * index / rounds))
        ours = rate(settings.lr, settings, Round(index + 1, rounds, Key(0), {}), rounds, {})
        assert ours == pytest.approx(theirs, rel=1e-12)


def keys(record: type[BaseModel]) -> set[str]:
    """Every key of a settings record, those of its records with a dot."""
    found = set()
    for name, field in record.model_fields.items():
        found.add(name)
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if inspect.isclass(kind) and issubclass(kind, BaseModel):
                found |= {f"{name}.{inner}" for inner in keys(kind)}
    return found


KNOWN = {
    *keys(Experiment),
    *(f"method.{key}" for kind in METHODS.values() for key in ("name", *kind.Settings.model_fields)),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_a_page_names_is_one(name: str) -> None:
    """In the tables' right column: ``method.lr``, and what such a key is said to be."""
    named = set()
    for row in re.findall(r"^\| .* \| (.*) \|$", page(name), re.MULTILINE):
        for code in re.findall(r"`([^`]+)`", row):
            key, _, value = code.partition(" = ")
            if re.fullmatch(r"(data|model|method|merge|cohort|evaluate|engine|track)\.[\w.]+", key):
                named.add(key)
                if key == "method.name" and value:
                    assert value.strip('"') in METHODS
                if key == "method.objective" and value:
                    assert value.strip('"') in OBJECTIVES
    assert len(named) > 5
    assert named - KNOWN == set()
