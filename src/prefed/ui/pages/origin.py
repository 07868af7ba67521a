"""What a run's page says of where the run comes from: its data, its machine, its settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from prefed.core.text import pluralize
from prefed.data.statistics import gini
from prefed.runs.data_notices import left_out_text
from prefed.runs.record import RunRecord
from prefed.ui.pages.tables import Facts, Table, setting


def data_facts(run: RunRecord) -> Facts:
    """How many pairs clients have, and how much clients differ; empty where the summary does not say."""
    sizes = run.summary.get("clients", {})
    if not sizes:
        return []
    facts = [("clients", f"{len(sizes):,}")]
    for name, what in (("train", "training"), ("validation", "validation"), ("test", "test")):
        counts = [own.get(name, 0) for own in sizes.values()]
        if any(counts):
            each = f"{min(counts):,} / {np.median(counts):,g} / {max(counts):,}"
            facts.append((f"{what} pairs", f"{sum(counts):,}; least / median / most of a client: {each}"))
    train = [own.get("train", 0) for own in sizes.values()]
    if sum(train):
        facts.append(("Gini coefficient of sizes", f"{gini(train):.2f}: 0 where all have equally many"))
    told: Mapping[str, Any] = run.summary.get("data", {})
    if "rows" in told:
        facts.append(("rows", left_out_text(told) or f"{told['rows']:,}, all of them used"))
    unknown = "token_distance" not in told
    facts += [
        ("how clients differ", text) for key, text in _UNKNOWN.items() if unknown and key in run.summary
    ]
    for name in ("category", "token"):
        distance, random = told.get(f"{name}_distance"), told.get(f"random_{name}_distance")
        if distance is not None and random is not None:
            text = f"{distance:.2f}; {random:.2f} where pairs are assigned at random"
            facts.append((f"distance of clients' {_MANY[name]} from all", text))
    for name, text in _COUNTED.items():
        if name in told:
            facts.append((text, f"{told[name]:,}"))
    return facts


_UNKNOWN = {
    "sites": "not known to the hub: the pairs are at the sites",
    "peer": "not known to a peer: it has only the pairs of its own client",
}
"""Key of the summary of a run that has not all clients' pairs → what is said instead of distances."""
_MANY = {"category": "categories", "token": "tokens"}
_COUNTED = {
    "shared_prompts": "prompts that several clients train on",
    "contradictions": "pairs on which clients disagree",
}


def origin_facts(run: RunRecord) -> Facts:
    """When, by which command and on what the run was made, as far as it is recorded."""
    told: Mapping[str, Any] = run.summary.get("origin", {})
    facts = []
    if "finished" in told:
        at = datetime.fromisoformat(told["finished"]).astimezone(UTC)
        facts.append(("finished", f"{at:%Y-%m-%d %H:%M} UTC"))
    if "command" in told:
        facts.append(("command", shlex.join(map(_last_part, shlex.split(str(told["command"]))))))
    hardware = told.get("hardware", {})
    if hardware:
        facts.append(("machine", _machine(hardware)))
    return facts


def _last_part(word: str) -> str:
    """A word of a command, of a path the last part: where a folder lies is nobody else's business.

    >>> _last_part("/home/ann/first.toml"), _last_part("data.train=/home/ann/x.jsonl"), _last_part("runs/a")
    ('first.toml', 'data.train=x.jsonl', 'runs/a')
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
    """The method's own settings."""
    method = {name: value for name, value in run.config["method"].items() if not isinstance(value, dict)}
    return Table(
        "The [method] table.", ["setting", "value"], [(name, [setting(v)]) for name, v in method.items()]
    )


def versions(run: RunRecord) -> Facts:
    """Versions of libraries, and fingerprints of the data and the model."""
    known = [(name, str(version)) for name, version in run.summary.get("versions", {}).items()]
    return known + [(f"{name} fingerprint", digest) for name, digest in run.fingerprint.items()]
