"""How threads of PyTorch wait for each other: for processes that prefed starts, before PyTorch is loaded."""

from __future__ import annotations

import os
from pathlib import Path


def openmp_settings() -> dict[str, str]:
    """Environment variables that OpenMP reads when PyTorch is loaded; none where one of them is set.

    By default a thread that waits looks 300,000 times before it sleeps. Next to other work that costs several
    times the CPU time. To sleep at once is cheap there, and a quarter slower where nothing else runs.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        return {}
    return {"GOMP_SPINCOUNT": "30000"} if cores_are_free() else {"OMP_WAIT_POLICY": "PASSIVE"}


def cores_are_free() -> bool:
    """Whether, by Linux's count of running threads, others run on less than a quarter of the cores."""
    try:
        cores = len(os.sched_getaffinity(0))
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        return int(running) - 1 < cores / 4
    except (AttributeError, OSError, IndexError, ValueError):
        return False  # not Linux
