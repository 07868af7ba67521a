"""``--auto-resume``: one command for a scheduler that repeats it, with real processes that are killed."""

import re
import signal
import time

from tests.cli.test_cli import place as place
from tests.cli.test_cli import prefed_, wait_for_rounds

import prefed.runs.preflight
import toy
from forked import Command
from waiting import WATCHDOG, until

COMMAND = ("run", "exp.toml", "--out", "a", "--auto-resume")


def test_killed_again_and_again_it_ends_as_if_never_killed(place, monkeypatch):
    """Killed before anything is committed, with a directory that is hardly there; then after a round. Then it
    ends; and once more it has nothing to do, and says so."""
    reached = place / "reached"

    def waits(experiment, folder):
        reached.touch()
        time.sleep(WATCHDOG)

    with monkeypatch.context() as patch:
        patch.setattr(prefed.runs.preflight, "build_job", waits)
        process = Command(place / "errors.txt", *COMMAND)
        until(reached.exists, reached)
        assert process.send(signal.SIGKILL)[0] == -signal.SIGKILL
    assert (place / "a/checkpoint").is_dir()
    assert not (place / "a/checkpoint/COMMIT.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(prefed.runs.preflight, "build_job", slow)
        process = Command(place / "errors.txt", *COMMAND)
        wait_for_rounds(place / "a/rounds.jsonl", 1)
        assert process.send(signal.SIGKILL)[0] == -signal.SIGKILL
    assert not (place / "a/summary.json").exists()
    prefed_(*COMMAND)
    prefed_("run", "exp.toml", "--out", "b")
    assert toy.outcome(place / "a") == toy.outcome(place / "b")
    assert "the run in a is already finished (4 rounds)" in prefed_(*COMMAND)
    assert toy.outcome(place / "a") == toy.outcome(place / "b")


def slow(experiment, folder):
    job = toy.of_experiment(experiment, folder)
    job.trainers.options["pause"] = 0.2
    return job


def test_stopped_it_names_the_same_command(place, monkeypatch):
    monkeypatch.setattr(prefed.runs.preflight, "build_job", slow)
    process = Command(place / "errors.txt", *COMMAND)
    wait_for_rounds(place / "a/rounds.jsonl", 1)
    code, errors = process.send(signal.SIGTERM)
    assert code == 143
    assert re.search(r"prefed run exp.toml --out a --auto-resume$", errors.strip())


def test_other_peoples_files_are_left_alone(place):
    (place / "a").mkdir()
    (place / "a/thesis.tex").write_text("…")
    assert "contains 'thesis.tex' instead of a run" in prefed_(*COMMAND, code=1)
    assert [path.name for path in (place / "a").iterdir()] == ["thesis.tex"]


def test_an_empty_directory_and_a_dry_run(place):
    (place / "a").mkdir()
    assert "--dry-run" in prefed_(*COMMAND, "--dry-run", code=2)
    prefed_(*COMMAND)
