"""The alignment of a finished run: the server's own model, with prompts and the run's selectors alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from prefed import files
from prefed.align import AlignError, Alignment, ClientPrompts, KnownTastes, Selectors
from prefed.align import align as run_stages
from prefed.align.run import SETTINGS
from prefed.config import AlignConfig, Experiment
from prefed.config.align import align_settings
from prefed.core import Callback, Callbacks
from prefed.core.text import pluralize
from prefed.judge.registry import JudgeOptions, split_name
from prefed.models import ModelConfig
from prefed.runs.judges import JudgeLabels, make_judge
from prefed.runs.loaded import LoadedRun, load_run
from prefed.runs.record import RunRecord, read_run
from prefed.runs.selectors import check_selectors, selectors_of, untrained
from prefed.runs.taste_names import OPPOSED, common_taste, known_tastes
from prefed.runs.track import tracked_alignment
from prefed.store import RunReader
from prefed.store.directory import lock

FOLDER = "align"


def align(
    path: str | Path,
    config: AlignConfig | None = None,
    *,
    stage: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Align a model with the selectors of the finished run in ``path``, or go on with an alignment there.

    Args:
        config: the ``[align]`` table; left out: :func:`stored_settings`.
        stage: a stage to do again, with all stages after it.
        callbacks: are told how the stages go on.

    Returns:
        What ``align/summary.json`` holds; see :func:`prefed.align.align`.

    Raises:
        RunError: there is no finished run, or its method trains no selectors.
        AlignError: a stage was done with other settings; or as :func:`prefed.align.align`.
        ConfigError: there are no settings.
        StoreError: another process works in the directory.
        DataError, ModelError, JudgeError: prompts, selectors, model or judge cannot be used.
    """
    record = read_run(path)
    check_selectors(record)
    if config is None:
        config = align_settings(stored_settings(record), [], record.path)
    folder = record.path / FOLDER
    with (
        _locked(record.path),
        _threads(record),
        tracked_alignment(record.config, folder, Callbacks(callbacks)) as telling,
    ):
        return run_stages(_alignment(record, config, telling), stage)


def check_judge(config: AlignConfig) -> None:
    """Refuse labels by a judge that does not exist.

    Raises:
        AlignError: there is no judge of that name, or its argument is missing.
    """
    if config.judge is not None:
        try:
            split_name(config.judge)
        except ValueError as error:
            raise AlignError(f"[align] labels = {config.labels!r}: {error}") from error


def stored_settings(record: RunRecord, *, anew: bool = False) -> dict[str, Any] | None:
    """The settings of the run's last alignment, else its ``[align]`` table; ``None`` if it has neither.

    Args:
        anew: pass over the last alignment, which failed before it left anything.
    """
    path = record.path / FOLDER / SETTINGS
    if path.exists() and not anew:
        stored: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return stored
    table = record.config.get("align")
    return None if table is None else dict(table)


def _alignment(record: RunRecord, config: AlignConfig, callback: Callback) -> Alignment:
    experiment = Experiment.from_tables(record.config, str(record.path / "config.toml"))
    count = getattr(experiment.method.settings, "selectors", 1)
    if isinstance(config.labels, int) and config.labels >= count:
        raise AlignError(
            f"[align] labels = {config.labels}: the run has {pluralize(count, 'selector', 'selectors')}, "
            "numbered from 0; take another: --set align.labels=majority, or a number"
        )
    try:
        config.check_tastes(record.method, experiment.has_tastes)
    except ValueError as error:
        raise AlignError(str(error)) from error
    check_judge(config)
    source = _Source(record.path, config, callback)
    commit = RunReader(record.path).commit
    asked = {**experiment.selector.model_dump(), "max_length": experiment.data.max_length}
    judge = None if config.judge is None else source.judge(config.judge)
    # What the labels depend on.
    origin = [commit.digests.server, commit.fingerprint["model"], asked] if judge is None else judge.identity
    return Alignment(
        folder=record.path / FOLDER,
        config=config,
        seed=experiment.seed,
        model=policy_model(experiment, config),
        data=experiment.data,
        max_tokens=experiment.engine.max_tokens,
        client_prompts=source.client_prompts,
        selectors=source.selectors,
        sources={
            "clients": commit.fingerprint["data"],
            "selectors": files.digest(json.dumps(origin).encode()),
        },
        judge=judge,
        tastes=source.tastes,
        callback=callback,
    )


def policy_model(experiment: Experiment, config: AlignConfig) -> ModelConfig:
    """The model that is aligned; one that takes a taste takes one of the selectors' width."""
    model = config.model or experiment.model
    if config.tastes is None:
        return model
    return model.model_copy(update={"variational": experiment.model.variational})


@dataclass
class _Source:
    """The run, loaded when a stage needs it."""

    path: Path
    config: AlignConfig
    callback: Callback

    @cached_property
    def run(self) -> LoadedRun:
        run = load_run(self.path, data=True)
        labels = self.config.labels
        names = [] if self.config.judge is not None else list(untrained(run))
        if isinstance(labels, int):
            names = [name for name in names if name == list(run.published_models)[labels]]
        if names:
            self.callback.on_warning(
                f"never trained, yet labels completions: {', '.join(names)}; such labels are the "
                "untouched model's. Take a trained selector alone (--set align.labels=NUMBER), or resume the "
                "run with more rounds"
            )
        return run

    def client_prompts(self) -> ClientPrompts:
        tokens = self.run.trainers.dataset.tokens
        return ClientPrompts(tokens.prompts, tokens.record(0).prompt if len(tokens) else None)

    def selectors(self) -> Selectors:
        unnamed = self.config.taste is None and self.config.tastes is None
        if unnamed and (share := common_taste(self.run)) < OPPOSED:
            self.callback.on_warning(
                "labels come from the taste of the population, which is nobody's: what the clients' tastes "
                f"add up to is {share:.2f} of what it would be if they agreed. Label with one taste "
                "(--set align.taste=CLIENT, or prototype:K), or align a policy that takes tastes (--set "
                "align.tastes=posteriors)"
            )
        return selectors_of(self.run, self.config.taste)

    def tastes(self) -> KnownTastes:
        return known_tastes(self.run)

    def judge(self, name: str) -> JudgeLabels:
        return JudgeLabels(make_judge(name, JudgeOptions(), self.run))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = lock(path)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def _threads(record: RunRecord) -> Iterator[None]:
    """The run's number of threads: with another one, last digits change."""
    before = torch.get_num_threads()
    engine: Mapping[str, Any] = record.config.get("engine", {})
    torch.set_num_threads(engine.get("threads") or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
