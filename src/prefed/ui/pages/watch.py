"""Refreshes the page of a run while the run continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import cast

from prefed.core.records import Summary
from prefed.runs.finished_run import RunError, RunRecord, read_config, read_run
from prefed.store import RunReader, StoreError
from prefed.store.directory import at_work
from prefed.ui.pages.page import Unfinished, write_page, write_waiting

LOOK = 1.0
"""Seconds between two checks of a run."""
REFRESH = 5
"""Seconds after which the browser reloads a watched page."""


def watch(run: Path, out: Path, report: Callable[[str], None]) -> None:
    """Write the page of a run after every committed round, until the run ends.

    The final page, also after an interrupt, does not reload itself.

    Args:
        report: called with messages for the user.

    Raises:
        RunError: there is no run, or a file is damaged.
        KeyboardInterrupt: after an interrupt, once the final page is written.
    """
    if not run.is_dir():
        read_run(run)  # raises an error that lists the runs
    written, said = -1, False
    try:
        while not (run / "summary.json").exists():
            # In this order, no round is missed if the process ends in between.
            working, number = at_work(run), committed(run)
            if not working:
                break
            if number != written:
                _write(run, out, number, working=True)
                written = number
                if not said:
                    report(f"report: {out}, updated after every round; Ctrl-C stops the updates, not the run")
                    said = True
            sleep(LOOK)
    except KeyboardInterrupt:
        _write(run, out, committed(run), working=None)
        raise
    if (run / "summary.json").exists():
        write_page(read_run(run), out)
        report(f"report: {out}")
        return
    number = committed(run)
    _write(run, out, number, working=False)
    report(f"report: {out}; {run} stopped after round {number}: no process is running it")


def _write(run: Path, out: Path, number: int, *, working: bool | None) -> None:
    """Write the page of an unfinished run.

    Args:
        working: whether a process runs it; ``None`` if unknown.
    """
    states = {
        True: f"It has completed round {number} and continues. This page reloads automatically.",
        False: f"It stopped after round {number}, and no process is running it.",
        None: f"It had completed round {number} when this page was written.",
    }
    notice = Unfinished(f"This run is not finished. {states[working]}", REFRESH if working else None)
    record = read_unfinished(run) if number else None
    if record is None:
        write_waiting(run, out, notice)
    else:
        write_page(record, out, notice)


def committed(path: Path) -> int:
    """The last committed round of a run, or 0.

    Raises:
        RunError: the checkpoint is damaged.
    """
    try:
        return RunReader(path).commit.round if (path / "checkpoint/COMMIT.json").exists() else 0
    except StoreError as error:
        raise RunError(str(error)) from error


def read_unfinished(path: Path) -> RunRecord | None:
    """Read the committed rounds of an unfinished run.

    The summary has the metrics of the last evaluation. It lacks values known only at the end, such as the
    clients' numbers of pairs.

    Returns:
        The run; ``None`` before the first evaluation.

    Raises:
        RunError: a file is damaged.
    """
    try:
        config = read_config(path / "config.toml")
        reader = RunReader(path)
        rounds = reader.rounds()
    except (ValueError, StoreError) as error:
        raise RunError(str(error)) from error
    evaluations = [record["evaluation"] for record in rounds if "evaluation" in record]
    if not evaluations:
        return None
    totals = reader.commit.totals
    summary = {
        **{name: value for name, value in evaluations[-1].items() if name != "clients"},
        "method": config["method"]["name"],
        "rounds": len(rounds),
        "bytes": {"up": int(totals.get("bytes_up", 0)), "down": int(totals.get("bytes_down", 0))},
        "seconds": totals.get("seconds", 0.0),
    }
    return RunRecord(path, config, tuple(rounds), cast(Summary, summary), reader.commit.fingerprint)
