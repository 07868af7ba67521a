"""The demo from an empty folder, on a smaller federation than the user's."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commands import prefed_
from prefed.config import Experiment
from prefed.data.synthetic_chat import PROMPTS
from prefed.ui.cli import app, demo
from preferences import CHATML, tokenizer
from small_models import save_llama


@pytest.mark.usefixtures("forked_workers")
def test_the_demo_leaves_all_that_it_speaks_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, model, experiment and a finished run with its page; every path it prints is there, also one that
    a shell would split and rich would style; a second call keeps the experiment file as the user changed it
    and runs into a new folder."""
    words = ["demo", "--out", "my [b] demo"]
    for name, value in {"CLIENTS": 2, "TRAIN": 8, "TEST": 4, "TEXTS": 60, "STEPS": 3}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my [b] demo" / "fedsdg.toml"
    first = prefed_(*words)
    for word in ("oracle", "shared", "own", "before", "traffic "):
        assert word in first
    for text in (first, file.read_text()):
        assert "prefed run 'my [b] demo/fedsdg.toml'" in text
    assert "in my [b] demo; what they like" in first
    assert "report: my [b] demo/run-fedsdg/report.html" in first
    run = tmp_path / "my [b] demo" / "run-fedsdg"
    assert (run / "report.html").stat().st_size > 10_000
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["method"], summary["rounds"]) == ("fedsdg", 5)
    assert len(summary["preference_accuracy"]["per_client"]) == 2

    changed = file.read_text()
    for said, instead in (
        ('name = "fedsdg"', 'name = "feddpo"'),
        ("rounds = 5", "rounds = 1"),
        ("workers = 1", "workers = 0"),
    ):
        assert said in changed
        changed = changed.replace(said, instead)
    file.write_text(changed)
    assert Experiment.load(file).method.name == "feddpo"
    prefed_(*words)
    assert file.read_text() == changed
    again = json.loads((run.with_name("run-fedsdg-2") / "summary.json").read_text())
    assert (again["method"], again["rounds"]) == ("feddpo", 1)

    own = tmp_path / "my [b] demo" / "train.jsonl"
    own.write_text('{"prompt": "p", "chosen": "c", "rejected": "r", "client": "x"}\n')
    mine = own.read_text()
    third = prefed_(*words, code=2)
    assert "contains other pairs than this demo's: choose another --out" in third
    assert own.read_text() == mine


@pytest.mark.rare
@pytest.mark.parametrize("chat", [CHATML, None])
def test_a_given_model_answers_the_same_prompts_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: str | None
) -> None:
    """With a chat template, and without one: on the terminal and on the page, in the columns of the untouched
    model, the shared one and two clients' own. A second call finds the model of the first."""
    for name, value in {"CHAT_TRAIN": 4, "CHAT_TEST": 2}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "CHAT", demo.CHAT | {"rounds": 1, "training": "lr = 1e-3\nlocal_steps = 1"})
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "small"
    save_llama(folder, tokenizer(chat=chat), max_position_embeddings=1024, eos_token_id=0)
    first = prefed_("demo", "--model", "small")
    for word in (*PROMPTS, "base model", "shared model", "ada's own model", "ben's own model"):
        assert word in first
    assert "oracle" not in first
    page = (tmp_path / "prefed-demo-small" / "run-fedala" / "report.html").read_text("utf-8")
    assert all(prompt in page for prompt in PROMPTS)
    assert "ben&#39;s own model" in page
    pairs = Path("prefed-demo-small", "train.jsonl")
    pairs.write_text(pairs.read_text() * 2)
    twice = pairs.read_text()
    other = prefed_("demo", "--model", "other", "--out", "prefed-demo-small", code=2)
    assert pairs.read_text() == twice
    file = Path("prefed-demo-small", "fedala.toml")
    assert f"{file} trains another model, {folder}: choose another --out" in other


def test_a_model_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = prefed_("demo", "--model", "./none", code=1)
    assert "'./none': no such folder" in result


def test_people_train_on_what_they_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two of three people with two training pairs or more, at most two of each person's; without
    the files, or with a row that is no pair, the error names the file."""
    for name, value in {"CLIENTS": 2, "TRAIN": 2, "TEST": 1, "STEPS": 3}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    words = ["demo", "--people", "."]
    missing = prefed_(*words, code=2)
    assert "people.train.jsonl.gz: no such file; experiments/people/prepare.py writes it" in missing
    counts = {"d": (3, 2), "a": (1, 2), "c": (2, 1), "b": (2, 1)}
    for place, split in enumerate(demo.SPLITS):
        lines = [
            {"prompt": f"For {k}:", "chosen": "Long words.", "rejected": "Few.", "person": who, "debate": "x"}
            for who, own in counts.items()
            for k in range(own[place])
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        Path(f"people.{split}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    result = prefed_(*words)
    assert "b: the longer argument in 2 of 2 pairs" in result
    rows = {
        split: Path(f"prefed-demo-people/{split}.jsonl").read_text().splitlines() for split in demo.SPLITS
    }
    clients = {split: [json.loads(row)["client"] for row in own] for split, own in rows.items()}
    assert clients == {"train": ["b", "b", "c", "c"], "test": ["b", "c"]}
    summary = json.loads(Path("prefed-demo-people/run-lore/summary.json").read_text())
    assert summary["method"] == "lore"
    Path("people.test.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x", "chosen": "y"}\n'))
    wrong = CliRunner().invoke(app, words)
    assert wrong.exit_code != 0
    assert "people.test.jsonl.gz, row 1: " in wrong.output
