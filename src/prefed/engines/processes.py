"""Worker processes: each builds its own workplace once and does tasks as they come.

A worker is a fresh interpreter, joined by a pipe over which frames of bytes go: a JSON header, then the
message and the private state it announces. It never runs the caller's main module, imports nothing from the
working directory, and ends when its standard input closes, which it does when the parent is gone.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread, Timer
from types import TracebackType
from typing import Any

import torch

from prefed.engines.backend import peak_memory_mb
from prefed.engines.job import Job
from prefed.engines.tasks import Task, TaskResult, run_task

__all__ = ["JobFactory", "WorkerError", "WorkerProcesses"]

START = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides what it means
sys.path[:] = sys.argv[2:]
from prefed.engines.processes import serve
serve(int(sys.argv[1]))
"""


class WorkerError(RuntimeError):
    """A worker process died, took too long or could not do its task. The run can be resumed."""


@dataclass(frozen=True)
class JobFactory:
    """How another process builds the same :class:`~prefed.engines.Job`.

    Attributes:
        builder: ``"module:function"``; called with ``text``.
        text: its one argument.
    """

    builder: str
    text: str

    def build(self) -> Job:
        """The job."""
        module, _, function = self.builder.partition(":")
        job: Job = getattr(importlib.import_module(module), function)(self.text)
        return job


class WorkerProcesses:
    """Spreads tasks over processes.

    Args:
        recipe: of the job.
        count: how many processes.
        threads: of torch, in each.
        timeout: seconds that one task may take; 0 for any time.

    Raises:
        WorkerError: (also from :meth:`work`) a process died, raised, or took longer.
    """

    def __init__(self, recipe: JobFactory, count: int, threads: int = 1, timeout: float = 0.0) -> None:
        self._recipe = recipe
        self._count = count
        self._threads = threads
        self._timeout = timeout
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerProcesses:
        order = {"builder": self._recipe.builder, "text": self._recipe.text, "threads": self._threads}
        try:
            for _ in range(self._count):
                self._workers.append(_Worker())
            for worker in self._workers:
                worker.send(**order)
            for worker in self._workers:
                worker.receive()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def work(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """The answers, as they come."""
        source, busy = iter(tasks), dict[Connection, _Worker]()
        idle = list(self._workers)
        while True:
            while idle and (task := next(source, None)) is not None:
                worker = idle.pop()
                busy[worker.pipe] = worker
                worker.give(task, self._timeout)
            if not busy:
                return
            for pipe in wait(list(busy)):
                worker = busy.pop(pipe)  # type: ignore[call-overload]
                answer = worker.receive()
                idle.append(worker)
                yield TaskResult(**answer)

    def memory_mb(self) -> float:
        """What each process held at its peak, added up, in MiB."""
        return sum(worker.memory_mb for worker in self._workers)

    def _stop(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []


class _Worker:
    """One process, as its parent sees it."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        self.memory_mb = 0.0
        self._doing = "its start"
        self._late = ""
        self._alarm: Timer | None = None
        with theirs:
            # -P: nor may Python look into the working directory by itself, before the path is set.
            command = [sys.executable, "-P", "-c", START, str(theirs.fileno()), *_path()]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE)

    def give(self, task: Task, timeout: float) -> None:
        """Send a task; if its answer was not taken ``timeout`` seconds later, the process is ended."""
        self._doing = f"the visit of client {task.client!r}"
        if timeout:
            self._alarm = Timer(timeout, self._end, [timeout])
            self._alarm.daemon = True
            self._alarm.start()
        self.send(**vars(task))

    def send(self, **fields: Any) -> None:
        """A message to the process."""
        self._guarded(_send, **fields)

    def receive(self) -> dict[str, Any]:
        """Its next message."""
        fields: dict[str, Any] = self._guarded(_receive)
        self._disarm()
        if self._late:
            raise WorkerError(self._late)
        if "error" in fields:
            raise WorkerError(f"a worker process failed:\n{fields['error']}")
        self.memory_mb = fields.pop("memory_mb")
        return fields

    def _guarded(self, act: Callable[..., Any], **fields: Any) -> Any:
        try:
            return act(self.pipe, **fields)
        except (EOFError, OSError) as error:
            if self._late:
                raise WorkerError(self._late) from error
            code = self._process.wait()
            if code < 0:
                how = f"killed by {signal.Signals(-code).name}"
                advice = "out of memory is the usual reason: resume with fewer [engine] workers"
            else:
                how, advice = f"exit code {code}", "it may have written why; the run can be resumed"
            raise WorkerError(f"a worker process died ({how}) during {self._doing}; {advice}") from error

    def _end(self, timeout: float) -> None:
        self._late = (
            f"{self._doing} took longer than [engine] visit_timeout = {timeout:g} seconds, and its worker "
            "process was ended; whole rounds are kept: resume the run, with a larger visit_timeout or 0 if a "
            "visit may take so long"
        )
        self._process.kill()

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm.join()
            self._alarm = None

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._disarm()
        with self._process, self.pipe:
            self._process.kill()


def _path() -> list[str]:
    """Where a worker finds modules: as here, but for the working directory where no full path names it."""
    paths = [Path(path) for path in sys.path]
    return [str(path.absolute()) for path in paths if path.is_absolute() or path.absolute() != Path.cwd()]


def serve(handle: int) -> None:
    """The worker's side: build the job, then answer tasks until the parent ends us."""
    Thread(target=_end_with_the_parent, daemon=True).start()
    pipe = Connection(handle)
    try:
        order = _receive(pipe)
        torch.set_num_threads(order["threads"])
        job = JobFactory(order["builder"], order["text"]).build()
        _send(pipe, memory_mb=peak_memory_mb())
        while True:
            answer = run_task(job, Task(**_receive(pipe)))
            _send(pipe, **vars(answer), memory_mb=peak_memory_mb())
    except Exception:
        with suppress(OSError):  # the parent may be gone
            _send(pipe, error=traceback.format_exc())


def _end_with_the_parent() -> None:
    """Also in the middle of a visit. Nothing is ever written there: it reads as ended when the parent is."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _send(pipe: Connection, message: bytes = b"", state: bytes | None = None, **header: Any) -> None:
    pipe.send_bytes(json.dumps({**header, "state": state is not None}).encode())
    pipe.send_bytes(message)
    if state is not None:
        pipe.send_bytes(state)


def _receive(pipe: Connection) -> dict[str, Any]:
    header = json.loads(pipe.recv_bytes())
    message = pipe.recv_bytes()
    return {**header, "message": message, "state": pipe.recv_bytes() if header["state"] else None}
