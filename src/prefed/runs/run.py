"""From an experiment to a finished run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prefed import files
from prefed.config import Experiment, to_toml
from prefed.core import Callback, Callbacks, State
from prefed.data import DataMismatchError
from prefed.engines import InProcess, JobFactory, ServerRounds, WorkerProcesses
from prefed.metrics import flat_loss_warning
from prefed.models import ModelError
from prefed.runs.build import build_job
from prefed.runs.resume import reconcile, reset_run, settings_digest
from prefed.runs.summary import published_model, summarize
from prefed.store import RunReader, RunWriter
from prefed.wire import decode_state, encode

__all__ = ["RunResult", "default_out", "run"]


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        path: its directory.
        summary: what ``summary.json`` holds.
        server: the server's state after the last round.
        adapter: the folder of the shared adapter; ``None`` if the method shares no model, or one that
            no adapter can hold.
    """

    path: Path
    summary: Mapping[str, Any]
    server: State
    adapter: Path | None

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """What ``rounds.jsonl`` holds, one record per round; read when asked for."""
        return RunReader(self.path).rounds()


def default_out(experiment: Experiment, name: str = "") -> Path:
    """``runs/NAME-METHOD-seedSEED``, where a run goes if nothing else is said."""
    stem = [name] if name and name != experiment.method.name else []
    return Path("runs", "-".join([*stem, experiment.method.name, f"seed{experiment.seed}"]))


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run an experiment to its end.

    Killed or interrupted at any moment, the run in ``out`` can be resumed and ends with the very numbers
    of one that was not.

    Args:
        experiment: what to run; relative paths are taken from the working folder.
        out: the run directory, new or empty; left out, see :func:`default_out`. It is taken away again if
            the experiment proves impossible before its first round.
        resume: go on with the run in ``out``, which must be there: ``resume=out.exists()`` starts what is
            not begun and goes on with what is. The experiment must be the same, but for more ``rounds`` and
            other ``engine.workers`` and ``engine.visit_timeout``.
        progress: show it on the terminal.
        callbacks: are told how the run goes on, in their order.

    Raises:
        StoreError: ``out`` is in use, not empty, damaged, or holds no run to resume, or the data or the
            model changed.
        OSError: a file cannot be written, as on a full disk; what was committed can be resumed.
        ConfigError: the experiment to resume is another one.
        DataError, ModelError: the data or the model cannot be used.
        WorkerError: a worker process died or took longer than ``engine.visit_timeout``.
    """
    path = Path(out) if out is not None else default_out(experiment)
    callback = _all(progress, callbacks)
    with RunWriter(path, resume=resume) as store:
        summary = path / "summary.json"
        try:
            experiment = reconcile(experiment, store)
            if not (store.round == experiment.rounds and summary.exists()):
                _carry_out(experiment, store, callback)
        except Exception as error:
            if isinstance(error, files.WriteError) and store.commit is not None:
                error.add_note(f"(whole rounds are kept, {store.round} of them: then go on with --resume)")
            # A killed or interrupted start stays, to be gone on with; one that cannot be is taken back.
            store.discard()
            raise
        return RunResult(
            path,
            json.loads(summary.read_text("utf-8")),
            decode_state(store.server()),
            _adapter(path) if _adapter(path).exists() else None,
        )


def _carry_out(experiment: Experiment, store: RunWriter, callback: Callback) -> None:
    folder = store.path / "cache"
    try:
        job = build_job(experiment, folder)
    except DataMismatchError:
        if store.round:
            raise
        reset_run(store)
        job = build_job(experiment, folder)
    first = encode(job.method.init_server(job.trainers.initial))
    store.begin(first, job.trainers.fingerprint, settings_digest(experiment.tables()))
    store.reopen()
    threads = experiment.engine.threads or 1
    backend: InProcess | WorkerProcesses
    if experiment.engine.workers:
        order = {"experiment": to_toml(experiment), "folder": str(folder.resolve())}
        recipe = JobFactory("prefed.runs.build:build_worker_job", json.dumps(order))
        backend = WorkerProcesses(recipe, experiment.engine.workers, threads, experiment.engine.visit_timeout)
    else:
        backend = InProcess(job, threads)
    engine = ServerRounds(job, store, backend, callback)
    with backend:
        server = engine.run()
    if still := flat_loss_warning([record["loss"] for record in RunReader(store.path).rounds()]):
        callback.on_warning(still)
    shared = published_model(job, server)
    if shared is not None:
        try:
            job.trainers.save_adapter(shared, _adapter(store.path))
        except ModelError as error:
            callback.on_warning(f"no adapter is saved: {error}")
    profiles = engine.profiles()
    store.write_summary(summarize(job, store, engine.told(profiles)), profiles)


def _adapter(path: Path) -> Path:
    return path / "adapters" / "shared"


def _all(progress: bool, callbacks: Sequence[Callback]) -> Callback:
    if not progress:
        return Callbacks(callbacks)
    from prefed.trackers.terminal import Terminal

    return Callbacks((Terminal(), *callbacks))
