"""Finished runs in cases: runs that differ only in their seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prefed.core.strict import flatten
from prefed.runs.record import RunError, RunRecord, read_run

_UNLIKE = ("seed", "engine.")
"""Settings in which runs may always differ."""


def find_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The finished runs among ``paths`` and in the folders below them, such as those of ``prefed sweep``.

    A run that is named by itself must be finished; in a folder, those that are not are left out.

    Raises:
        RunError: a named run is not finished, or there is none at all.
    """
    found: dict[Path, RunRecord] = {}
    for path in paths:
        inside = [path] if (path / "config.toml").exists() or not path.is_dir() else []
        if not inside:
            configs = sorted(path.rglob("config.toml"))
            inside = [file.parent for file in configs if (file.parent / "summary.json").exists()]
        found |= {each.resolve(): read_run(each) for each in inside if each.resolve() not in found}
    if not found:
        raise RunError(f"{', '.join(map(str, paths))}: no finished run lies there")
    return list(found.values())


@dataclass(frozen=True)
class Case:
    """Runs that differ only in their seed."""

    runs: tuple[RunRecord, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each run."""
        return tuple(run.seed for run in self.runs)

    def over_rounds(
        self, name: str, of: str = "mean"
    ) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
        """The rounds in which all runs have a number of the log, and ``[runs, rounds]`` its values.

        ``of`` is that of :meth:`~prefed.runs.record.RunRecord.curve`.
        """
        values_of = [dict(zip(*run.curve(name, of), strict=True)) for run in self.runs]
        rounds = sorted(set.intersection(*map(set, values_of)))
        return rounds, np.array([[values[r] for r in rounds] for values in values_of], dtype=np.float64)


def cases(runs: Sequence[RunRecord]) -> list[Case]:
    """The runs, those together that differ only in their seed, in the order of the first of each.

    Two runs of the same settings and the same seed are in two cases.
    """
    found: dict[tuple[str, int], list[RunRecord]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for run in runs:
        tables = {n: v for n, v in flatten(run.config).items() if not n.startswith(_UNLIKE)}
        settings = json.dumps(tables, sort_keys=True, default=str)
        found.setdefault((settings, seen[settings, run.seed]), []).append(run)
        seen[settings, run.seed] += 1
    return [Case(tuple(some)) for some in found.values()]
