"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec

import torch

from prefed.engines.backend import Backend, BackendSettings, JobFactory
from prefed.engines.backends.processes import WorkerProcesses, check_devices
from prefed.engines.backends.ray import RayActors
from prefed.engines.backends.worker_pool import WorkerError
from prefed.engines.job import Job
from prefed.engines.tasks import ClientStates, Task, TaskResult, run_task

__all__ = [
    "BACKENDS",
    "InProcess",
    "RayActors",
    "WorkerProcesses",
    "backend_name",
    "check_backend",
    "check_devices",
]


class InProcess(Backend):
    """Does one task after the other, in this process.

    Args:
        threads: of PyTorch, while it works; the number before is restored afterwards.
    """

    states: ClientStates

    def __init__(self, job: Job, states: ClientStates, threads: int = 1) -> None:
        self.job = job
        self.states = states
        self._threads = threads

    def __enter__(self) -> InProcess:
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        return self

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self._threads_before)

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """The results, in the order of the tasks."""
        for task in tasks:
            yield run_task(self.job, task, self.states)


BACKENDS: Mapping[str, Callable[[Job, JobFactory, ClientStates, BackendSettings], Backend]] = {
    "in_process": lambda job, factory, states, settings: InProcess(job, states, settings.threads),
    "processes": lambda job, factory, states, settings: WorkerProcesses(factory, states, settings),
    "ray": lambda job, factory, states, settings: RayActors(job, factory, states, settings),
}
"""Every backend by name: a job, how another process builds it, this machine's store of private states, and
settings → a backend. ``tests/laws/test_engine_laws.py`` holds each of them to the same laws."""


def backend_name(engine: str, workers: int) -> str:
    """The backend of :data:`BACKENDS` that ``[engine] name`` and ``workers`` ask for.

    ``"local"`` is this process alone, or with any workers its worker processes. Every other engine has its
    backend's name.

    >>> backend_name("local", 0), backend_name("local", 2)
    ('in_process', 'processes')
    """
    if engine != "local":
        return engine
    return "processes" if workers else "in_process"


def check_backend(name: str) -> None:
    """Refuse a backend whose package is not installed.

    Raises:
        WorkerError: it is not; the message has the command that installs it.
    """
    if name == "ray" and find_spec("ray") is None:
        raise WorkerError("[engine] name = 'ray' needs the package ray: pip install 'prefed[ray]'")
