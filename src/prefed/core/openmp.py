"""OpenMP settings for processes that prefed starts, set before PyTorch is loaded."""

from __future__ import annotations

import os
from pathlib import Path


def openmp_settings() -> dict[str, str]:
    """Return environment variables that control how waiting OpenMP threads spin; none if one is already set.

    By default a waiting thread spins 300,000 times before it sleeps, which multiplies the CPU time next to
    other processes. Sleeping at once avoids that but is a quarter slower on an idle machine.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        return {}
    return {"GOMP_SPINCOUNT": "30000"} if cores_are_free() else {"OMP_WAIT_POLICY": "PASSIVE"}


def cores_are_free() -> bool:
    """Return whether other threads run on less than a quarter of the cores (Linux only)."""
    try:
        cores = len(os.sched_getaffinity(0))
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        return int(running) - 1 < cores / 4
    except (AttributeError, OSError, IndexError, ValueError):
        return False  # not Linux
