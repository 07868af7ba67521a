"""What gets the tasks of a round done."""

from __future__ import annotations

import importlib
import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prefed.engines.job import Job
from prefed.engines.tasks import ClientStates, Task, TaskResult


@dataclass(frozen=True)
class JobFactory:
    """How another process builds the same :class:`Job`.

    Attributes:
        builder: ``"module:function"``; the function is called with ``text``.
        text: its one argument, on a machine that has the files of this one.
        shipped: name → file or folder that the function needs on a machine that has not. There its second
            argument is a folder with a copy of each, by its name.
    """

    builder: str
    text: str
    shipped: Mapping[str, Path] = field(default_factory=dict)

    def build(self, folder: Path | None = None) -> Job:
        """The job; ``folder`` holds this machine's copies of what is shipped."""
        module, _, function = self.builder.partition(":")
        build = getattr(importlib.import_module(module), function)
        job: Job = build(self.text) if folder is None else build(self.text, folder)
        return job


@dataclass(frozen=True)
class BackendSettings:
    """How a backend of :data:`~prefed.engines.backends.BACKENDS` is set up.

    Attributes:
        workers: how many processes share the work, where a backend starts any.
        threads: of PyTorch, in each process.
        timeout: seconds that one task may take in a process; 0 for any time.
        address: of a cluster; ``None`` for one that is started here.
        gpus: of each process on a cluster.
        devices: CUDA devices that processes of this machine take in turn, ``"cuda:0"`` and so on; empty for
            all.
    """

    workers: int = 1
    threads: int = 1
    timeout: float = 0.0
    address: str | None = None
    gpus: float = 0.0
    devices: tuple[str, ...] = ()


class Backend(AbstractContextManager["Backend"], Protocol):
    """Gets tasks done, in any order and on any number of machines. No number may depend on these."""

    states: ClientStates | None
    """Clients' private states, if this process has them; ``None`` if they are elsewhere."""

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """The results, as they come. Tasks are taken from ``tasks`` only as fast as they are done."""

    def accept(self, clients: Iterable[str]) -> None:
        """Tell the clients' side whose uploads were merged, see :meth:`ClientStates.accept`."""
        if self.states is not None:
            self.states.accept(clients)

    def memory_mb(self) -> float:
        """The peak resident memory of each process that it started, added up, in MiB."""
        return 0.0

    def figures(self) -> Mapping[str, Any]:
        """What the backend adds to the record of a round that is about to be committed, as JSON has it."""
        return {}


def peak_memory_mb() -> float:
    """The peak resident memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    # On Linux getrusage would also count what the parent held when it started this process.
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if peak:
        return int(peak[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
