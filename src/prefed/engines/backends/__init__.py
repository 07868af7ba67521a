"""Backends, which run the tasks of a round: their interface, the backend in this process, and all by name."""

from __future__ import annotations

import importlib
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from prefed.engines.job import Job
from prefed.engines.tasks import ClientStates, Task, TaskResult, run_task

if TYPE_CHECKING:
    from prefed.train.lockstep import Lockstep


class WorkerError(RuntimeError):
    """Workers died, exceeded a time limit or failed in a task. The run can be resumed.

    Args:
        trace: traceback of the worker; empty if it died or if the message suffices.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(f"{message}:\n{trace}" if trace else message)
        self.trace = trace


@dataclass(frozen=True)
class JobFactory:
    """Builds the same :class:`Job` in another process.

    Attributes:
        builder: ``"module:function"``.
        text: the first argument of the function, and on machines with this machine's files the only one.
        shipped: name → file or folder that other machines need. There the second argument is a folder with a
            copy of each under its name.
    """

    builder: str
    text: str
    shipped: Mapping[str, Path] = field(default_factory=dict)

    def build(self, folder: Path | None = None) -> Job:
        """Build the job; ``folder`` contains copies of the shipped files."""
        module, _, function = self.builder.partition(":")
        build = getattr(importlib.import_module(module), function)
        job: Job = build(self.text) if folder is None else build(self.text, folder)
        return job


@dataclass(frozen=True)
class BackendSettings:
    """Settings of a backend.

    Attributes:
        threads: number of PyTorch threads per process.
        timeout: seconds that a task may take in a worker; 0: no limit.
        address: address of a cluster; ``None``: start one on this machine.
        gpus: number of GPUs per process.
        devices: CUDA devices that the processes of this machine share, e.g. ``"cuda:0"``; empty: all.
        lockstep: runs visits of several clients at a time in this process; ``None``: one after the other.
    """

    workers: int = 1
    threads: int = 1
    timeout: float = 0.0
    address: str | None = None
    gpus: float = 0.0
    devices: tuple[str, ...] = ()
    lockstep: Lockstep | None = None


class Backend(AbstractContextManager["Backend"], Protocol):
    """Runs tasks, in any order and on any number of machines. Results must not depend on either."""

    states: ClientStates | None
    """Clients' private states; ``None`` if this process does not have them."""

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """Yield results as they arrive. ``tasks`` is consumed only as fast as tasks are completed."""

    def accept(self, clients: Iterable[str]) -> None:
        """Accept the staged states of clients whose uploads were merged; see :meth:`ClientStates.accept`."""
        if self.states is not None:
            self.states.accept(clients)

    def memory_mb(self) -> float:
        """The sum of the peak resident memory of all worker processes, in MiB."""
        return 0.0

    def figures(self) -> Mapping[str, Any]:
        """Fields for the record of the current round, as JSON values."""
        return {}


def peak_memory_mb() -> float:
    """The peak resident memory of this process, in MiB."""
    status = Path("/proc/self/status")
    # On Linux getrusage also includes the memory of the parent at the start of this process.
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if peak:
        return int(peak[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def check_devices(devices: Sequence[str]) -> list[int]:
    """The numbers of CUDA devices such as ``"cuda:1"``.

    Raises:
        WorkerError: a device does not exist.
    """
    count = torch.cuda.device_count()
    numbers = [int(name.partition(":")[2]) for name in devices]
    missing = [name for name, number in zip(devices, numbers, strict=True) if number >= count]
    if missing:
        seen = ", ".join(f"cuda:{n}" for n in range(count)) or "none"
        raise WorkerError(
            f"[engine] devices = {list(devices)!r}: {missing[0]!r} does not exist; CUDA devices of this "
            f"machine: {seen}. Remove [engine] devices to use all of them"
        )
    return numbers


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


Factory = Callable[[], JobFactory]


def _ray(job: Job, factory: Factory, states: ClientStates, settings: BackendSettings) -> Backend:
    from prefed.engines.backends.ray import RayActors

    return RayActors(job, factory(), states, settings)


def _processes(job: Job, factory: Factory, states: ClientStates, settings: BackendSettings) -> Backend:
    from prefed.engines.backends.processes import WorkerProcesses

    return WorkerProcesses(factory(), states, settings)


BACKENDS: Mapping[str, Callable[[Job, Factory, ClientStates, BackendSettings], Backend]] = {
    "in_process": lambda job, _, states, how: InProcess(job, states, how.threads, how.lockstep),
    "processes": _processes,
    "ray": _ray,
}
"""Name → constructor of a backend. ``tests/laws/test_engine_laws.py`` tests all of them."""


def check_engine(name: str, devices: Sequence[str]) -> None:
    """Check that the package and the devices of an engine are on this machine.

    Raises:
        WorkerError: they are not.
    """
    if name == "ray" and find_spec("ray") is None:
        raise WorkerError(
            "[engine] name = 'ray' needs the package ray: install it with pip install 'prefed[ray]'"
        )
    check_devices(devices)
