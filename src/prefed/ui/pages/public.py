"""The page about a run as it may leave this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from prefed.runs.record import read_run, read_summary
from prefed.ui.pages.page import render


def public_page(run: Path) -> str:
    """The page about the finished run in a directory, made from three of its files and nothing else.

    So it has no response that a judge read, none of an alignment, and nothing of clients' tastes. Metrics of
    private states, such as gates, are left out of the summary.

    Raises:
        RunError: there is no finished run, or a file is damaged.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / run.resolve().name
        copy.mkdir()
        shutil.copyfile(run / "rounds.jsonl", copy / "rounds.jsonl")
        shutil.copyfile(run / "config.toml", copy / "config.toml")
        summary = read_summary(run / "summary.json")
        summary.pop("personal", None)
        (copy / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        return render(read_run(copy))
