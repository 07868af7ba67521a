"""The log of all that a site was asked for and sent, on the disk before the answer leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.core.text import printable, size
from prefed.core.wire import WireError, outline_upload


class SentLog:
    """A site's log, a file for each month.

    Args:
        folder: for its owner alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files.private_folder(folder)

    def add(self, what: str, **fields: Any) -> None:
        """Write a line; fields that are empty are left out."""
        now = datetime.now(UTC)
        entry = {"time": now.isoformat(timespec="seconds"), "what": what}
        entry |= {name: value for name, value in fields.items() if value not in (None, "", 0, {}, [])}
        # Half of a surrogate pair, which the hub may send, is written as JSON's own escape.
        line = json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        path = self._folder / f"{now:%Y-%m}.jsonl"
        # On a full disk a line may have been cut off: the next one begins after it.
        files.append(path, line if _is_whole(path) else b"\n" + line, mode=0o600)

    def entries(self) -> Iterator[dict[str, Any]]:
        """All entries, from the first. A line that was cut off is left out."""
        for path in sorted(self._folder.glob("*.jsonl")):
            for line in path.read_bytes().splitlines():
                try:
                    yield json.loads(line)
                except ValueError:
                    continue


def _is_whole(path: Path) -> bool:
    """Whether a file is absent, empty, or ends with a line's end."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


def contents(kind: str, message: bytes) -> dict[str, Any]:
    """What a message to the hub holds, for the log: the numbers in it, and how many are in tensors."""
    if not message:
        return {}
    if kind == "evaluate":
        return {"figures": json.loads(message)}
    try:
        numbers, weight, scalars = outline_upload(message)
    except WireError as error:
        return {"unreadable": str(error)}
    return {"tensors": numbers, "weight": weight, "scalars": scalars}


def line_of(entry: dict[str, Any]) -> str:
    """An entry for a person.

    >>> line_of({"time": "2026-11-22T10:40:12+00:00", "what": "train", "run": "3fa9b2c4d5e6f708", "round": 3,
    ...          "client": "ward-7", "bytes": 1290240, "tensors": {"model": 321000}, "weight": 41.0})
    '2026-11-22 10:40:12  run 3fa9b2c4  round 3  train  ward-7  1.3 MB: model 321,000 numbers, weight 41'
    """
    words = [entry["time"][:19].replace("T", " ")]
    words += [f"run {entry['run'][:8]}"] if "run" in entry else []
    words += [f"round {entry['round']}"] if "round" in entry else []
    words += [entry["what"], *([entry["client"]] if "client" in entry else [])]
    told = [f"{name} {count:,} numbers" for name, count in entry.get("tensors", {}).items()]
    told += [f"weight {entry['weight']:g}"] if "weight" in entry else []
    figures = {**entry.get("scalars", {}), **entry.get("figures", {})}
    told += [f"{name} {value:.4g}" for name, value in figures.items()]
    told += [
        f"{key}: {entry[key]}" for key in ("refused", "withheld", "failed", "told", "noted") if key in entry
    ]
    if "bytes" in entry:
        words.append(size(entry["bytes"]))
    return printable("  ".join(words) + (f": {', '.join(told)}" if told else ""))
