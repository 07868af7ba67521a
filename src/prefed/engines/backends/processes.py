"""The backend that spreads tasks over worker processes of this machine.

Private states stay in a store of this process. A task's state goes to the worker with the task, and the next
state comes back with the result.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

import torch

from prefed.engines.backend import Backend, BackendSettings
from prefed.engines.backends.worker import DEVICES, Worker, WorkerError
from prefed.engines.job_factory import JobFactory
from prefed.engines.tasks import ClientStates, Task, TaskResult


class WorkerProcesses(Backend):
    """Spreads tasks over processes. Each has one CUDA device, of those that the settings name, or where there
    are several.

    Args:
        factory: builds the job, once in each process.

    Raises:
        WorkerError: (on entering, and from :meth:`run`) a process died, raised, or took longer.
    """

    states: ClientStates

    def __init__(self, factory: JobFactory, states: ClientStates, settings: BackendSettings) -> None:
        self.states = states
        self._factory = factory
        self._settings = settings
        self._workers: list[Worker] = []
        self._busy: dict[Connection, Worker] = {}

    def __enter__(self) -> WorkerProcesses:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """The results, as they come."""
        self._replace_busy()
        source, busy = iter(tasks), self._busy
        idle = list(self._workers)
        while True:
            while idle and (task := next(source, None)) is not None:
                worker = idle.pop()
                before = self.states.read(task.client)
                busy[worker.pipe] = worker
                worker.give(task, before, self._settings.timeout)
            if not busy:
                return
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                fields = worker.receive()
                del busy[worker.pipe]
                state: bytes | None = fields.pop("state")
                result = TaskResult(**fields)
                if state is not None:
                    self.states.stage(result.client, state)
                idle.append(worker)
                yield result

    def memory_mb(self) -> float:
        """The peak of each process, added up, in MiB."""
        return sum(worker.memory_mb for worker in self._workers)

    def _start(self) -> None:
        """Start as many workers as are missing."""
        new: list[Worker] = []
        while len(self._workers) < self._settings.workers:
            new.append(Worker(self._device()))
            self._workers.append(new[-1])
        for worker in new:
            factory = self._factory
            worker.send(builder=factory.builder, text=factory.text, threads=self._settings.threads)
        for worker in new:
            worker.receive()

    def _device(self) -> str | None:
        """The CUDA device that fewest workers have, of those that are named, or that this process sees; it is
        ``None`` where there is no choice.
        """
        count = torch.cuda.device_count()
        named = os.environ.get(DEVICES)
        devices = named.split(",")[:count] if named else [str(number) for number in range(count)]
        if self._settings.devices:
            devices = [devices[number] for number in check_devices(self._settings.devices)]
        elif count < 2:
            return None
        taken = Counter(worker.device for worker in self._workers)
        return min(devices, key=lambda device: taken[device])

    def _replace_busy(self) -> None:
        """Start others in the place of workers that still do a task of a run that was left early."""
        if self._busy:
            busy, self._busy = [*self._busy.values()], {}
            self._workers = [worker for worker in self._workers if worker not in busy]
            _end(busy)
            self._start()

    def _stop(self) -> None:
        workers, self._workers, self._busy = self._workers, [], {}
        _end(workers)


def check_devices(devices: Sequence[str]) -> list[int]:
    """The numbers of CUDA devices, ``"cuda:1"`` and so on.

    Raises:
        WorkerError: this process does not see one of them.
    """
    count = torch.cuda.device_count()
    numbers = [int(name.partition(":")[2]) for name in devices]
    missing = [name for name, number in zip(devices, numbers, strict=True) if number >= count]
    if missing:
        seen = ", ".join(f"cuda:{n}" for n in range(count)) or "none"
        raise WorkerError(
            f"[engine] devices = {list(devices)!r}: there is no {missing[0]!r}; CUDA devices of this "
            f"machine: {seen}. Leave [engine] devices out to use what it has"
        )
    return numbers


def _end(workers: Sequence[Worker]) -> None:
    """End processes. All are killed before any is waited for, which Ctrl-C may interrupt."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.stop()
