"""A pool of workers that distributes tasks and reassigns the task of a lost worker.

A worker is a process on this machine or a cluster, which builds the job once. Clients' private states stay in
a store of this process: a task is sent with the client's state, and the result returns the next state. No
data is lost with a worker.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from prefed.core.text import is_ours
from prefed.engines.backends import Backend, BackendSettings, JobFactory, WorkerError, peak_memory_mb
from prefed.engines.tasks import ClientStates, MemoryStates, Task, TaskResult, run_task
from prefed.engines.validation import summed_metrics

_log = logging.getLogger("prefed")

ATTEMPTS = 3
"""Attempts per task, and consecutive failed starts per worker of the pool, before the run ends."""
LOOK = 2.0
"""Seconds between two checks of deadlines and of the cluster."""


class LostError(Exception):
    """A worker died. The message says how."""


@dataclass
class _Order:
    """A task and the number of workers lost during it."""

    task: Task
    lost: int = 0


class PoolWorker(ABC):
    """The handle of a worker.

    Attributes:
        answer: future answer to the current request.
        order: the current task; ``None`` while the worker builds its job, or if the result is not needed.
        deadline: deadline of the answer, on the monotonic clock.
        ready: whether the worker has built its job.
        memory_mb: peak resident memory, in MiB.
    """

    answer: Future[dict[str, Any]]
    order: _Order | None = None
    deadline: float = inf
    ready: bool = False
    memory_mb: float = 0.0

    @abstractmethod
    def ask(self, task: Task, state: bytes | None) -> None:
        """Send a task with its client's private state, and set :attr:`answer`."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process without waiting for its end."""

    def stop(self) -> None:
        """Kill the process, and wait for its end if necessary."""
        self.kill()

    def give(self, task: Task, state: bytes | None, timeout: float) -> None:
        """Send a task with a time limit in seconds; 0: no limit."""
        self.deadline = time.monotonic() + timeout if timeout else inf
        self.ask(task, state)

    def fields(self, wait: float | None = 0.0) -> dict[str, Any]:
        """Wait up to ``wait`` seconds (``None``: no limit) for the answer, and return it.

        Raises:
            LostError: the worker died.
            TimeoutError: there is no answer in time.
        """
        return self.answer.result(wait)

    def take(self, wait: float | None = 0.0) -> dict[str, Any]:
        """Like :meth:`fields`, without ``memory_mb``, which is stored in this object.

        Raises:
            LostError, TimeoutError: as :meth:`fields`.
            WorkerError: the worker raised an error.
        """
        fields = self.fields(wait)
        if "error" in fields:
            raise WorkerError(fields["error"], fields["trace"])
        self.memory_mb = fields.pop("memory_mb")
        return fields


W = TypeVar("W", bound=PoolWorker)


