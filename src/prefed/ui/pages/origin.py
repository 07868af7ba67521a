"""Provenance of a run on its page: data, command, machine, settings, versions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from prefed.core.text import pluralize
from prefed.data.statistics import gini
from prefed.methods import METHODS
from prefed.runs.data_notices import left_out_text
from prefed.runs.finished_run import RunRecord
from prefed.ui.pages.tables import Facts, Table, setting


def described_method(run: RunRecord) -> Mapping[str, str] | None:
    """Title and source of the method: as recorded by the run, or of the method of its name here."""
    own: Mapping[str, str] | None = run.summary.get("origin", {}).get("method")
    if own is not None:  # a report does not need the code, which may be missing or broken here
        return own
    kind = METHODS.get(run.method)
    return {"title": kind.title, "source": kind.source} if kind else None


def data_facts(run: RunRecord) -> Facts:
    """Numbers of pairs, and differences between clients; empty if the summary has neither."""
    sizes = run.summary.get("clients", {})
    if not sizes:
        return []
    facts = [("clients", f"{len(sizes):,}")]
    for name, what in (("train", "training"), ("validation", "validation"), ("test", "test")):
        counts = [own.get(name, 0) for own in sizes.values()]
        if any(counts):
            each = f"{min(counts):,} / {np.median(counts):,g} / {max(counts):,}"
            facts.append((f"{what} pairs", f"{sum(counts):,}; per client (min / median / max): {each}"))
    train = [own.get("train", 0) for own in sizes.values()]
    if sum(train):
        facts.append(("Gini coefficient of sizes", f"{gini(train):.2f} (0: equal sizes)"))
    data: Mapping[str, Any] = run.summary.get("data", {})
    if "rows" in data:
        facts.append(("rows", left_out_text(data) or f"{data['rows']:,}, all used"))
    if "token_distance" not in data:
        facts += [("distance between clients", text) for key, text in _UNKNOWN.items() if key in run.summary]
    for name, several in (("category", "categories"), ("token", "tokens")):
        distance, random = data.get(f"{name}_distance"), data.get(f"random_{name}_distance")
        if distance is not None and random is not None:
            text = f"{distance:.2f}; {random:.2f} with random assignment"
            facts.append((f"mean distance of clients' {several} from all clients'", text))
    for name, text in (
        ("shared_prompts", "training prompts shared by several clients"),
        ("contradictions", "pairs that clients label differently"),
    ):
        if name in data:
            facts.append((text, f"{data[name]:,}"))
    return facts


_UNKNOWN = {
    "sites": "unknown to the hub, because the pairs are at the sites",
    "peer": "unknown to a peer, which has only its own client's pairs",
}
"""Key in the summary of a run that lacks some clients' pairs → text in place of the distances."""


def origin_facts(run: RunRecord) -> Facts:
    """End, command and machine of the run, as far as recorded."""
    origin: Mapping[str, Any] = run.summary.get("origin", {})
    facts = []
    if "finished" in origin:
        at = datetime.fromisoformat(origin["finished"]).astimezone(UTC)
        facts.append(("finished", f"{at:%Y-%m-%d %H:%M} UTC"))
    if "command" in origin:
        facts.append(("command", shlex.join(map(_without_folder, shlex.split(str(origin["command"]))))))
    hardware = origin.get("hardware", {})
    if hardware:
        facts.append(("machine", _machine(hardware)))
    return facts


def _without_folder(word: str) -> str:
    """Shorten an absolute path in a command to its last part, for privacy.

    >>> _without_folder("/home/ann/first.toml"), _without_folder("data.train=/home/ann/x.jsonl")
    ('first.toml', 'data.train=x.jsonl')
    >>> _without_folder("runs/a")
    'runs/a'
    """
    key, equals, value = word.rpartition("=")
    return key + equals + (Path(value).name if Path(value).is_absolute() else value)


def _machine(hardware: Mapping[str, Any]) -> str:
    parts = [str(hardware["processor"])] if hardware.get("processor") else []
    if hardware.get("cores"):
        parts.append(pluralize(hardware["cores"], "core", "cores"))
    if hardware.get("memory_mb"):
        parts.append(f"{hardware['memory_mb'] / 1024:,.0f} GiB memory")
    parts += [str(device) for device in hardware.get("devices", [])]
    if hardware.get("system"):
        parts.append(str(hardware["system"]))
    return ", ".join(parts)


def settings_table(run: RunRecord) -> Table:
    """The settings in ``[method]``."""
    method = run.config["method"].items()
    rows = [(name, [setting(value)]) for name, value in method if not isinstance(value, dict)]
    return Table("The [method] table.", ["setting", "value"], rows)


def versions(run: RunRecord) -> Facts:
    """Library versions, and fingerprints of the data and the model."""
    known = [(name, str(version)) for name, version in run.summary.get("versions", {}).items()]
    return known + [(f"{name} fingerprint", digest) for name, digest in run.fingerprint.items()]
