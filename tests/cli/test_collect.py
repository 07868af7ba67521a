"""``prefed collect`` as a process: it ends as a trained client, and loses nothing when it is killed."""

import json
import signal

import pytest
from typer.testing import CliRunner

from collecting import Browser, start
from finished import small_experiment
from prefed import Experiment
from prefed import run as run_experiment
from prefed.core import Key
from prefed.data import synthetic
from prefed.models.tiny import make_tiny
from prefed.store import RunReader
from prefed.ui.cli import app
from waiting import WATCHDOG, until

runs = CliRunner()


def write_pairs(folder, count):
    rows = [{"prompt": f"Case {k}:", "chosen": f" up {k}", "rejected": f" down {k}"} for k in range(count)]
    (folder / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.rare
def test_twenty_choices_train_a_client(tmp_path):
    """The person prefers the longer response. What they chose is what the client trains on: 18 pairs, with 2
    for its test, as a tenth is by default."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    model = tmp_path / "model"
    make_tiny(
        model, list(synthetic.corpus(Key(1), 40)), Key(0), layers=1, width=32, heads=2, vocabulary=300,
        context=256, steps=8,
    )  # fmt: skip
    records = synthetic.generate(Key(1), clients=1, train=20, test=0)
    prompts = list(dict.fromkeys(record.prompt for record in records)) + [f"Case {k}:" for k in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    process, link = start(
        "prompts.jsonl", "--model", model, "--client", "ann", "--limit", 20, "--max-new-tokens", 8,
        "--temperature", 1.0, cwd=tmp_path,
    )  # fmt: skip
    browser = Browser(link)
    for done in range(20):
        until(lambda: browser.get("/state") != "wait", "the next pair")
        browser.get()
        assert f"{done} of 20" in browser.text
        answers = browser.text.split('<div class="text" dir="auto">')[-2:]
        lengths = [len(answer.partition("</div>")[0]) for answer in answers]
        browser.answer("left" if lengths[0] >= lengths[1] else "right")
    assert "20 chosen pairs are saved in" in browser.text
    browser.post("/finish")
    output, errors = process.communicate(timeout=WATCHDOG)
    assert (process.returncode, errors) == (0, "")
    assert "20 pairs by ann in pairs.jsonl" in output
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text("utf-8").splitlines()]
    assert len({row["prompt"] for row in rows}) == 20
    tables = small_experiment(tmp_path, "client", rounds=1)
    tables["data"] |= {"train": str(tmp_path / "pairs.jsonl"), "test": None}
    tables["model"]["name"], tables["method"]["lr"] = str(model), 0.1
    result = run_experiment(Experiment.model_validate(tables), tmp_path / "run")
    assert result.summary["clients"] == {"ann": {"train": 18, "validation": 0, "test": 2}}
    assert RunReader(tmp_path / "run").commit.round == 1
    assert result.rounds[0]["loss"] > 0


def test_a_kill_after_each_choice_loses_none(tmp_path):
    """Killed at once after the answer to the form: the next start asks the question after it."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    write_pairs(tmp_path, 3)
    asked = []
    for done, answer in enumerate(("left", "neither", "right")):
        process, link = start("--from", "old.jsonl", "--client", "ann", cwd=tmp_path)
        browser = Browser(link)
        assert f"{done} of 3" in browser.text
        asked.append(browser.number)
        browser.answer(answer)
        process.kill()
        process.communicate(timeout=WATCHDOG)
    assert len(set(asked)) == 3
    process, link = start("--from", "old.jsonl", "--client", "ann", cwd=tmp_path)
    assert "That was the last pair" in Browser(link).text
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=WATCHDOG)
    assert process.returncode == 143
    assert errors.endswith(
        "every choice is kept. To continue:\n  prefed collect --from old.jsonl --client ann\n"
    )
    assert "2 pairs by ann in judged.jsonl; 1 answered with neither" in output
    assert "Cohen's kappa" in output
    rows = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text("utf-8").splitlines()]
    assert [row["side"] for row in rows] == ["left", "right"]
    assert [row["chosen"].startswith(" up") for row in rows] == [row["agrees"] == 1 for row in rows]


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ([], "give --model NAME, optionally with PROMPTS, or --from FILE without PROMPTS", 2),
        (["prompts.txt", "--from", "old.jsonl"], "give --model NAME", 2),
        (["--model", "m", "--from", "old.jsonl"], "give --model NAME", 2),
        (["--model", "m", "--temperature", "0"], "--temperature must be above 0", 2),
        (["--from", "old.jsonl", "--out", "old.jsonl"], "--out old.jsonl is the same file as --from", 2),
        (["--from", "none.jsonl"], "none.jsonl: no such file or folder", 1),
        (["--from", "empty.jsonl"], "--from: the file contains no pairs", 1),
        (["--from", "old.jsonl", "--out", "pairs.csv"], "--out pairs.csv: the file name must end in", 1),
    ],
)
def test_what_cannot_be_asked_ends_with_a_reason(tmp_path, monkeypatch, words, message, code):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path, 2)
    (tmp_path / "empty.jsonl").write_text("")
    if "none.jsonl" in words or "empty.jsonl" in words or "pairs.csv" in words:
        pytest.importorskip("uvicorn")
        pytest.importorskip("starlette")
    result = runs.invoke(app, ["collect", *words])
    assert result.exit_code == code
    assert message in result.output
    assert len((tmp_path / "old.jsonl").read_text().splitlines()) == 2


def test_without_the_extra_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prefed.ui.cli.collect.find_spec", lambda name: None)
    result = runs.invoke(app, ["collect", "--model", "m"])
    assert result.exit_code == 1
    assert "needs starlette and uvicorn: pip install 'prefed[collect]'" in result.output
