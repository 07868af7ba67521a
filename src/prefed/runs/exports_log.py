"""What was made from a run outside its directory, so that `prefed forget` can name it: ``exports.jsonl``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from prefed.core import files
from prefed.runs.finished_run import RunError

EXPORTS = "exports.jsonl"
"""File of a run that lists exports, pushes, pages, plots, and what its model or its selectors judged."""
_log = logging.getLogger("prefed")


def whole_run(run: Path) -> Path:
    """Return the run whose alignment continues its rounds in this directory; without one, the directory."""
    path = run.resolve()
    return path.parents[3] if path.match("align/generations/*/*") else path


def record_copy(
    run: Path,
    what: Literal["export", "push", "page", "plot", "judgement"],
    to: Path | str,
    about: Mapping[str, Any] = {},
) -> None:
    """Add a row to :data:`EXPORTS`; not of a page or a judgement in the run directory itself.

    Args:
        to: a path, or the URL of a commit on the hub.
        about: further keys of the row.
    """
    run, where = whole_run(run), str(to.resolve()) if isinstance(to, Path) else to
    if what != "export" and Path(where).is_relative_to(run):
        return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    row = json.dumps({"at": now, "what": what, "to": where, **about})
    try:
        files.append(run / EXPORTS, row.encode() + b"\n", mode=0o600)
    except OSError as error:
        _log.warning("%s: prefed forget will not know %s (%s)", run, where, error)


def read_copies(run: Path) -> list[dict[str, Any]]:
    """Return the rows of :data:`EXPORTS`; none if there is no such file.

    Raises:
        RunError: a row is damaged.
    """
    path, rows = run / EXPORTS, []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            row = json.loads(line)
            rows.append({"at": row["at"], "what": row["what"], "to": row["to"], **row})
        except (ValueError, TypeError, KeyError):
            raise RunError(f"{path}, line {number} is damaged: note what it names, and delete it") from None
    return rows
