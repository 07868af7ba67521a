"""The demo from an empty folder, on a smaller federation than the user's."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefed.config import Experiment
from prefed.ui.cli import app, demo


def test_the_demo_leaves_all_that_it_speaks_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, model, experiment and a finished run with its page; every path it prints is there; a second call
    keeps the experiment file as the user changed it and runs into a new folder. With one core there is one
    worker process, whose start takes longer than its work here."""
    for name, value in {"CLIENTS": 2, "TRAIN": 8, "TEST": 4, "TEXTS": 60, "STEPS": 3}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "prefed-demo" / "fedsdg.toml"
    first = CliRunner().invoke(app, ["demo"])
    assert first.exit_code == 0, first.output
    for word in ("oracle", "shared", "own", "before", "traffic "):
        assert word in first.output
    run = tmp_path / "prefed-demo" / "run-fedsdg"
    assert (run / "report.html").stat().st_size > 10_000
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == 10
    assert summary["method"] == "fedsdg"
    assert len(summary["preference_accuracy"]["per_client"]) == 2

    changed = file.read_text()
    for said, instead in (
        ('name = "fedsdg"', 'name = "feddpo"'),
        ("rounds = 10", "rounds = 1"),
        ("workers = 1", "workers = 0"),
    ):
        assert said in changed
        changed = changed.replace(said, instead)
    file.write_text(changed)
    assert Experiment.load(file).method.name == "feddpo"
    second = CliRunner().invoke(app, ["demo"])
    assert second.exit_code == 0, second.output
    assert file.read_text() == changed
    again = json.loads((run.with_name("run-fedsdg-2") / "summary.json").read_text())
    assert (again["method"], again["rounds"]) == ("feddpo", 1)
