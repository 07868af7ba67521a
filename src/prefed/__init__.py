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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefed.config import ConfigError, Experiment
    from prefed.core import Callback
    from prefed.runs.finished_run import RunRecord, read_run
    from prefed.runs.loaded_run import LoadedRun, load_run
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
    "runs.loaded_run": ("LoadedRun", "load_run"),
    "runs.finished_run": ("RunRecord", "read_run"),
    "runs.run": ("RunResult", "run"),
}


def __getattr__(name: str) -> Any:
    # Imported at first use: PyTorch and transformers take seconds, and `prefed --help` needs neither.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"prefed.{module}"), name)
    raise AttributeError(f"module 'prefed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
