"""All stages of an alignment in their order, and its summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefed.align import completions, generations, labels, prompts, start, training
from prefed.align.alignment import Alignment
from prefed.align.stages import Stage, check_settings, forget, left_anything, run_stages
from prefed.config.align import AlignConfig
from prefed.core import files

SETTINGS, SUMMARY = "settings.json", "summary.json"
STAGES = (prompts.STAGE, start.STAGE, completions.STAGE, labels.STAGE, training.STAGE)
"""The stages in their order."""


def stages_of(config: AlignConfig) -> tuple[Stage, ...]:
    """The stages in their order; a policy that takes a taste has :mod:`prefed.align.generations`."""
    if config.tastes is None:
        return STAGES
    return (prompts.STAGE, start.STAGE, *generations.stages_of(generations.count_of(config)))


def align(alignment: Alignment, again: str | None = None) -> dict[str, Any]:
    """Do every stage that is not done yet, and write ``summary.json``.

    A process that is killed anywhere can be followed by another one, which ends with the same numbers.

    Args:
        again: the stage to do again, with all stages after it.

    Returns:
        What ``summary.json`` holds: the figures of each stage, and their ``seconds`` together. The seconds
        and rates of a stage are those of the process that finished it.

    Raises:
        AlignError: a stage was done with other settings or inputs, there is no such stage, or nothing is left
            to label or to train on.
        DataError, ModelError: prompts, rows, selectors or model cannot be used.
        OSError: a file cannot be written. Stages that are done stay.
    """
    stages = stages_of(alignment.config)
    check_settings(alignment, stages, again)
    (alignment.folder / "stages").mkdir(parents=True, exist_ok=True)
    settings = alignment.config.model_dump(mode="json", exclude_none=True)
    files.write(alignment.folder / SETTINGS, _pretty(settings))
    if again is not None:
        files.remove(alignment.folder / SUMMARY)
        _forget_others(alignment.folder, stages)
    figures = run_stages(alignment, stages, again)
    seconds = sum(float(stage["seconds"]) for stage in figures.values())
    summary = {**(figures if stages is STAGES else generations.summarize(figures)), "seconds": seconds}
    files.write(alignment.folder / SUMMARY, _pretty(summary))
    return summary


def _forget_others(folder: Path, stages: tuple[Stage, ...]) -> None:
    """Delete what stages of another kind than ``stages`` left, or more generations."""
    numbers = [int(path.name) for path in (folder / "generations").glob("*") if path.name.isdecimal()]
    names = {stage.name for stage in stages}
    wanted = {path for stage in stages for path in (*stage.outputs, *stage.parts)}
    for stage in (*STAGES, *generations.stages_of(max(numbers, default=0))):
        left = tuple(path for path in (*stage.outputs, *stage.parts) if path not in wanted)
        if left or stage.name not in names:
            forget(folder, replace(stage, outputs=left, parts=()))


def begun(folder: Path) -> bool:
    """Whether a folder holds an alignment, be it unfinished."""
    return left_anything(folder, STAGES)


def _pretty(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"
