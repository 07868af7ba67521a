"""The interface of backends, which run the tasks of a round."""

from __future__ import annotations

import importlib
import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from prefed.engines.job import Job
from prefed.engines.tasks import ClientStates, Task, TaskResult

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
