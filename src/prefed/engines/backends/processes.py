"""The backend that spreads tasks over worker processes of this machine.

Private states stay in a store of this process. A task's state goes to the worker with the task, and the next
state comes back with the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait

from prefed.engines.backend import BackendSettings
from prefed.engines.backends.worker import Worker
from prefed.engines.job import JobFactory
from prefed.engines.tasks import ClientStates, Task, TaskResult


class WorkerProcesses:
    """Spreads tasks over processes.

    Args:
        factory: builds the job, once in each process.

    Raises:
        WorkerError: (on entering, and from :meth:`run`) a process died, raised, or took longer.
    """

    def __init__(self, factory: JobFactory, states: ClientStates, settings: BackendSettings) -> None:
        self.states = states
        self._factory = factory
        self._settings = settings
        self._workers: list[Worker] = []

    def __enter__(self) -> WorkerProcesses:
        try:
            for _ in range(self._settings.workers):
                self._workers.append(Worker())
            for worker in self._workers:
                worker.send(**vars(self._factory), threads=self._settings.threads)
            for worker in self._workers:
                worker.receive()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """The results, as they come."""
        source, busy = iter(tasks), dict[Connection, Worker]()
        idle = list(self._workers)
        while True:
            while idle and (task := next(source, None)) is not None:
                worker = idle.pop()
                busy[worker.pipe] = worker
                worker.give(task, self.states.read(task.client), self._settings.timeout)
            if not busy:
                return
            for pipe in wait(list(busy)):
                worker = busy.pop(pipe)  # type: ignore[call-overload]
                fields = worker.receive()
                state: bytes | None = fields.pop("state")
                result = TaskResult(**fields)
                if state is not None:
                    self.states.stage(result.client, state)
                idle.append(worker)
                yield result

    def accept(self, clients: Iterable[str]) -> None:
        """The staged states of ``clients`` count."""
        self.states.accept(clients)

    def memory_mb(self) -> float:
        """The peak of each process, added up, in MiB."""
        return sum(worker.memory_mb for worker in self._workers)

    def _stop(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []
