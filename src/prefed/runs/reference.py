"""Where runs cache what they compute with the frozen model; equal runs can share a cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

from prefed.config import Experiment
from prefed.core import files
from prefed.core.strict_settings import flatten

SHARED = "PREFED_REFERENCE"
"""Environment variable with a cache folder for all runs. ``prefed sweep`` sets it for its runs."""
NOT_CACHED = {
    *("rounds", "cohort", "evaluate", "stop", "engine", "merge", "privacy", "fleet", "graph", "align"),
    *("report", "track"),
}
"""Keys and tables of an experiment that do not affect ``cache/``."""
_FREE = NOT_CACHED - {"evaluate"} | {"method"}
"""Keys and tables, except those below, in which runs that share a cache may differ. ``evaluate`` may not,
since evaluations decide how pairs are batched first.
"""
_FIXED = ("method.name", "engine.max_tokens")


def reference_folder(experiment: Experiment, cache: Path) -> Path:
    """Return the cache folder for reference log-probabilities and other outputs of the frozen model.

    Runs share a folder if they process the same pairs with the same model, in the same batches and order.
    Their values are bit-identical, and several runs may write at once.

    Args:
        cache: the cache of the run, used if the environment variable is not set.
    """
    shared = os.environ.get(SHARED)
    if not shared:
        return cache / "reference"
    tables = flatten(experiment.tables())
    alike = {name: value for name, value in tables.items() if name.partition(".")[0] not in _FREE}
    alike |= {name: tables[name] for name in _FIXED if name in tables}
    alike["parts"] = sorted(experiment.parts)
    return Path(shared) / files.digest(json.dumps(alike, sort_keys=True).encode())[:16]
