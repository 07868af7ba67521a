"""A run that goes on, as far as its rounds are committed."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from prefed.core.records import Summary
from prefed.runs.record import RunError, RunRecord, read_config
from prefed.store import RunReader, StoreError


def committed(path: Path) -> int:
    """The last committed round of a run; 0 before the first.

    Raises:
        RunError: the checkpoint is damaged.
    """
    try:
        return RunReader(path).commit.round if (path / "checkpoint/COMMIT.json").exists() else 0
    except StoreError as error:
        raise RunError(str(error)) from error


def read_going(path: Path) -> RunRecord | None:
    """An unfinished run: its committed rounds, and a summary as after the last of them that was evaluated.

    The summary does not say what is told at the end alone, such as the clients' numbers of pairs.

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
