"""How much ``prefed run`` prints, where it prints it, and what it leaves in ``run.log``."""

import io
import json
import logging
import os
import re
import sys
import warnings
from datetime import datetime
from threading import Thread

import pytest
from tests.cli.test_cli import place as place
from typer.testing import CliRunner

import prefed.runs.preflight
import prefed.runs.run
import toy
from prefed.core import Callback
from prefed.store import RunReader
from prefed.trackers.log import round_line
from prefed.ui.cli import app
from prefed.ui.cli.output import print_progress


def got(*words, code=0):
    """What a command writes on standard output, and what on standard error."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout, result.stderr


@pytest.mark.parametrize("words", [["-q", "run", "exp.toml"], ["run", "exp.toml", "--quiet"]])
def test_quiet_is_the_last_line(place, words):
    output, errors = got(*words, "--out", "a")
    mean = json.loads((place / "a/summary.json").read_text())["preference_accuracy"]["mean"]
    assert errors == ""
    first = rf"toy, 4 rounds: preference accuracy {mean:.3f}, "
    assert re.fullmatch(rf"{first}baseline accuracy [\d.]+, reward accuracy [\d.]+ → a\n", output)


def test_quiet_errors_are_printed(place):
    output, errors = got("run", "exp.toml", "-q", "--set", "cohort.size=9", code=1)
    assert output == ""
    assert errors.startswith("error: cohort = 9, but only 6 clients")


def test_json_is_the_summary_alone(place):
    """Standard output is summary.json as it is on the disk; the rounds are on standard error."""
    output, errors = got("run", "exp.toml", "--json", "--out", "a")
    assert json.loads(output) == json.loads((place / "a/summary.json").read_text())
    assert re.findall(r"^round (\d)/4", errors, re.MULTILINE) == ["1", "2", "3", "4"]
    output, errors = got("run", "exp.toml", "--json", "--quiet", "--out", "b")
    assert json.loads(output)["rounds"] == 4
    assert errors == ""


def test_verbose_prints_phases_and_where_the_time_goes(place):
    """The toy's round has the exchange train with 3 clients, every second one the exchange score with all 6,
    and each an evaluation and a commit. The shares of the parts at the end add up to the whole."""
    output, errors = got("run", "exp.toml", "-v", "--out", "a")
    assert "worst client" in output
    phases = re.findall(r"^(\w+) \(round (\d)(?:, (\d) clients)?\): [\d.]+ s$", errors, re.MULTILINE)
    expected = []
    for number in "1234":
        expected += [("score", number, "6")] if number in "24" else []
        expected += [("train", number, "3"), ("evaluation", number, "6"), ("commit", number, "")]
    assert phases == expected
    last = errors.splitlines()[-1]
    assert last.startswith("time by part: ")
    parts = dict(re.findall(r"(\w+) [\dms.]+ ?s? \((\d+)%\)", last))
    assert {"train", "score", "evaluation", "commit", "engine", "summary", "adapters"} == set(parts)
    assert sum(map(int, parts.values())) == pytest.approx(100, abs=4)
    output, errors = got("run", "exp.toml", "--out", "b")
    assert errors == ""


def test_verbose_is_over_with_its_command(place):
    """Nothing of one command's volume is left for the next in the same process."""
    got("-v", "run", "exp.toml", "--out", "a")
    assert got("methods", "-q")[0]
    assert got("run", "exp.toml", "--out", "b")[1] == ""


def log(path):
    """The lines of a run's log without their times, which are ISO 8601 with an offset."""
    lines = (path / "run.log").read_text().splitlines()
    stamp = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d ")
    assert all(stamp.match(line) for line in lines)
    assert sorted(lines, key=lambda line: line[:19]) == lines
    return [stamp.sub("", line, count=1) for line in lines]


