"""The checks before the first round of a run, which a dry run makes, too."""

from __future__ import annotations

import os
from pathlib import Path

from prefed.config import Experiment
from prefed.core import files
from prefed.engines import Job, check_engine
from prefed.models.pretrained import check_device
from prefed.runs.build import build_job, lockstep


def check_start(experiment: Experiment) -> None:
    """Check what a run needs besides data and model: packages, devices, trackers, the alignment's inputs.

    Raises:
        WorkerError, ModelError, AccountantError, TrackerError, AlignError, JudgeError: something is missing.
    """
    check_engine(experiment.engine.name, experiment.engine.devices or ())
    check_device(experiment.model)
    if experiment.privacy.noise:
        from prefed.privacy.accountant import require

        require()
    if experiment.track is not None:
        from prefed.trackers.tools import trackers

        trackers(experiment.track.to)
    if experiment.align is not None:
        from prefed.runs.align import check_alignment

        check_alignment(experiment.align, experiment.data)


def checked_job(experiment: Experiment, cache: Path) -> Job:
    """Build the job, and check the tables that depend on its data and model.

    Args:
        cache: as for :func:`~prefed.runs.build.build_job`.

    Raises:
        DataError, ModelError, ConfigError, AlignError, ValueError: the experiment cannot run.
    """
    job = build_job(experiment, cache)
    if experiment.align is not None:
        from prefed.runs.align import check_named_tastes

        check_named_tastes(experiment, job)
    if experiment.report is not None:
        from prefed.runs.answers import check_report

        check_report(experiment, job)
    lockstep(experiment, job)
    return job


def existing_parent(out: Path) -> Path:
    """Return the nearest existing folder in which the run directory would be created.

    Raises:
        WriteError: it cannot be written.
    """
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "not a folder" if not place.is_dir() else "not writable"
        raise files.WriteError(f"cannot write to {out}: {place} is {why}; choose another --out")
    return place
