"""The quickstart as printed: its files are those that are written, and its commands run to their end.

Only the model's name is another, as there is no hub where tests run, and there is one round.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pages
from commands import prefed_
from prefed.config import Experiment
from prefed.config.new_file import PAIRS, example_file, example_pairs
from prefed.core import Key
from prefed.data import synthetic
from prefed.methods import METHODS
from prefed.models.tiny import make_tiny
from prefed.ui.cli import app, demo

ROUNDS = 1
PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"


def blocks(language: str, start: str = "## Your own pairs", end: str = "\n# ") -> list[str]:
    """The page's blocks of one language between two headings."""
    text = PAGE.read_text("utf-8").partition(start)[2].partition(end)[0]
    assert text
    return pages.blocks(text, language)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quickstart") / "model"
    rows = [json.loads(line) for line in example_pairs().splitlines()]
    texts = [row["prompt"] + row[which] for row in rows for which in ("chosen", "rejected")]
    make_tiny(path, texts, Key(0), layers=1, width=32, heads=2, vocabulary=300, context=128, steps=20)
    return path


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    shutil.copytree(model, tmp_path / "tiny")
    return tmp_path


def test_the_page_can_be_followed_to_its_end(folder: Path) -> None:
    """Every command succeeds; every method has left ln 2, where an untrained model's DPO loss is."""
    ran = []
    for block in blocks("console"):
        for words in pages.commands(block):
            prefed_(*words)
            ran.append(words[0])
            if words[0] == "init":
                file = folder / "first.toml"
                assert [file.read_text("utf-8")] == blocks("toml")
                assert [(folder / "pairs.jsonl").read_text("utf-8").splitlines(keepends=True)[0]] == blocks(
                    "json"
                )
                text = file.read_text("utf-8").replace("distilbert/distilgpt2", "tiny")
                assert "rounds = 10" in text
                file.write_text(text.replace("rounds = 10", f"rounds = {ROUNDS}"))
    assert ran == [
        "init",
        "data",
        "data",
        "run",
        "run",
        "report",
        "generate",
        "export",
        *["run"] * 3,
        "compare",
    ]
    runs = {path.name: json.loads((path / "summary.json").read_text()) for path in folder.glob("runs/*")}
    assert len(runs) == 4
    for name, summary in runs.items():
        assert summary["rounds"] == ROUNDS
        assert summary["loss"] < math.log(2) - 0.0001, name
        assert {client: sum(sizes.values()) for client, sizes in summary["clients"].items()} == (
            dict.fromkeys(("ada", "ben", "cleo", "dan"), PAIRS)
        )
    assert (folder / "runs/first-feddpo-seed42/report.html").exists()
    assert (folder / "compare.png").exists()


@pytest.mark.rare
def test_the_demo_s_federation_runs_with_other_methods(folder: Path) -> None:
    """The page's comparison, on a smaller demo: fewer pairs, one round, a model that is hardly trained."""
    place = folder / "prefed-demo"
    synthetic.write(place, synthetic.generate(Key(7), clients=2, train=6, test=4))
    (folder / "tiny").rename(place / "model")
    settings = {**demo.TINY, "rounds": 1, "method": "fedsdg", "objective": demo.OBJECTIVE, "workers": 0}
    text = demo.EXPERIMENT.format(**settings, file="prefed-demo/fedsdg.toml")
    (place / "fedsdg.toml").write_text(text, "utf-8")
    first = ["run", "prefed-demo/fedsdg.toml", "--out", "prefed-demo/run-fedsdg"]
    (block,) = blocks("console", "## What a personal model gains", "\n## ")
    for words in [first, *pages.commands(block)]:
        prefed_(*words)
    methods = {
        path.name: json.loads((path / "summary.json").read_text())["method"] for path in folder.glob("runs/*")
    }
    assert methods == {"shared": "feddpo", "alone": "local"}
    assert (folder / "gains.html").exists()


def test_an_example_of_every_method_loads(subtests: pytest.Subtests) -> None:
    """The rate in it is the method's own: a default changes nothing."""
    for method in METHODS:
        with subtests.test(method=method):
            experiment = Experiment.parse(example_file(method, "pairs.jsonl", "demo/model"))
            assert experiment.model.name == "demo/model"
            assert experiment.method.name == method
            assert experiment.method.settings.lr == METHODS[method].Settings().lr


def test_an_example_takes_no_file_s_place(folder: Path) -> None:
    (folder / "pairs.jsonl").write_text("mine")
    result = CliRunner().invoke(app, ["init", "feddpo", "--example"])
    assert result.exit_code == 1
    assert "error: pairs.jsonl exists; choose an --out in another folder, or --force" in result.output
    assert not (folder / "feddpo.toml").exists()
    result = CliRunner().invoke(app, ["init", "feddpo", "--example", "--out", "my runs/a.toml"])
    assert "`prefed run 'my runs/a.toml'`" in result.output
    assert (folder / "my runs/pairs.jsonl").read_text("utf-8") == example_pairs()
