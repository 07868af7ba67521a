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

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

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

# PyTorch and transformers take seconds, and `prefed --help` needs neither.
attach(__name__, __file__)


def __dir__() -> list[str]:
    return sorted(__all__)
