"""The page about a run as it may leave this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from prefed.report.page import render
from prefed.runs.record import read_run


def public_page(run: Path) -> str:
    """The page about the finished run in a directory, made from three of its files and nothing else.

    So it has no response that a judge read, none of an alignment, and nothing of clients' tastes. Figures of
    private states, such as gates, are left out of the summary.

    Raises:
        RunError: there is no finished run, or a file is damaged.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / run.resolve().name
        copy.mkdir()
        for name in ("config.toml", "rounds.jsonl"):
            shutil.copyfile(run / name, copy / name)
        summary = json.loads((run / "summary.json").read_text("utf-8"))
        summary.pop("personal", None)
        (copy / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        return render(read_run(copy))
