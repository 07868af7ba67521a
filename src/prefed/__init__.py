"""Federated preference alignment.

>>> import prefed
>>> experiment = prefed.Experiment(
...     data={"train": "pairs.jsonl", "partition": {"by": "column", "column": "worker"}},
...     model={"name": "distilbert/distilgpt2"},
...     method={"name": "feddpo"},
... )
>>> experiment.method.name
'feddpo'
"""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefed.config import ConfigError, Experiment
    from prefed.core import Callback
    from prefed.runs.loaded import LoadedRun, load_run
    from prefed.runs.record import RunRecord, read_run
    from prefed.runs.run import RunResult, run

__all__ = [
    "Callback",
    "ConfigError",
    "Experiment",
    "LoadedRun",
    "RunRecord",
    "RunResult",
    "load_run",
    "read_run",
    "run",
]

_MODULES = {
    "config": ("ConfigError", "Experiment"),
    "core": ("Callback",),
    "runs.loaded": ("LoadedRun", "load_run"),
    "runs.record": ("RunRecord", "read_run"),
    "runs.run": ("RunResult", "run"),
}


def _cores_are_free() -> bool:
    """Whether, by Linux's count of running threads, others run on less than a quarter of the cores."""
    try:
        cores = len(os.sched_getaffinity(0))
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        return int(running) - 1 < cores / 4
    except (AttributeError, OSError, IndexError, ValueError):
        return False  # not Linux


# OpenMP reads these when PyTorch is loaded. A thread that waits for others looks 300,000 times before it
# sleeps if nothing is set: beside other work that costs several times the CPU time. To sleep at once is cheap
# there, and a quarter slower where nothing else runs. What the user has set stays, whichever it is.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
    os.environ.update({"GOMP_SPINCOUNT": "30000"} if _cores_are_free() else {"OMP_WAIT_POLICY": "PASSIVE"})


def __getattr__(name: str) -> Any:
    # Imported at first use: PyTorch and transformers take seconds, and `prefed --help` needs neither.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"prefed.{module}"), name)
    raise AttributeError(f"module 'prefed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
