"""Writes the page of a run anew while the run continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import cast

from prefed.core.records import Summary
from prefed.runs.record import RunError, RunRecord, read_config, read_run
from prefed.store import RunReader, StoreError
from prefed.store.directory import at_work
from prefed.ui.pages.page import Unfinished, write_page, write_waiting

LOOK = 1.0
"""Seconds between two checks of a run."""
REFRESH = 5
"""Seconds after which a browser loads a watched page again."""


def watch(run: Path, out: Path, report: Callable[[str], None]) -> None:
    """Write the page of a run whenever a round is committed, until the run ends.

    The last page does not load itself again: neither that of a run that is finished or has stopped, nor the
    one that is left behind where this is interrupted.

    Args:
        run: the run directory.
        out: the page.
        report: receives a line with the page's place, and one on a run that stopped before its end.

    Raises:
        RunError: there is no run, or a file is damaged.
        KeyboardInterrupt: this was interrupted; the last page is written.
    """
    if not run.is_dir():
        read_run(run)  # says which runs there are
    written, said = -1, False
    try:
        while not (run / "summary.json").exists():
            # Reading in this order misses no round of a process that ends in between.
            working, number = at_work(run), committed(run)
            if not working:
                break
            if number != written:
                _write(run, out, number, working=True)
                written = number
                if not said:
                    report(f"report: {out}, written after every round; Ctrl-C ends this, not the run")
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
    report(f"report: {out}; no process runs {run}: it stopped after round {number}")


def _write(run: Path, out: Path, number: int, *, working: bool | None) -> None:
    """The page of an unfinished run.

    Args:
        working: whether a process runs it; ``None`` where nothing checks any more.
    """
    states = {
        True: f"It has finished round {number} and continues: this page reloads by itself.",
        False: f"It stopped after round {number}, and no process runs it.",
        None: f"It had finished round {number} when this page was written.",
    }
    going = Unfinished(f"This run is not finished. {states[working]}", REFRESH if working else None)
    record = read_unfinished(run) if number else None
    if record is None:
        write_waiting(run, out, going)
    else:
        write_page(record, out, going)


def committed(path: Path) -> int:
    """The last committed round of a run; 0 before the first.

    Raises:
        RunError: the checkpoint is damaged.
    """
    try:
        return RunReader(path).commit.round if (path / "checkpoint/COMMIT.json").exists() else 0
    except StoreError as error:
        raise RunError(str(error)) from error


def read_unfinished(path: Path) -> RunRecord | None:
    """An unfinished run: its committed rounds, and a summary as after the last of them that was evaluated.

    The summary lacks what is known only at the end, such as the clients' numbers of pairs.

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
