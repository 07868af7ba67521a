"""The backend that does the tasks in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from prefed.engines.job import Job
from prefed.engines.tasks import ClientStates, Task, TaskResult, run_task

__all__ = ["InProcess"]


class InProcess:
    """Does one task after the other, in this process.

    Args:
        job: what is run.
        states: clients' private states.
        threads: of PyTorch, while it works; the number before is restored afterwards.
    """

    def __init__(self, job: Job, states: ClientStates, threads: int = 1) -> None:
        self.job = job
        self.states = states
        self._threads = threads
        self._threads_before = torch.get_num_threads()

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

    def accept(self, clients: Iterable[str]) -> None:
        """The staged states of ``clients`` count."""
        self.states.accept(clients)

    def memory_mb(self) -> float:
        """Nothing: no process is started."""
        return 0.0