def test_the_log_of_a_run_that_was_stopped_and_went_on(place, monkeypatch):
    """Version and command, each round as it is printed on the terminal, how it ended; then the same again."""

    class Stop(Callback):
        def on_round_end(self, record):
            if record["round"] == 2:
                raise KeyboardInterrupt

    experiment = prefed.config.Experiment.load("exp.toml")
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "secret"])
    with pytest.raises(KeyboardInterrupt):
        prefed.runs.run.run(experiment, "a", callbacks=[Stop()])
    monkeypatch.setattr(sys, "argv", ["/bin/prefed", "run", "exp.toml", "--out", "my a"])
    output, _ = got("run", "exp.toml", "--out", "a", "--resume")
    rounds = [line for line in output.splitlines() if line.startswith("round ")]
    first, second = log(place / "a")[:5], log(place / "a")[5:]
    version = re.escape(json.loads((place / "a/summary.json").read_text())["versions"]["prefed"])
    assert re.fullmatch(rf"prefed {version}: train\.py", first[0])
    assert re.fullmatch(r"Python [\d.]+, PyTorch \S+, transformers \S+, .+", first[1])
    assert first[2] == "4 rounds"
    assert first[3].startswith("round 1/4  loss ")
    assert first[4] == "interrupted after round 1/4"
    assert re.fullmatch(rf"prefed {version}: prefed run exp.toml --out 'my a'", second[0])
    assert second[2:] == ["continues after round 2/4", *rounds, "done"]


def test_the_log_has_warnings_and_an_errors_kind(place, monkeypatch):
    """A dropped upload is a warning. An error's message may quote the data: its kind alone is in the log."""
    secret = "the patient said so"

    def faulty(experiment, folder):
        job = toy.of_experiment(experiment, folder)
        monkeypatch.setitem(job.trainers.options["faults"], next(iter(job.trainers.data)), "nan")
        return job

    class Ends(Callback):
        def on_run_end(self):
            raise OSError(secret)

    monkeypatch.setattr(prefed.runs.preflight, "build_job", faulty)
    experiment = prefed.config.Experiment.load("exp.toml", ["cohort.size=6"])
    with pytest.raises(OSError, match=secret):
        prefed.runs.run.run(experiment, "a", callbacks=[Ends()])
    lines = log(place / "a")
    warnings = [line for line in lines if line.startswith("warning: round ")]
    assert len(warnings) == 4
    assert "dropped an upload of 'Client 0/ü'" in warnings[0]
    assert lines[-1] == "ended by OSError after round 4/4"
    assert secret not in (place / "a/run.log").read_text()


def test_a_start_that_fails_leaves_no_log(place):
    got("run", "exp.toml", "--out", "a", "--set", "cohort.size=9", code=1)
    assert not (place / "a").exists()


def test_a_log_that_cannot_be_written_ends_no_run(place):
    """A folder is in its place, or a link, which is not followed: the run continues and touches neither."""
    got("run", "exp.toml", "--out", "a", "--set", "rounds=2")
    (place / "a/run.log").unlink()
    (place / "letter.txt").write_text("mine")
    (place / "a/run.log").symlink_to(place / "letter.txt")
    got("run", "exp.toml", "--out", "a", "--resume", "--set", "rounds=3")
    assert (place / "letter.txt").read_text() == "mine"
    (place / "a/run.log").unlink()
    (place / "a/run.log").mkdir()
    got("run", "exp.toml", "--out", "a", "--resume")
    assert len(RunReader(place / "a").rounds()) == 4


def test_the_log_follows_the_umask_as_its_neighbours(place):
    got("run", "exp.toml", "--out", "a")
    modes = {name: (place / "a" / name).stat().st_mode & 0o777 for name in ("run.log", "rounds.jsonl")}
    assert modes["run.log"] == modes["rounds.jsonl"]


def test_a_log_in_json_has_each_event_with_its_numbers(place):
    """Standard output is that of -q, standard error is JSON; numbers of rounds are those of rounds.jsonl."""
    output, errors = got("--log", "json", "run", "exp.toml", "--out", "a")
    assert output == got("run", "exp.toml", "-q", "--out", "b")[0].replace("→ b", "→ a")
    log = [json.loads(line) for line in errors.splitlines()]
    assert all(datetime.fromisoformat(entry.pop("time")).tzinfo for entry in log)
    start, *rest, last = log
    assert start == {"level": "info", "event": "start", "message": "4 rounds", "round": 0, "rounds": 4}
    assert last == {"level": "info", "event": "done", "message": "done"}
    rounds = [entry for entry in rest if entry["event"] == "round"]
    for entry, record in zip(rounds, RunReader("a").rounds(), strict=True):
        assert entry.pop("message") == round_line(record, 4)
        accuracies = ("preference_accuracy", "reward_accuracy")
        names = ("round", "loss", *accuracies, "bytes_up", "bytes_down", "seconds")
        numbers = {name: record[name] for name in names if name in record}
        assert entry == {"level": "info", "event": "round", "rounds": 4, **numbers}


