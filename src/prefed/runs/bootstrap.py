"""What ``run``, ``federate`` and ``peer`` share: opening a run directory, and committing round 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

from prefed.config import Experiment
from prefed.core import Callback, Callbacks, files
from prefed.core.wire import encode
from prefed.data import DataMismatchError
from prefed.engines import Job
from prefed.runs.log import run_log
from prefed.runs.resume import reset_run, settings_digest, update_config
from prefed.store import RunWriter

T = TypeVar("T")


@contextmanager
def open_run(
    experiment: Experiment,
    path: Path,
    callbacks: Sequence[Callback],
    *,
    resume: bool,
    returnable: bool = False,
    page: Callable[[Path], str] | None = None,
) -> Iterator[tuple[RunWriter, Callback]]:
    """Open a run directory to write to, with its log and the tools of ``[track]``.

    A directory whose start fails is removed. One whose start was killed or interrupted stays, to be resumed.

    Args:
        callbacks: receive the events of the run, before the log and the tools.
        resume, returnable: as :class:`~prefed.store.RunWriter` takes them.
        page: makes the page about the run in a directory, for the tools.

    Yields:
        The writer, and the callback that receives the events of the run.

    Raises:
        TypeError: ``callbacks`` is no list of :class:`~prefed.core.Callback` instances.
        TrackerError: a tool of ``[track]`` cannot be used on this machine.
        StoreError: as :class:`~prefed.store.RunWriter`.
    """
    first = Callbacks(callbacks)
    tracking: Callable[[Callback], AbstractContextManager[Callback]] = nullcontext
    if experiment.track is not None:
        from prefed.runs.track import tracked, usable

        tracking = partial(tracked, usable(experiment.track), experiment.track, path, page=page)
    with (
        RunWriter(path, resume=resume, returnable=returnable) as writer,
        run_log(path) as log,
        tracking(Callbacks([first, log])) as callback,
        _discarding(writer),
    ):
        yield writer, callback


@contextmanager
def _discarding(writer: RunWriter) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, files.WriteError) and writer.commit is not None:
            error.add_note(f"(whole rounds are kept, {writer.round} of them: then go on with --resume)")
        writer.discard()
        raise


def build_in_cache(writer: RunWriter, build: Callable[[Path], T]) -> T:
    """What ``build`` makes in the run's ``cache/``. Before round 1, changed data empty the folder.

    Raises:
        DataMismatchError: a run with rounds has other data.
    """
    cache = writer.path / "cache"
    files.private_folder(cache)
    try:
        return build(cache)
    except DataMismatchError:
        if writer.round:
            raise
        reset_run(writer)
        files.private_folder(cache)
        return build(cache)


def digests_of(experiment: Experiment, job: Job) -> dict[str, str]:
    """Digests of what numbers depend on: the job's data and model, and the files that the settings name."""
    fleet, graph = experiment.fleet, experiment.whole_graph
    named = {"trace": fleet.trace if fleet else None, "graph": graph.file if graph else None}
    of_files = {name: files.file_digest(Path(path)) for name, path in named.items() if path is not None}
    return {**job.trainers.fingerprint, **of_files}


def commit_start(experiment: Experiment, job: Job, writer: RunWriter, digests: Mapping[str, str]) -> None:
    """Commit round 0, or continue a run with the same digests.

    Args:
        digests: from :func:`digests_of`, and what else must not change.

    Raises:
        StoreError: the run in the directory has other digests.
    """
    server = encode(job.method.init_server(job.trainers.initial))
    writer.begin(server, digests, settings_digest(experiment.tables()))
    update_config(experiment, writer)
    writer.reopen()
