"""Where runs keep what they compute of the frozen model: each by itself, or runs that are alike together."""

from __future__ import annotations

import json
import os
from pathlib import Path

from prefed.config import Experiment
from prefed.core import files
from prefed.core.strict_settings import flatten

SHARED = "PREFED_REFERENCE"
"""The environment variable that names a folder for all runs. ``prefed sweep`` sets it for its own."""
NOT_CACHED = {
    *("rounds", "cohort", "evaluate", "stop", "engine", "merge", "privacy", "fleet", "graph", "align"),
    "track",
}
"""Keys and tables of an experiment that nothing in ``cache/`` depends on."""
_FREE = NOT_CACHED - {"evaluate"} | {"method"}
"""Keys and tables in which alike runs may differ, but for the keys below. An evaluation decides in which
groups pairs go through the model first.
"""
_FIXED = ("method.name", "engine.max_tokens")


def reference_folder(experiment: Experiment, cache: Path) -> Path:
    """The folder of a run's reference log-probabilities and of what else it computes of the frozen model.

    Runs are alike that send the same pairs through the same model, in the same groups and order. Their
    numbers are equal bit for bit, and several of them may write at once.

    Args:
        cache: the run's own folder, used where the variable is not set.
    """
    shared = os.environ.get(SHARED)
    if not shared:
        return cache / "reference"
    tables = flatten(experiment.tables())
    alike = {name: value for name, value in tables.items() if name.partition(".")[0] not in _FREE}
    alike |= {name: tables[name] for name in _FIXED if name in tables}
    alike["parts"] = sorted(experiment.parts)
    return Path(shared) / files.digest(json.dumps(alike, sort_keys=True).encode())[:16]
