"""Who does the tasks of a round."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from prefed.engines.job import Job
from prefed.engines.tasks import Task, TaskResult, run_task

__all__ = ["Backend", "InProcess", "peak_memory_mb"]


class Backend(Protocol):
    """Does tasks, in any order and on any number of processes: no number may depend on it."""

    def work(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """The answers, as they come. ``tasks`` is drawn from only as fast as they are done."""

    def memory_mb(self) -> float:
        """The largest resident memory of each process that it started, added up, in MiB."""

    def __enter__(self) -> Backend: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class InProcess:
    """One task after the other, here.

    Args:
        job: what is run.
        threads: of torch, while it works; put back afterwards.
    """

    def __init__(self, job: Job, threads: int = 1) -> None:
        self._job = job
        self._threads = threads
        self._before = torch.get_num_threads()

    def __enter__(self) -> InProcess:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self._before)

    def work(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """The answers, in the order of the tasks."""
        for task in tasks:
            yield run_task(self._job, task)

    def memory_mb(self) -> float:
        """Nothing: no process is started."""
        return 0.0


def peak_memory_mb() -> float:
    """The largest resident memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    # Linux: getrusage would also count what the process that started this one held when it did.
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if peak:
        return int(peak[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