def test_a_log_in_json_ends_with_the_error_and_its_code(place, monkeypatch):
    """As for every command; the next one in the same process logs text again."""
    _, errors = got("run", "none.toml", "--log", "json", code=1)
    (entry,) = map(json.loads, errors.splitlines())
    assert (entry["level"], entry["event"], entry["code"]) == ("error", "error", 1)
    assert entry["message"].startswith("error: ")
    _, errors = got("run", "none.toml", code=1)
    assert errors.startswith("error: ")

    def interrupted(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr("prefed.config.experiment_table.load_cell", interrupted)
    _, errors = got("run", "none.toml", "--log", "json", code=130)
    (entry,) = map(json.loads, errors.splitlines())
    assert (entry["event"], entry["code"]) == ("stopped", 130)


def test_warnings_of_the_library_are_in_the_log(place, monkeypatch):
    """What Python would print by itself is an event too."""

    def warns(*words):
        logging.getLogger("prefed").warning("a %s", "drift")
        raise ValueError("over")

    monkeypatch.setattr("prefed.config.experiment_table.load_cell", warns)
    _, errors = got("data", "exp.toml", "--log", "json", code=1)
    warning, error = map(json.loads, errors.splitlines())
    assert (warning["level"], warning["event"], warning["message"]) == ("warning", "log", "a drift")
    assert (error["level"], error["message"]) == ("error", "error: over")


def test_threads_of_a_command_log_as_it_does(place, monkeypatch):
    """A site answers the hub's requests in threads."""

    def says(*words):
        thread = Thread(
            target=lambda: (print_progress("refused"), logging.getLogger("prefed").warning("a drift"))
        )
        thread.start()
        thread.join()
        raise ValueError("over")

    monkeypatch.setattr("prefed.config.experiment_table.load_cell", says)
    output, errors = got("data", "exp.toml", "--log", "json", code=1)
    assert output == ""
    entries = [json.loads(line) for line in errors.splitlines()]
    assert [entry["event"] for entry in entries] == ["note", "log", "error"]
    assert got("data", "exp.toml", "-q", code=1) == ("", "error: over\n")


def test_other_libraries_log_in_json_too(place, monkeypatch):
    """NVIDIA FLARE's warnings and errors, Python's warnings, and errors that prefed logs with -q."""

    def logs(*words):
        logging.getLogger("nvflare.fuel").warning("no\ncell")
        warnings.warn("old", UserWarning, stacklevel=1)
        try:
            raise KeyError("a tensor")
        except KeyError:
            logging.getLogger("prefed.site").exception("cannot answer")
        raise ValueError("over")

    monkeypatch.setattr("prefed.config.experiment_table.load_cell", logs)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, errors = got("data", "exp.toml", "--log", "json", code=1)
        _, quiet = got("data", "exp.toml", "-q", "--log", "json", code=1)
    flare, python, failure, _ = entries = [json.loads(line) for line in errors.splitlines()]
    assert (flare["level"], flare["message"]) == ("warning", "no\\ncell")
    assert "UserWarning: old" in python["message"]
    assert failure["traceback"].endswith("KeyError: 'a tensor'")
    assert [json.loads(line)["message"] for line in quiet.splitlines()] == [
        entry["message"] for entry in entries if entry["level"] == "error"
    ]


def test_a_defect_is_an_event_with_its_traceback(place, monkeypatch):
    def breaks(*words):
        raise KeyError("a\ntensor")

    monkeypatch.setattr("prefed.config.experiment_table.load_cell", breaks)
    _, errors = got("data", "exp.toml", "--log", "json", code=1)
    (entry,) = map(json.loads, errors.splitlines())
    assert (entry["event"], entry["code"]) == ("error", 1)
    assert entry["message"] == r"error: KeyError: 'a\ntensor'"
    assert "in breaks" in entry["traceback"]


def test_a_character_that_the_terminal_lacks_stops_no_command(monkeypatch):
    """Latin-1 has no arrow; a strict stream would raise. The escape is Python's."""
    module, stream = sys.modules["prefed.ui.cli.app"], io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(module, "app", lambda: print("0.5 → 0.7, Zoë"))
    monkeypatch.setattr(sys, "stdout", stream)
    module.main()
    stream.flush()
    assert stream.buffer.getvalue() == "0.5 \\u2192 0.7, Zoë\n".encode("latin-1")
