"""A pool of workers: it hands out tasks, and gives the task of a lost worker to another.

A worker is a process of this machine or of a cluster. It builds the job once. Clients' private states stay
in a store of this process: a task's state goes to the worker with the task, and the next state comes back
with the result. So a worker holds nothing that a run would miss.
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
from prefed.engines.backend import Backend, BackendSettings, JobFactory, peak_memory_mb
from prefed.engines.tasks import ClientStates, Task, TaskResult, run_task

_log = logging.getLogger("prefed")

ATTEMPTS = 3
"""Workers that a task may lose, and that may fail to start in a row for each worker of the pool."""
LOOK = 2.0
"""Seconds between two checks of deadlines, and of whatever the workers depend on."""


class WorkerError(RuntimeError):
    """Workers died, took too long or could not do a task. The run can be resumed.

    Args:
        trace: where in its code a worker failed; empty if it died, or if the message says all.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(f"{message}:\n{trace}" if trace else message)
        self.trace = trace


class LostError(Exception):
    """A worker is gone; the message says what became of it."""


@dataclass
class _Order:
    """A task, and how many workers it has lost."""

    task: Task
    lost: int = 0


class PoolWorker(ABC):
    """One worker, as this process sees it.

    Attributes:
        answer: what it owes; set by the request that it works on.
        order: the task that it works on; ``None`` while it builds its job, or if nobody waits for the result.
        deadline: when its answer is too late, on the monotonic clock.
        ready: whether it has built its job.
        memory_mb: its peak resident memory so far, in MiB.
    """

    answer: Future[dict[str, Any]]
    order: _Order | None = None
    deadline: float = inf
    ready: bool = False
    memory_mb: float = 0.0

    @abstractmethod
    def ask(self, task: Task, state: bytes | None) -> None:
        """Send a task with its client's private state; :attr:`answer` is its result."""

    @abstractmethod
    def kill(self) -> None:
        """End the process, whatever it does, without waiting for its end."""

    def stop(self) -> None:
        """End the process, and wait for its end where that is of use."""
        self.kill()

    def give(self, task: Task, state: bytes | None, timeout: float) -> None:
        """Send a task whose result is due within ``timeout`` seconds; 0 for any time."""
        self.deadline = time.monotonic() + timeout if timeout else inf
        self.ask(task, state)

    def fields(self, wait: float | None = 0.0) -> dict[str, Any]:
        """The answer, within ``wait`` seconds; ``None`` for any time.

        Raises:
            LostError: the worker is gone.
            TimeoutError: the answer is not there.
        """
        return self.answer.result(wait)

    def take(self, wait: float | None = 0.0) -> dict[str, Any]:
        """The answer, without what it says of the worker itself. Raises as :meth:`fields`, and:

        Raises:
            WorkerError: the worker raised an error.
        """
        fields = self.fields(wait)
        if "error" in fields:
            raise WorkerError(fields["error"], fields["trace"])
        self.memory_mb = fields.pop("memory_mb")
        return fields


W = TypeVar("W", bound=PoolWorker)


class Pool(Backend, Generic[W]):
    """Spreads tasks over workers.

    Args:
        factory: builds the job, once in each worker.

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
        """The results, as they come."""
        for worker in self._busy:
            worker.order = None  # of a run that was left early
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
        """The peak of each worker's process, added up, in MiB."""
        return sum(worker.memory_mb for worker in (*self._idle, *self._busy))

    @abstractmethod
    def _start(self) -> W:
        """A new worker, which builds its job."""

    def _check(self) -> None:
        """Called every :data:`LOOK` seconds while answers are awaited. What it raises ends the run."""

    def _welcome(self, worker: W, fields: dict[str, Any]) -> None:
        """Called with what a worker says of the job that it has built. What it raises ends the run."""

    def _hire(self) -> None:
        """Start a worker. It joins the others when it has built its job."""
        self._busy.append(self._start())

    def _give(self, worker: W, order: _Order) -> None:
        worker.order = order
        self._busy.append(worker)
        worker.give(order.task, self.states.read(order.task.client), self._settings.timeout)

    def _answered(self) -> list[W]:
        """The workers that have an answer, are gone or are late; waits for a while if there are none."""
        now = time.monotonic()
        due = min([now + LOOK, *(worker.deadline for worker in self._busy)])
        done = wait([worker.answer for worker in self._busy], max(0.0, due - now), FIRST_COMPLETED).done
        now = time.monotonic()
        if now > self._looked + LOOK:
            self._check()
            self._looked = time.monotonic()
        return [worker for worker in self._busy if worker.answer in done or worker.deadline <= now]

    def _take(self, worker: W) -> dict[str, Any] | None:
        """The answer of a worker, which is idle from here on; ``None`` if it is lost."""
        self._busy.remove(worker)
        try:
            fields = worker.take()
        except TimeoutError:
            limit = f"{self._settings.timeout:g} seconds"
            self._lose(worker, f"took longer than [engine] visit_timeout = {limit}")
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
        """Let go of a worker, and hire another.

        Raises:
            WorkerError: its task has lost too many, or there is none left and too many could not start.
        """
        worker.stop()
        if worker.order is not None:
            worker.order.lost += 1
            what = f"the visit of client {worker.order.task.client!r} {reason}"
            if worker.order.lost >= ATTEMPTS:
                raise WorkerError(
                    f"{what}; {ATTEMPTS} workers were lost to it. Whole rounds are kept: resume with fewer "
                    "[engine] workers if memory ran out, with a larger visit_timeout if it is too short"
                )
            _log.warning("%s; another worker does it", what)
        if not worker.ready:
            self._failures += 1
            if self._failures >= ATTEMPTS * self._wanted:
                if self._idle or self._busy:
                    return
                raise WorkerError(f"no worker could be started: its start {reason}")
        self._hire()


class TaskServer:
    """A worker's own side: it builds the job once and does tasks."""

    def build(self, factory: JobFactory, threads: int, folder: Path | None = None) -> dict[str, Any]:
        """Build the job; ``folder`` as :meth:`JobFactory.build` takes it. Gives the names of its exchanges
        and its ``fingerprint``.
        """
        torch.set_num_threads(threads)
        self.job = factory.build(folder)
        exchanges = [exchange.name for exchange in self.job.method.exchanges]
        return {"fingerprint": dict(self.job.trainers.fingerprint), "exchanges": exchanges}

    def do(self, state: bytes | None, **task: Any) -> dict[str, Any]:
        """Do a task. Gives the fields of its result, and ``state``, the client's next one."""
        states = StateOfTask(state)
        result = run_task(self.job, Task(**task), states)
        return {**vars(result), "state": states.next}


def answer_of(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``act`` gives, or the ``error`` that it raises and its ``trace``; with ``memory_mb`` so far."""
    try:
        return {**act(), "memory_mb": peak_memory_mb()}
    except Exception as error:
        if is_ours(error) and not os.environ.get("PREFED_TRACEBACK"):
            return {"error": f"a worker process failed: {error}", "trace": ""}
        return {"error": "a worker process failed", "trace": traceback.format_exc()}


class StateOfTask:
    """The private state that came with a task, and the one that goes back with its result."""

    def __init__(self, state: bytes | None) -> None:
        self._state = state
        self.next: bytes | None = None

    def read(self, client: str) -> bytes | None:
        """The state that came."""
        return self._state

    def stage(self, client: str, state: bytes) -> None:
        """Keep the next one."""
        self.next = state

    def accept(self, clients: Iterable[str]) -> None:
        """Nothing: the store that it came from does."""
