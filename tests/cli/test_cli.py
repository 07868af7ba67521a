"""The command line, with the toy federation in place of data and model."""

import json
import re
import signal
import tomllib

import pytest
from typer.testing import CliRunner

import prefed.config
import prefed.runs.preflight
import prefed.runs.rounds
import toy
from forked import Command
from prefed.core.files import WriteError
from prefed.store import RunReader
from prefed.ui.cli import app
from waiting import until

FILE = """
rounds = 4
[data]
train = "pairs.jsonl"
partition = { by = "iid", clients = 6 }
[model]
name = "toy"
[cohort]
size = 3
[method]
name = "feddpo"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with an experiment file, and the toy behind it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prefed.runs.preflight, "build_job", toy.of_experiment)
    monkeypatch.setattr(prefed.runs.rounds, "describe_data", lambda dataset: {})
    monkeypatch.setattr(prefed.runs.rounds, "announce", lambda *arguments: None)
    monkeypatch.setattr(prefed.runs.rounds, "round_answers", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "toy").mkdir()
    (tmp_path / "exp.toml").write_text(FILE)
    return tmp_path


def prefed_(*words, code=0):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def wait_for_rounds(path, count):
    until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, f"{count} rounds in {path}")


def test_a_run_from_start_to_end(place):
    """The directory, the contract's keys, a table with every client, and where things are."""
    output = prefed_("run", "exp.toml")
    out = place / "runs/exp-feddpo-seed42"
    assert "feddpo, 4 rounds → runs/exp-feddpo-seed42" in output
    assert (
        len(re.findall(r"^round \d/4  loss [\d.]+  preference accuracy [\d.]+  up \d+", output, re.MULTILINE))
        == 4
    )
    for number in range(6):
        assert f"Client {number}/ü" in output
    for words in ("shared", "own", "worst client", "adapter: runs/", "summary: runs/", "traffic "):
        assert words in output
    assert {path.name for path in out.iterdir()} == {
        "config.toml", "rounds.jsonl", "summary.json", "run.log", "checkpoint", "adapters",
    }  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    for accuracy in ("preference_accuracy", "reward_accuracy", "baseline_accuracy", "shared_accuracy"):
        assert set(summary[accuracy]) == {"mean", "worst", "worst_decile", "per_client"}
        assert len(summary[accuracy]["per_client"]) == 6
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert summary["preference_accuracy"]["mean"] == records[-1]["preference_accuracy"]
    assert summary["bytes"]["up"] == sum(record["bytes_up"] for record in records)
    assert summary["bytes"]["down"] == sum(record["bytes_down"] for record in records)
    assert summary["parameters"] == {"trainable": 16, "communicated": 12}
    assert (summary["method"], summary["rounds"], summary["seed"]) == ("toy", 4, 42)
    assert summary["seconds"] == pytest.approx(sum(record["seconds"] for record in records))
    assert summary["peak_memory_mb"] > 10
    assert summary["versions"]["prefed"]
    assert summary["clients"]["Client 0/ü"]["train"] > 0
    resolved = tomllib.loads((out / "config.toml").read_text())
    assert (resolved["rounds"], resolved["method"]["lr"], resolved["engine"]["threads"]) == (4, 1e-4, 1)
    assert (out / "adapters/shared/adapter.bin").exists()


def test_the_resolved_file_runs_again(place):
    prefed_("run", "exp.toml", "--out", "a")
    prefed_("run", "a/config.toml", "--out", "b")
    assert toy.outcome(place / "a") == toy.outcome(place / "b")


def test_resuming_a_finished_run_shows_it_again(place):
    prefed_("run", "exp.toml", "--out", "a")
    before = toy.outcome(place / "a")
    assert "worst client" in prefed_("run", "exp.toml", "--out", "a", "--resume")
    assert toy.outcome(place / "a") == before


def test_another_experiment_is_not_resumed(place):
    prefed_("run", "exp.toml", "--out", "a")
    for change, line in (
        ("method.lr=1", "method.lr: 0.0001 → 1.0"),
        ("rounds=3", "rounds: 4 → 3"),
        ("engine.threads=7", "engine.threads: 1 → 7"),
    ):
        output = prefed_("run", "exp.toml", "--out", "a", "--resume", "--set", change, code=1)
        assert "the run in a has other settings (run → given):" in output
        assert line in output


def test_other_workers_may_resume(place):
    prefed_("run", "exp.toml", "--out", "a")
    prefed_("run", "exp.toml", "--out", "a", "--resume", "--set", "engine.workers=2")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_says_how_to_go_on(place, number, code):
    """Ctrl-C and SIGTERM in the middle of a round; the command that is printed ends the run as one that
    was left alone."""
    words = ["run", "exp.toml", "--set", "data.limit=20", "--out", "my runs/a"]
    process = Command(place / "errors.txt", *words)
    wait_for_rounds(place / "my runs/a/rounds.jsonl", 1)
    ended, errors = process.send(number)
    assert ended == code, errors
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].strip() == (
        "prefed run exp.toml --set data.limit=20 --out 'my runs/a' --resume"
    )
    assert RunReader(place / "my runs/a").commit.round < 4
    prefed_(*words, "--resume")
    prefed_("run", "exp.toml", "--set", "data.limit=20", "--out", "whole")
    assert toy.outcome(place / "my runs/a") == toy.outcome(place / "whole")


@pytest.mark.parametrize(
    "options",
    [[], ["--out", "a"], ["--resume"], ["--out", "a", "--resume"]],
    ids=lambda options: " ".join(options),
)
def test_interrupted_while_it_starts_it_forgets_nothing(place, monkeypatch, options):
    """As during the imports, which take seconds: the command that is printed has what was asked for, and a
    run that is to be resumed is not said to be gone."""

    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(prefed.config.Experiment, "load", stopped)
    output = prefed_("run", "exp.toml", *options, code=130)
    assert output.strip().splitlines()[-1].strip() == " ".join(["prefed run exp.toml", *options])
    assert ("complete rounds are kept" in output) == ("--resume" in options)


def test_a_full_disk_ends_a_run_with_what_is_kept(place, monkeypatch):
    def full(path, data):
        raise WriteError(f"cannot write {path}; make room")

    monkeypatch.setattr("prefed.core.files.append", full)
    assert prefed_("run", "exp.toml", "--out", "a", code=1).splitlines()[-1] == (
        "error: cannot write a/rounds.jsonl; make room (0 complete rounds are kept; continue with --resume)"
    )


def test_a_starting_file_gets_its_folder(place):
    assert "wrote no/such/x.toml" in prefed_("init", "feddpo", "--out", "no/such/x.toml")
    assert (place / "no/such/x.toml").exists()


def test_help_loses_no_word_in_brackets(subtests):
    """``[stop]`` in a text is a table of the experiment file; no terminal may take it for markup."""
    for command in app.registered_commands:
        with subtests.test(command=command):
            own = [
                info.help
                for a in command.callback.__annotations__.values()
                for info in getattr(a, "__metadata__", ())
            ]
            words = {
                word
                for text in [command.callback.__doc__, *own]
                for word in re.findall(r"\[[a-z]+\]", text or "")
            }
            output = (
                CliRunner(env={"COLUMNS": "200"}).invoke(app, [command.callback.__name__, "--help"]).output
            )
            assert [word for word in words if word not in output] == []


def test_the_version():
    assert re.fullmatch(r"prefed \d+\.\d+\.\d+\S*\n", prefed_("--version"))
