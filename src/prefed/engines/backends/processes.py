"""Worker processes of this machine.

A worker is a fresh interpreter. It is joined by a pipe, over which frames of bytes go: a JSON header, a
message, and a private state if the header announces one. The standard library's pools would pickle tasks, run
the caller's main module again and lose all workers with one. A worker imports nothing from the working
directory. It ends when its standard input closes, as it does when the parent ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from prefed.core.openmp import openmp_settings
from prefed.engines.backend import JobFactory
from prefed.engines.backends.worker_pool import (
    LostError,
    Pool,
    PoolWorker,
    TaskServer,
    WorkerError,
    answer_of,
)
from prefed.engines.tasks import Task

START = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides what it means
sys.path[:] = sys.argv[2:]
from prefed.engines.backends.processes import serve
serve(int(sys.argv[1]))
"""
DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that says which CUDA devices a process sees."""
GRACE = 5.0
"""Seconds for a pipe to end with its process; a process that a worker started may hold its other end."""


class Worker(PoolWorker):
    """One worker process.

    Args:
        device: the one CUDA device that it sees, as ``CUDA_VISIBLE_DEVICES`` names it; ``None`` for all that
            its parent sees.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self._pipe, theirs = Pipe()
        self._thread: Thread | None = None
        with theirs:
            # -P: Python itself must not look into the working directory either, before the path is set.
            command = [sys.executable, "-P", "-c", START, str(theirs.fileno()), *_import_path()]
            environment = os.environ | openmp_settings() | ({} if device is None else {DEVICES: device})
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, env=environment
            )

    def build(self, factory: JobFactory, threads: int) -> None:
        """Have it build its job; the answer has the job's ``fingerprint`` and names of ``exchanges``."""
        self._send(builder=factory.builder, text=factory.text, threads=threads)

    def ask(self, task: Task, state: bytes | None) -> None:
        """Send a task."""
        self._send(**vars(task), state=state)

    def receive(self) -> dict[str, Any]:
        """The answer, by its deadline; for who has no pool.

        Raises:
            WorkerError: the process died, failed, or took too long.
        """
        try:
            return self.take(None if self.deadline == inf else max(0.0, self.deadline - time.monotonic()))
        except TimeoutError:
            self.kill()
            raise WorkerError(
                "a worker process took longer than it may (at a site [limits] visit_seconds), and was ended"
            ) from None
        except LostError as error:
            raise WorkerError(f"a worker process died ({error})") from error

    def kill(self) -> None:
        """End the process, whatever it does, without waiting for its end."""
        self._process.kill()

    def stop(self) -> None:
        """End the process, and wait for its end."""
        with self._process:
            self._process.kill()
        if self._thread is not None:
            self._thread.join(GRACE)
        self._pipe.close()

    def _send(self, **fields: Any) -> None:
        """Send a message; a thread awaits the answer, which a stopped process may leave unfinished."""
        self.answer = answer = Future[dict[str, Any]]()

        def exchange() -> None:
            try:
                _send(self._pipe, **fields)
                answer.set_result(_receive(self._pipe))
            except (EOFError, OSError):
                code = self._process.wait()
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                answer.set_exception(LostError(how))
            except Exception as error:  # nobody may wait for ever
                answer.set_exception(error)

        self._thread = Thread(target=exchange, daemon=True)
        self._thread.start()


class WorkerProcesses(Pool[Worker]):
    """Spreads tasks over processes. Each has one CUDA device, of those that the settings name, or where there
    are several.

    Raises:
        WorkerError: (on entering) a process cannot build the job; (from :meth:`run`) as :class:`Pool`.
    """

    def __enter__(self) -> WorkerProcesses:
        try:
            for _ in range(self._wanted):
                self._hire()
            while self._busy:
                for worker in self._answered():
                    self._take(worker)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        workers, self._idle, self._busy = [*self._idle, *self._busy], [], []
        # All are killed before any is waited for, which Ctrl-C may interrupt.
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.stop()

    def _start(self) -> Worker:
        worker = Worker(self._device())
        worker.build(self._factory, self._settings.threads)
        return worker

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
        taken = Counter(worker.device for worker in (*self._idle, *self._busy))
        return min(devices, key=lambda device: taken[device])


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


def serve(handle: int) -> None:
    """The process's own side: build the job, then do tasks until the parent ends it, or one fails."""
    Thread(target=_end_with_the_parent, daemon=True).start()
    pipe, server = Connection(handle), TaskServer()
    with suppress(EOFError, OSError):  # the parent may be gone
        order = _receive(pipe)
        factory = JobFactory(order["builder"], order["text"])
        answer = answer_of(partial(server.build, factory, order["threads"]))
        _send(pipe, **answer)
        while "error" not in answer:
            fields = _receive(pipe)
            answer = answer_of(partial(server.do, **fields))
            _send(pipe, **answer)


def _import_path() -> list[str]:
    """Where a worker finds modules: as here, but for the working directory where no full path names it."""
    paths = [Path(path) for path in sys.path]
    return [str(path.absolute()) for path in paths if path.is_absolute() or path.absolute() != Path.cwd()]


def _end_with_the_parent() -> None:
    """End this process when the parent is gone, also in the middle of a task.

    Nothing is ever written to the standard input: reading it returns when the parent is gone.
    """
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
