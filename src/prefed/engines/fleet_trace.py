"""Trace files: when each client of a real fleet was online, and its speed."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.core.text import did_you_mean

_NUMBERS = ("start", "end", "seconds", "network", "dropout")


@dataclass(frozen=True)
class Window:
    """A time interval ``[start, end)`` in which a client is online.

    Attributes:
        seconds: duration of a visit that starts in it, without messages.
        network: seconds for the messages of a visit.
        dropout: probability that a visit ends without a reply.
    """

    start: float
    end: float
    seconds: float
    network: float
    dropout: float


def read_trace(
    path: Path, usual: Mapping[str, Window], period: float | None = None
) -> dict[str, tuple[Window, ...]]:
    """Read a trace: a CSV file with a header or a JSON lines file (``.jsonl``), with one window per row.

    Columns: ``client``, and optionally ``start``, ``end``, ``seconds``, ``network`` and ``dropout``. A client
    may have several rows.

    Args:
        usual: client → default values for missing or empty columns.
        period: end of the trace if it repeats.

    Returns:
        Client → its windows in order of time.

    Raises:
        ValueError: the file cannot be read, a row is invalid, windows of a client overlap, or a client has
            no row. The message names the file, line and client.
    """
    windows: dict[str, list[tuple[Window, int]]] = {client: [] for client in usual}
    rows = _json_rows if path.suffix in (".jsonl", ".ndjson") else _csv_rows
    for number, row in rows(path, files.read_lines(path)):
        where = f"{path}, line {number}"
        client = "" if row.get("client") is None else str(row["client"])
        if not client:
            raise ValueError(f"{where}: client is missing")
        if client not in windows:
            raise ValueError(
                f"{where}: no training client is called {client!r}{did_you_mean(client, windows)}"
            )
        windows[client].append((_window(row, usual[client], period, where), number))
    for client, found in windows.items():
        if not found:
            raise ValueError(f"{path}: client {client!r} has no row: add one")
        found.sort(key=lambda one: one[0].start)
        for (before, _), (after, number) in pairwise(found):
            if after.start < before.end:
                raise ValueError(
                    f"{path}, line {number}: this window of client {client!r} starts at {after.start:g}, "
                    f"before another one ends at {before.end:g}: correct one"
                )
    return {client: tuple(window for window, _ in found) for client, found in windows.items()}


def _window(row: Mapping[str, Any], usual: Window, period: float | None, where: str) -> Window:
    unknown = [name for name in row if name not in (*_NUMBERS, "client")]
    if unknown:
        raise ValueError(f"{where}: no such column: {unknown[0]!r}{did_you_mean(unknown[0], _NUMBERS)}")
    values = {name: getattr(usual, name) for name in _NUMBERS}
    if period is not None:
        values["end"] = period
    for name in _NUMBERS:
        if row.get(name) in (None, ""):
            continue
        try:
            values[name] = float(row[name])
        except (TypeError, ValueError):
            raise ValueError(f"{where}: {name} = {row[name]!r}: must be a number") from None
        if not math.isfinite(values[name]) or values[name] < 0:
            raise ValueError(f"{where}: {name} = {values[name]:g}: must be finite and at least 0")
    if values["end"] <= values["start"]:
        raise ValueError(f"{where}: end = {values['end']:g}: must be after start = {values['start']:g}")
    if period is not None and values["end"] > period:
        raise ValueError(f"{where}: end = {values['end']:g}: must not be after period = {period:g}")
    if values["seconds"] == 0:
        raise ValueError(f"{where}: seconds = 0: must be above 0")
    if values["dropout"] >= 1:
        raise ValueError(f"{where}: dropout = {values['dropout']:g}: must be below 1")
    return Window(**values)


def _csv_rows(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each row with its line number."""
    reader = csv.DictReader(lines, skipinitialspace=True)
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"{path}, line {reader.line_num}: the number of cells differs from the header")
        yield reader.line_num, row


def _json_rows(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        yield number, row
