"""Run directories that somebody else wrote: what is odd in them is said in a line, and obeyed by nobody."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from finished import write_run
from prefed.runs.finished_run import RunError, read_run
from prefed.trackers.tools import MLflow, Told
from prefed.ui.cli import app
from prefed.ui.pages.page import public_page

DEEP = f"{'[' * 100_000}{']' * 100_000}"


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("summary.json", '"ann": 0.75', '"ann": NaN', "preference_accuracy.per_client.ann: "),
        ("summary.json", '"ann": 0.75', '"ann": 1e308', "preference_accuracy.per_client.ann: "),
        ("summary.json", '"seconds": 3.0', '"seconds": Infinity', "seconds: should be a finite number"),
        ("summary.json", '"test": 4', '"test": -4', "clients.ann.test: "),
        ("summary.json", '"left_out": 0', '"left_out": "x"', "left_out: "),
        ("summary.json", '"left_out": 0', f'"left_out": {DEEP}', "recursion"),
        ("summary.json", '"left_out": 0', '"origin": {"finished": "soon"}', "origin.finished: "),
        (
            "summary.json",
            '"left_out": 0',
            '"origin": {"hardware": {"cores": "x"}}',
            "origin.hardware.cores: ",
        ),
        ("rounds.jsonl", '"dropped": []', '"dropped": [{}]', "line 1.dropped.line 1.client: "),
        ("rounds.jsonl", '"dropped": []', f'"dropped": {DEEP}', "maximum recursion"),
        ("config.toml", "seed = 1", f"seed = {DEEP}", "recursion"),
        ("checkpoint/COMMIT.json", '"totals": {}', f'"totals": {DEEP}', "recursion"),
    ],
)
def test_an_odd_file_is_named(tmp_path, file, before, after, message):
    run = write_run(tmp_path / "run", fingerprint={})
    text = (run / file).read_text("utf-8")
    assert before in text
    (run / file).write_text(text.replace(before, after))
    with pytest.raises(RunError) as raised:
        read_run(run)
    assert file in str(raised.value)
    assert message in str(raised.value)


def test_other_ends_of_lines_end_no_round(tmp_path):
    run = write_run(tmp_path / "run")
    text = (run / "rounds.jsonl").read_text("utf-8")
    drop = '"dropped": [{"client": "a\u2028b", "reason": "x"}]'
    (run / "rounds.jsonl").write_text(text.replace('"dropped": []', drop), encoding="utf-8")
    assert read_run(run).rounds[0]["dropped"][0]["client"] == "a\u2028b"


def test_json_on_a_terminal_holds_no_control(tmp_path):
    r"""U+009B begins a terminal's commands as ESC [ does; half a surrogate pair cannot be written at all."""
    name = "\x9b2J\u202e\ud83d"
    runs = [str(write_run(tmp_path / n, {name: (0.0, 0.5), "bob": (0.0, 0.5)})) for n in ("a", "b\x9b")]
    result = CliRunner().invoke(app, ["compare", "--json", *runs])
    assert result.exit_code == 0, repr(result.exception)
    assert not set("\x9b\u202e\ud83d") & set(result.stdout)
    assert [run["name"] for run in json.loads(result.stdout)["runs"]] == ["a", "b\x9b"]


def test_a_page_that_leaves_names_no_folder(tmp_path):
    settings = {"model": {"name": "/home/eve/model"}, "data": {"train": {"path": "/home/eve/pairs.jsonl"}}}
    origin = {"command": "prefed run '/home/eve smith/first.toml' --set data.test=/home/eve/x.jsonl"}
    page = public_page(write_run(tmp_path / "run", settings=settings, origin=origin))
    assert "prefed run first.toml --set data.test=x.jsonl" in page
    assert "pairs.jsonl" in page
    assert not {"eve", str(tmp_path)} & set(page.replace("/", " ").split())
    assert "/home" not in page


def test_a_name_is_no_formula_in_mlflows_table(monkeypatch):
    texts = {}

    class Client:
        def log_text(self, run, text, name):
            texts[name] = text

    tracker = object.__new__(MLflow)
    tracker._client, tracker.known = Client(), "x"
    monkeypatch.setattr(tracker, "log", lambda number, figures: None)
    tracker.finish(Told(1, {}, ["client", "accuracy"], [["=cmd()", 0.5], ["ann", -0.5]], None))
    rows = list(csv.reader(io.StringIO(texts["clients.csv"])))
    assert rows[1:] == [["'=cmd()", "0.5"], ["ann", "-0.5"]]
