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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefed.config import Experiment
    from prefed.runs.run import RunResult, run

__all__ = ["Experiment", "RunResult", "run"]

# OpenMP reads this when PyTorch is loaded. Its own way is to spin where threads wait for each other, which
# beside other work on the machine costs several times the CPU time. What a user has set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    # Imported when asked for: importing torch and transformers takes seconds, and `prefed --help` need not.
    if name == "Experiment":
        from prefed.config import Experiment

        return Experiment
    if name in ("RunResult", "run"):
        from prefed.runs import run as module

        return getattr(module, name)
    raise AttributeError(f"module 'prefed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
