"""Worker processes on this machine.

A worker is a new interpreter, connected by a pipe. Each request and answer consists of a JSON header, a
message and an optional private state. The pools of the standard library would pickle tasks, run the caller's
main module again, and lose all workers if one dies. A worker imports nothing from the working directory, and
ends when the parent ends, because that closes its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
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
from prefed.engines.backends import JobFactory, WorkerError, check_devices
from prefed.engines.backends.worker_pool import (
    LostError,
    Pool,
    PoolWorker,
    TaskServer,
    answer_of,
)
from prefed.engines.tasks import Task

START = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; only the parent handles it
sys.path[:] = sys.argv[2:]
from prefed.engines.backends.processes import serve
serve(int(sys.argv[1]))
"""
DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the CUDA devices that a process sees."""
GRACE = 5.0
"""Seconds to wait for the pipe of a killed worker to close; a child of the worker may keep it open."""


class Worker(PoolWorker):
    """A worker process.

    Args:
        device: the only CUDA device that it sees, in the format of ``CUDA_VISIBLE_DEVICES``; ``None``: all
            devices of the parent.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self._pipe, theirs = Pipe()
        self._thread: Thread | None = None
        with theirs:
            # -P: Python must not import from the working directory before sys.path is set either.
            command = [sys.executable, "-P", "-c", START, str(theirs.fileno()), *_import_path()]
            environment = os.environ | openmp_settings() | ({} if device is None else {DEVICES: device})
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, env=environment
            )

    def build(self, factory: JobFactory, threads: int) -> None:
        """Make the worker build its job. The answer is that of :meth:`TaskServer.build`."""
        self._send(builder=factory.builder, text=factory.text, threads=threads)

    def ask(self, task: Task, state: bytes | None) -> None:
        """Send a task."""
        self._send(**vars(task), state=state)

    def receive(self) -> dict[str, Any]:
        """Wait for the answer until its deadline, without a pool.

        Raises:
            WorkerError: the process died, failed or exceeded its time limit.
        """
        try:
            return self.take(None if self.deadline == inf else max(0.0, self.deadline - time.monotonic()))
        except TimeoutError:
            self.kill()
            raise WorkerError(
                "a worker process exceeded its time limit ([limits] visit_seconds of a site) and was killed"
            ) from None
        except LostError as error:
            raise WorkerError(f"a worker process died ({error})") from error

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self._process.kill()

    def stop(self) -> None:
        """Kill the process and wait for its end."""
        with self._process:
            self._process.kill()
        if self._thread is not None:
            self._thread.join(GRACE)
        self._pipe.close()

    def _send(self, **fields: Any) -> None:
        """Send a message. A thread waits for the answer, since a stopped process may send only part of it."""
        self.answer = answer = Future[dict[str, Any]]()

        def exchange() -> None:
            try:
                _send(self._pipe, **fields)
                answer.set_result(_receive(self._pipe))
            except (EOFError, OSError):
                code = self._process.wait()
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                answer.set_exception(LostError(how))
            except Exception as error:  # otherwise the caller would wait forever
                answer.set_exception(error)

        self._thread = Thread(target=exchange, daemon=True)
        self._thread.start()


class WorkerProcesses(Pool[Worker]):
    """Distributes tasks over worker processes on this machine.

    If the settings name CUDA devices or there are several, each worker gets one or more of them.

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
        # Kill all before waiting for any: Ctrl-C may interrupt the wait.
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.stop()

    def _start(self) -> Worker:
        worker = Worker(self._device())
        worker.build(self._factory, self._settings.threads)
        return worker

    def _device(self) -> str | None:
        """The allowed CUDA device or devices with the fewest workers; ``None`` if workers need no choice."""
        count = torch.cuda.device_count()
        named = os.environ.get(DEVICES)
        devices = named.split(",")[:count] if named else [str(number) for number in range(count)]
        if self._settings.devices:
            devices = [devices[number] for number in check_devices(self._settings.devices)]
        elif count < 2:
            return None
        size = min(max(1, int(self._settings.gpus)), len(devices))
        groups = [",".join(devices[n : n + size]) for n in range(0, len(devices) - size + 1, size)]
        taken = Counter(worker.device for worker in (*self._idle, *self._busy))
        return min(groups, key=lambda group: taken[group])


def serve(handle: int) -> None:
    """Main function of a worker process: build the job, then run tasks until the parent ends or one fails."""
    Thread(target=_end_with_the_parent, daemon=True).start()
    pipe, server = Connection(handle), TaskServer()
    with suppress(EOFError, OSError):  # the parent may have ended
        order = _receive(pipe)
        factory = JobFactory(order["builder"], order["text"])
        answer = answer_of(partial(server.build, factory, order["threads"]))
        _send(pipe, **answer)
        while "error" not in answer:
            fields = _receive(pipe)
            answer = answer_of(partial(server.do, **fields))
            _send(pipe, **answer)


def _import_path() -> list[str]:
    """``sys.path`` for a worker: without relative entries for the working directory."""
    paths = [Path(path) for path in sys.path]
    return [str(path.absolute()) for path in paths if path.is_absolute() or path.absolute() != Path.cwd()]


def _end_with_the_parent() -> None:
    """End this process when the parent ends, even during a task.

    Reading standard input returns then, since the parent never writes to it.
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