class Pool(Backend, Generic[W]):
    """Distributes tasks over workers.

    Args:
        factory: builds the job in each worker.

    Raises:
        WorkerError: (from :meth:`run`) a task raised an error or lost :data:`ATTEMPTS` workers, or no worker
            is left and none can be started.
    """

    states: ClientStates

    def __init__(self, factory: JobFactory, states: ClientStates, settings: BackendSettings) -> None:
        self.states = states
        self._factory, self._settings = factory, settings
        self._wanted = settings.workers
        self._failures, self._looked = 0, 0.0
        self._idle: list[W] = []
        self._busy: list[W] = []

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """Yield results as they arrive."""
        for worker in self._busy:
            worker.order = None  # left over from a call that was not exhausted
        source, lost = map(_Order, tasks), list[_Order]()
        while True:
            while self._idle and (order := lost.pop() if lost else next(source, None)) is not None:
                self._give(self._idle.pop(), order)
            if self._idle and not any(worker.order for worker in self._busy):
                return
            for worker in self._answered():
                order = worker.order
                fields = self._take(worker)
                if fields is None:
                    lost += [] if order is None else [order]
                elif order is not None:
                    state: bytes | None = fields.pop("state")
                    result = TaskResult(**fields)
                    if state is not None:
                        self.states.stage(result.client, state)
                    yield result

    def memory_mb(self) -> float:
        """The sum of the peak resident memory of all workers, in MiB."""
        return sum(worker.memory_mb for worker in (*self._idle, *self._busy))

    @abstractmethod
    def _start(self) -> W:
        """Start a worker that builds its job."""

    def _check(self) -> None:
        """Hook that runs every :data:`LOOK` seconds while waiting. An exception ends the run."""

    def _welcome(self, worker: W, fields: dict[str, Any]) -> None:
        """Hook that receives a worker's answer to its build request. An exception ends the run."""

    def _hire(self) -> None:
        self._busy.append(self._start())

    def _give(self, worker: W, order: _Order) -> None:
        worker.order = order
        self._busy.append(worker)
        worker.give(order.task, self.states.read(order.task.client), self._settings.timeout)

    def _answered(self) -> list[W]:
        """Wait a while for answers; return the workers that answered, died or exceeded their deadline."""
        now = time.monotonic()
        due = min([now + LOOK, *(worker.deadline for worker in self._busy)])
        done = wait([worker.answer for worker in self._busy], max(0.0, due - now), FIRST_COMPLETED).done
        now = time.monotonic()
        if now > self._looked + LOOK:
            self._check()
            self._looked = time.monotonic()
        return [worker for worker in self._busy if worker.answer in done or worker.deadline <= now]

    def _take(self, worker: W) -> dict[str, Any] | None:
        """Take the answer of a worker and mark it idle; ``None`` if the worker is lost."""
        self._busy.remove(worker)
        try:
            fields = worker.take()
        except TimeoutError:
            limit = f"{self._settings.timeout:g} seconds"
            self._lose(worker, f"exceeded [engine] visit_timeout = {limit}")
            return None
        except LostError as error:
            self._lose(worker, f"lost its worker: {error}")
            return None
        except WorkerError:
            worker.stop()
            raise
        if not worker.ready:
            self._welcome(worker, fields)
            worker.ready, self._failures = True, 0
        worker.order, worker.deadline = None, inf
        self._idle.append(worker)
        return fields

    def _lose(self, worker: W, reason: str) -> None:
        """Replace a lost worker.

        Raises:
            WorkerError: its task has lost too many workers, or no worker is left and too many did not start.
        """
        worker.stop()
        if worker.order is not None:
            worker.order.lost += 1
            what = f"the visit of client {worker.order.task.client!r} {reason}"
            if worker.order.lost >= ATTEMPTS:
                raise WorkerError(
                    f"{what}; giving up after {ATTEMPTS} attempts. Complete rounds are kept: resume with "
                    "fewer [engine] workers if memory ran out, or with a larger visit_timeout"
                )
            _log.warning("%s; retrying in another worker", what)
        if not worker.ready:
            self._failures += 1
            if self._failures >= ATTEMPTS * self._wanted:
                if self._idle or self._busy:
                    return
                raise WorkerError(f"cannot start a worker: its start {reason}")
        self._hire()


class TaskServer:
    """Runs in a worker: builds the job once and runs tasks."""

    def build(self, factory: JobFactory, threads: int, folder: Path | None = None) -> dict[str, Any]:
        """Build the job; return its ``fingerprint``, and the names of its ``exchanges`` and ``metrics``
        for sums.

        Args:
            folder: as for :meth:`JobFactory.build`.
        """
        torch.set_num_threads(threads)
        self.job = factory.build(folder)
        exchanges = [exchange.name for exchange in self.job.method.exchanges]
        summed = self.job.privacy.kind == "distributed"
        metrics = list(summed_metrics(self.job).names) if summed else []
        fingerprint = dict(self.job.trainers.fingerprint)
        return {"fingerprint": fingerprint, "exchanges": exchanges, "metrics": metrics}

    def do(self, state: bytes | None, **task: Any) -> dict[str, Any]:
        """Run a task; return the fields of its result, and ``state``: the client's next state or ``None``."""
        states = MemoryStates({task["client"]: state} if state is not None else {})
        result = run_task(self.job, Task(**task), states)
        return {**vars(result), "state": states.staged.get(task["client"])}


def answer_of(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of ``act``, or its ``error`` and ``trace`` if it raises; plus ``memory_mb``."""
    try:
        return {**act(), "memory_mb": peak_memory_mb()}
    except Exception as error:
        if is_ours(error) and not os.environ.get("PREFED_TRACEBACK"):
            return {"error": f"a worker process failed: {error}", "trace": ""}
        return {"error": "a worker process failed", "trace": traceback.format_exc()}
