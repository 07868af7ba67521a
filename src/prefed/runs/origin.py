"""What a run's summary says of where the run comes from: its data, the command, the machine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from prefed.data import FederatedDataset
from prefed.data.statistics import dataset_statistics
from prefed.runs.data_notices import left_out_table

_DATA = (
    "category_distance",
    "random_category_distance",
    "token_distance",
    "random_token_distance",
    "shared_prompts",
    "contradictions",
)
"""Statistics of all clients together. None is about one client."""


def describe_data(dataset: FederatedDataset) -> dict[str, Any]:
    """What became of the rows, and how much clients differ, as numbers about all of them together.

    The latter are those of :class:`~prefed.data.statistics.DatasetStatistics` by their names there.
    """
    statistics = dataset_statistics(dataset)
    differ = {name: getattr(statistics, name) for name in _DATA}
    return {**left_out_table(dataset.row_counts), **differ}


def describe_origin() -> dict[str, Any]:
    """When this is called, by which command this process was started, and on what it runs."""
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "hardware": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
            "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def command(words: Sequence[str]) -> str:
    """The command of a process as a shell takes it.

    Of another program than prefed it is the name alone: its arguments may hold what is not for the summary.

    >>> command(["/venv/bin/prefed", "run", "my file.toml"]), command(["train.py", "--token", "x"])
    ("prefed run 'my file.toml'", 'train.py')
    """
    program = Path(words[0])
    ours = program.name == "prefed" or program.parts[-2:] == ("prefed", "__main__.py")
    return shlex.join(["prefed", *words[1:]]) if ours else program.name


def _processor() -> str:
    """The processor's name as the system tells it; else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
