"""The page of a run that continues: after every round, until its end."""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finished import CLIENTS, write_run
from prefed.runs.finished_run import RunError
from prefed.store.directory import at_work
from prefed.ui.cli.app import app
from prefed.ui.pages import watch

NOBODY = 2**22 + 1
"""No process has this number: Linux gives none above 2²²."""


class Run:
    """A run of two rounds, written round by round.

    Attributes:
        steps: what happens while the watcher sleeps, in turn.
    """

    def __init__(self, folder: Path, pid: int | None = None) -> None:
        self.path, self.steps = folder / "run", list[Callable[[], Any]]()
        whole = write_run(folder / "whole")
        self.lines = (whole / "rounds.jsonl").read_text().splitlines(keepends=True)
        self.summary = (whole / "summary.json").read_text()
        (self.path / "checkpoint").mkdir(parents=True)
        shutil.copy(whole / "config.toml", self.path)
        lock = f"process {pid or os.getpid()} on {socket.gethostname()}"
        (self.path / "checkpoint/LOCK").write_text(lock)

    def commit(self, number: int) -> None:
        (self.path / "rounds.jsonl").write_text("".join(self.lines[:number]))
        totals = {"bytes_up": 1000 * number, "bytes_down": 2000 * number, "seconds": 1.5 * number}
        none = {"fingerprint": {}, "settings": None, "digests": {}, "private": {}}
        commit = {"format": 1, "round": number, "totals": totals, **none}
        (self.path / "checkpoint/COMMIT.json").write_text(json.dumps(commit))

    def finish(self) -> None:
        (self.path / "summary.json").write_text(self.summary)

    def sleep(self, seconds: float) -> None:
        self.steps.pop(0)()


def words(page: Path) -> str:
    return re.sub(r"<[^>]*>", " ", page.read_text().partition("<main>")[2])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(tmp_path)
    monkeypatch.setattr(watch, "sleep", run.sleep)
    return run


def test_the_page_is_written_after_every_round_and_loads_itself_until_the_end(
    run: Run, tmp_path: Path
) -> None:
    """Before the first evaluation it says so; after it the figures are those of the last one. A look at which
    nothing has changed writes nothing."""
    page, seen, got = tmp_path / "page.html", list[tuple[bool, str]](), list[str]()

    def look(then: Callable[[], None]) -> Callable[[], None]:
        def step() -> None:
            seen.append(('http-equiv="refresh"' in page.read_text(), words(page)))
            page.write_text("unchanged")
            then()

        return step

    run.steps = [
        look(lambda: run.commit(1)),
        look(lambda: None),
        look(lambda: run.commit(2)),
        look(run.finish),
    ]
    watch.watch(run.path, page, got.append)
    assert [refreshes for refreshes, _ in seen] == [True, True, False, True]
    assert "Metrics appear after the first evaluation." in seen[0][1]
    assert "It has completed round 1 and continues. This page reloads automatically." in seen[1][1]
    assert "1 round" in seen[1][1]
    assert "50.0%" in seen[1][1]
    assert seen[2][1] == ""
    assert "completed round 2" in seen[3][1]
    assert "66.7%" in seen[3][1]
    assert "refresh" not in page.read_text()
    assert "not finished" not in page.read_text()
    assert "67% (43% to 83%)" in words(page)
    assert got[0] == f"report: {page}, updated after every round; Ctrl-C stops the updates, not the run"
    assert got[1:] == [f"report: {page}"]


def test_a_run_that_nobody_works_on_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    got: list[str] = []
    lock = run.path / "checkpoint/LOCK"
    run.commit(1)
    run.steps = [lambda: lock.write_text(f"process {NOBODY} on {socket.gethostname()}")]
    watch.watch(run.path, tmp_path / "page.html", got.append)
    assert (
        got[1]
        == f"report: {tmp_path / 'page.html'}; {run.path} stopped after round 1: no process is running it"
    )
    page = tmp_path / "page.html"
    assert "It stopped after round 1" in words(page)
    assert "refresh" not in page.read_text()


def test_who_works_on_a_run(tmp_path: Path) -> None:
    """Of another machine, and where the name is being written, nobody knows."""
    run = Run(tmp_path, NOBODY)
    assert not at_work(run.path)
    lock = run.path / "checkpoint/LOCK"
    for text in (f"process {NOBODY} on elsewhere", "", f"process {os.getpid()} on {socket.gethostname()}"):
        lock.write_text(text)
        assert at_work(run.path)
    lock.unlink()
    assert not at_work(run.path)


def test_ctrl_c_leaves_a_page_that_does_not_load_itself(run: Run) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    run.commit(1)
    run.steps = [stop]
    result = CliRunner().invoke(app, ["report", str(run.path), "--watch", "--log", "json"])
    last = json.loads(result.stderr.splitlines()[-1])
    assert (last["event"], last["code"], result.exit_code) == ("stopped", 130, 130)
    page = run.path / "report.html"
    assert "It had completed round 1 when this page was written." in words(page)
    assert "refresh" not in page.read_text()


def test_a_finished_run_is_written_once(tmp_path: Path) -> None:
    path = write_run(tmp_path / "done")
    result = CliRunner().invoke(app, ["report", str(path), "--watch"])
    assert (result.exit_code, result.output) == (0, f"report: {path / 'report.html'}\n")


def test_an_unfinished_run_is_read_as_far_as_it_is_committed(run: Run) -> None:
    """A line behind the commit is not read: the process that wrote it may be killed before it commits."""
    assert watch.committed(run.path) == 0
    run.commit(1)
    (run.path / "rounds.jsonl").write_text("".join(run.lines))
    record = watch.read_unfinished(run.path)
    assert record is not None
    assert (watch.committed(run.path), len(record.rounds), record.summary["rounds"]) == (1, 1, 1)
    assert record.figures["preference_accuracy"].values["per_client"] == {c: v[1] for c, v in CLIENTS.items()}
    assert record.summary["bytes"] == {"up": 1000, "down": 2000}
    (run.path / "config.toml").write_text("[")
    with pytest.raises(RunError, match=r"config\.toml is damaged"):
        watch.read_unfinished(run.path)
