"""Where runs cache what they compute with the frozen model; equal runs can share a cache."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence, Set
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
_FREE = NOT_CACHED - {"evaluate"} | {"method", "seed"}
"""Keys and tables, but for some settings, in which runs that share log-probabilities may differ. ``evaluate``
may not, since evaluations decide how pairs are batched first. What the seed draws is in the names of files.
"""


def reference_folder(experiment: Experiment, cache: Path) -> Path:
    """Return the cache folder for reference log-probabilities and other outputs of the frozen model.

    Runs share a folder if they process the same pairs with the same model, in the same batches and order.
    Their values are bit-identical, and several runs may write at once. The names of files contain the model
    and the pairs of each client's splits.

    Args:
        cache: the cache of the run, used if the environment variable is not set.
    """
    return _folder(experiment, _FREE, ("method.name", "engine.max_tokens"), cache)


def features_folder(experiment: Experiment, cache: Path) -> Path:
    """Return the cache folder for hidden states of the frozen model, which methods and seeds share.

    They depend on nothing but the model and the pairs of a client's split, which the names of files contain.

    Args:
        cache: as for :func:`reference_folder`.
    """
    return _folder(experiment, _FREE | {"evaluate", "parts"}, ("engine.max_tokens",), cache)


def _folder(experiment: Experiment, free: Set[str], fixed: Sequence[str], cache: Path) -> Path:
    """Return the folder of runs that agree in all keys and tables but ``free``, and in ``fixed``."""
    shared = os.environ.get(SHARED)
    if not shared:
        return cache / "reference"
    tables = {**flatten(experiment.tables()), "parts": sorted(experiment.parts)}
    alike = {name: value for name, value in tables.items() if name.partition(".")[0] not in free}
    alike |= {name: tables[name] for name in fixed if name in tables}
    return Path(shared) / files.digest(json.dumps(alike, sort_keys=True).encode())[:16]
