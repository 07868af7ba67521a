"""The backends by name, a file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from prefed.engines.backend import Backend, BackendSettings
from prefed.engines.backends.in_process import InProcess
from prefed.engines.backends.processes import WorkerProcesses
from prefed.engines.job import Job, JobFactory
from prefed.engines.tasks import ClientStates

__all__ = ["BACKENDS", "InProcess", "MakeBackend", "WorkerProcesses"]

MakeBackend: TypeAlias = Callable[[Job, JobFactory, ClientStates, BackendSettings], Backend]
"""A job, how another process builds it, this machine's store of private states, and settings → a backend."""

BACKENDS: Mapping[str, MakeBackend] = {
    "in_process": lambda job, factory, states, settings: InProcess(job, states, settings.threads),
    "processes": lambda job, factory, states, settings: WorkerProcesses(
        factory, states, settings.workers, settings.threads, settings.timeout
    ),
}
"""Every backend. ``tests/laws/test_engine_laws.py`` holds each of them to the same laws."""
