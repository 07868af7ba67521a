"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from prefed.engines.backend import Backend, BackendSettings, JobFactory, WorkerError
from prefed.engines.job import Job
from prefed.engines.tasks import ClientStates, Task, TaskResult, run_task

if TYPE_CHECKING:
    from prefed.train.lockstep import Lockstep

__all__ = [
    "BACKENDS",
    "InProcess",
    "check_backend",
]


class InProcess(Backend):
    """Runs one task after the other in this process.

    Args:
        threads: number of PyTorch threads; the previous number is restored on exit.
        lockstep: runs visits of several clients at a time; ``None``: one after the other.
    """

    states: ClientStates

    def __init__(
        self, job: Job, states: ClientStates, threads: int = 1, lockstep: Lockstep | None = None
    ) -> None:
        self.job = job
        self.states = states
        self._threads, self._lockstep = threads, lockstep

    def __enter__(self) -> InProcess:
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        return self

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self._threads_before)

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """Yield results in the order of the tasks."""
        lockstep, source = self._lockstep, iter(tasks)
        while group := list(islice(source, 1 if lockstep is None else lockstep.size)):
            if lockstep is None or group[0].kind != "visit":
                yield from (run_task(self.job, task, self.states) for task in group)
            else:
                yield from lockstep.run([partial(run_task, self.job, task, self.states) for task in group])

    def figures(self) -> Mapping[str, Any]:
        """Fields for the record of the current round."""
        return {} if self._lockstep is None else self._lockstep.figures()


def _ray(job: Job, factory: JobFactory, states: ClientStates, settings: BackendSettings) -> Backend:
    from prefed.engines.backends.ray import RayActors

    return RayActors(job, factory, states, settings)


def _processes(job: Job, factory: JobFactory, states: ClientStates, settings: BackendSettings) -> Backend:
    from prefed.engines.backends.processes import WorkerProcesses

    return WorkerProcesses(factory, states, settings)


BACKENDS: Mapping[str, Callable[[Job, JobFactory, ClientStates, BackendSettings], Backend]] = {
    "in_process": lambda job, factory, states, settings: InProcess(
        job, states, settings.threads, settings.lockstep
    ),
    "processes": _processes,
    "ray": _ray,
}
"""Name → constructor of a backend. ``tests/laws/test_engine_laws.py`` tests all of them."""


def check_backend(name: str) -> None:
    """Check that the package of a backend is installed.

    Raises:
        WorkerError: it is not installed.
    """
    if name == "ray" and find_spec("ray") is None:
        raise WorkerError(
            "[engine] name = 'ray' needs the package ray: install it with pip install 'prefed[ray]'"
        )
