"""The page about a run as it may leave this machine."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from pathlib import Path

import tomli_w

from prefed.report.page import render
from prefed.runs.record import read_run
from prefed.runs.schema import read_config, read_summary
from prefed.runs.track import told_settings


def public_page(run: Path) -> str:
    """The page about the finished run in a directory, made from three of its files and nothing else.

    So it has no response that a judge read, none of an alignment, and nothing of clients' tastes. Figures of
    private states, such as gates, are left out of the summary. Of a path the last part is told.

    Raises:
        RunError: there is no finished run, or a file is damaged.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / run.resolve().name
        copy.mkdir()
        shutil.copyfile(run / "rounds.jsonl", copy / "rounds.jsonl")
        config = tomli_w.dumps(told_settings(read_config(run / "config.toml")))
        (copy / "config.toml").write_text(config, encoding="utf-8")
        summary = read_summary(run / "summary.json")
        summary.pop("personal", None)
        if command := summary.get("origin", {}).get("command"):
            summary["origin"]["command"] = shlex.join(map(_last_part, shlex.split(command)))
        (copy / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        return render(read_run(copy))


def _last_part(word: str) -> str:
    """A word of a command, of a path the last part.

    >>> _last_part("/home/ann/first.toml"), _last_part("data.train=/home/ann/x.jsonl"), _last_part("runs/a")
    ('first.toml', 'data.train=x.jsonl', 'runs/a')
    """
    key, equals, value = word.rpartition("=")
    return key + equals + (Path(value).name if Path(value).is_absolute() else value)
