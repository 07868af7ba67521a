"""A worker process: it builds the job once and does the tasks that it is given.

A worker is a fresh interpreter. It is joined by a pipe, over which frames of bytes go: a JSON header, a
message, and a private state if the header announces one. It never runs the caller's main module, and imports
nothing from the working directory. It ends when its standard input closes, as it does when the parent ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import torch

from prefed.core.text import is_ours
from prefed.engines.backend import peak_memory_mb
from prefed.engines.job_factory import JobFactory
from prefed.engines.tasks import Task, run_task

START = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides what it means
sys.path[:] = sys.argv[2:]
from prefed.engines.backends.worker import serve
serve(int(sys.argv[1]))
"""


DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that says which CUDA devices a process sees."""


class WorkerError(RuntimeError):
    """A worker process died, took too long or could not do its task. The run can be resumed.

    Args:
        trace: where in its code the process failed; empty if it died, or if the error says all.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(f"{message}:\n{trace}" if trace else message)
        self.trace = trace


class Worker:
    """One worker process, as its parent sees it.

    Args:
        device: the one CUDA device that it sees, as ``CUDA_VISIBLE_DEVICES`` names it; ``None`` for all that
            its parent sees.

    Attributes:
        pipe: readable when the process has an answer or is gone.
        memory_mb: its peak resident memory so far, in MiB.

    Raises:
        WorkerError: (from every method but :meth:`kill` and :meth:`stop`) the process died, failed, or took
            too long.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self.pipe, theirs = Pipe()
        self.memory_mb = 0.0
        self._doing = "its start"
        self._late = ""
        self._alarm: Timer | None = None
        with theirs:
            # -P: Python itself must not look into the working directory either, before the path is set.
            command = [sys.executable, "-P", "-c", START, str(theirs.fileno()), *_import_path()]
            environment = os.environ | ({} if device is None else {DEVICES: device})
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, env=environment
            )

    def give(self, task: Task, state: bytes | None, timeout: float) -> None:
        """Send a task with its client's private state.

        The process is ended if the result is not taken within ``timeout`` seconds; 0 for any time.
        """
        self._doing = f"the visit of client {task.client!r}"
        if timeout:
            self._alarm = Timer(timeout, self._end, [timeout])
            self._alarm.daemon = True
            self._alarm.start()
        self.send(**vars(task), state=state)

    def send(self, **fields: Any) -> None:
        """A message to the process."""
        self._attempt(_send, **fields)

    def receive(self) -> dict[str, Any]:
        """Its next message."""
        fields: dict[str, Any] = self._attempt(_receive)
        self._disarm()
        if self._late:
            raise WorkerError(self._late)
        if "error" in fields:
            raise WorkerError(fields["error"], fields["trace"])
        self.memory_mb = fields.pop("memory_mb")
        return fields

    def _attempt(self, act: Callable[..., Any], **fields: Any) -> Any:
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

    def kill(self) -> None:
        """End the process, whatever it does, and do not wait for its end."""
        self._process.kill()

    def stop(self) -> None:
        """End the process, and wait for its end."""
        self._disarm()
        with self._process, self.pipe:
            self._process.kill()


def _import_path() -> list[str]:
    """Where a worker finds modules: as here, but for the working directory where no full path names it."""
    paths = [Path(path) for path in sys.path]
    return [str(path.absolute()) for path in paths if path.is_absolute() or path.absolute() != Path.cwd()]


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


def serve(handle: int) -> None:
    """The process's own side: build the job, then do tasks until the parent ends it."""
    Thread(target=_end_with_the_parent, daemon=True).start()
    pipe = Connection(handle)
    try:
        order = _receive(pipe)
        torch.set_num_threads(order["threads"])
        job = JobFactory(order["builder"], order["text"]).build()
        exchanges = [exchange.name for exchange in job.method.exchanges]
        fingerprint = dict(job.trainers.fingerprint)
        _send(pipe, fingerprint=fingerprint, exchanges=exchanges, memory_mb=peak_memory_mb())
        while True:
            fields = _receive(pipe)
            states = StateOfTask(fields.pop("state"))
            result = run_task(job, Task(**fields), states)
            _send(pipe, state=states.next, **vars(result), memory_mb=peak_memory_mb())
    except Exception as error:
        what, trace = "a worker process failed", traceback.format_exc()
        if is_ours(error) and not os.environ.get("PREFED_TRACEBACK"):
            what, trace = f"{what}: {error}", ""
        with suppress(OSError):  # the parent may be gone
            _send(pipe, error=what, trace=trace)


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
