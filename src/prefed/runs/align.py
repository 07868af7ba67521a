"""Align a model with the selectors of a finished run and prompts of the server."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefed.align import (
    AlignError,
    Alignment,
    ClientPrompts,
    Clients,
    KnownTastes,
    Scorer,
    Selectors,
    check_inputs,
)
from prefed.align import align as run_stages
from prefed.align.completions import endpoint_of
from prefed.align.judge.endpoint import EndpointJudge, openai_or_here
from prefed.align.judge.local import MEAN
from prefed.align.judge.names import split_name
from prefed.align.judge.questions import get_template
from prefed.align.run import SETTINGS, SUMMARY
from prefed.align.tastes import check_known
from prefed.config import AlignConfig, Experiment
from prefed.config.align import CLIENTS, ENDPOINT, SITE, align_settings
from prefed.core import Callback, Callbacks, files
from prefed.core.proxies import through
from prefed.core.text import did_you_mean, listed, pluralize
from prefed.data import DataConfig, Record
from prefed.engines import Job
from prefed.models import ModelConfig
from prefed.models.pretrained import with_dtype, with_kernels
from prefed.runs.finished_run import RunRecord, read_run
from prefed.runs.labels import JudgeLabels, check_selectors, make_judge, selectors_of, untrained
from prefed.runs.loaded_run import LoadedRun, load_run, recorded_experiment
from prefed.runs.refresh import RunClients
from prefed.runs.start_or_resume import run_log
from prefed.runs.tastes import OPPOSED, common_taste, known_tastes, published_taste, split_taste
from prefed.runs.track import tracked_alignment
from prefed.runs.votes import NoisedVotes, spent
from prefed.store import RunReader
from prefed.store.directory import lock

FOLDER, VOTES = "align", "votes.jsonl"
UNSEEN = 256
"""Largest number of pairs to measure the accuracy of selectors on."""


def align(
    path: str | Path,
    config: AlignConfig | None = None,
    *,
    stage: str | None = None,
    callbacks: Sequence[Callback] = (),
    clients: Clients | None = None,
) -> dict[str, Any]:
    """Start or continue an alignment of the finished run in ``path``.

    Args:
        config: the ``[align]`` table; defaults to :func:`read_settings`.
        stage: a stage to run again, with all stages after it.
        callbacks: receive the events of the stages, which are also logged in ``run.log``.
        clients: those of a run over sites, which judge there (``client_judge = "site"``).

    Returns:
        The content of ``align/summary.json``; see :func:`prefed.align.align`.

    Raises:
        RunError: there is no finished run, its method trains no selectors, or its server does not know the
            taste.
        AlignError: a stage was run with other settings; or as :func:`prefed.align.align`.
        ConfigError: there are no settings.
        StoreError: another process uses the directory.
        DataError, ModelError, JudgeError: prompts, selectors, model or judge cannot be used.
    """
    record = read_run(path)
    check_selectors(record)
    if config is None:
        config = read_settings(record)
    folder = record.path / FOLDER
    with (
        _locked(record.path),
        run_log(record.path) as log,
        _threads(record),
        tracked_alignment(record.config, folder, Callbacks([*callbacks, log])) as reporting,
    ):
        source = _Source(record.path, config, reporting)
        alignment = _alignment(record, config, source, clients)
        if stage is not None or not (folder / SUMMARY).exists():
            source.check_tastes()
        _warn_of_collapse(record, config, reporting)
        for text in what_is_sent(config):
            reporting.on_note(text)
        return run_stages(alignment, stage)


def check_alignment(config: AlignConfig, data: DataConfig) -> None:
    """Check the files and the judge of an ``[align]`` table, before clients train.

    Raises:
        AlignError: as :func:`prefed.align.check_inputs`, or there is no such judge.
        JudgeError: as :func:`prefed.align.completions.endpoint_of`.
    """
    check_inputs(config, data)
    check_judge(config)
    if config.endpoint is not None:
        endpoint_of(config.endpoint)


def check_judge(config: AlignConfig) -> None:
    """Check that the judge in an ``[align]`` table exists.

    Raises:
        AlignError: there is no such judge or template.
        JudgeError: as :class:`~prefed.align.judge.endpoint.EndpointJudge`.
    """
    for key, name in config.judges.items():
        try:
            kind, argument = split_name(name)
            options = config.judge_options
            get_template(options.template, options.prefix)
            if key == "client_judge" and options.taste != MEAN:
                raise ValueError("each client judges with its own taste: leave out [align.judge] taste")
        except ValueError as error:
            raise AlignError(f"[align] {key} = {getattr(config, key)!r}: {error}") from error
        if kind == "endpoint":
            EndpointJudge(argument, options)


def what_is_sent(config: AlignConfig) -> Iterator[str]:
    """Describe what an alignment sends to servers."""
    servers = {name: _route(url) for name, url in _servers(config).items()}
    if url := servers.get("align.endpoint.url"):
        yield f"the server's prompts are sent to {url}, which generates the completions"
    if url := servers.get("align.judge.url"):
        yield f"prompts and completions are sent to {url}, which judges them"
    if config.client_judge == SITE:
        yield "prompts and completions are sent to the sites, whose clients judge them"


def _route(url: str) -> str:
    proxy = through(url)
    return f"{url}, through the proxy {proxy}" if proxy else url


def _servers(config: AlignConfig) -> dict[str, str]:
    """Setting → URL of each server that an alignment uses."""
    servers = {} if config.endpoint is None else {"align.endpoint.url": config.endpoint.url}
    if ENDPOINT in config.judge_kinds:
        servers["align.judge.url"] = config.judge_options.url
    return servers


def check_named_tastes(experiment: Experiment, job: Job) -> None:
    """Check that the server will know the tastes in ``[align]``, before clients train.

    Raises:
        AlignError: no client of that name will send its taste, or the method has no such prototype.
        ValueError: as :func:`~prefed.runs.tastes.split_taste`.
    """
    config = experiment.align
    if config is None or (config.taste is None and config.tastes is None):
        return
    reporting = [client for client in job.members if job.privacy.may_report(job.weights[client])]
    count = experiment.model.variational.prototypes if "prototypes" in experiment.parts else 0
    if config.tastes is not None:
        check_known(config.tastes, reporting, reporting if count else ())
    if config.taste is None:
        return
    (kind, which), wrong = split_taste(config.taste), ""
    if kind == "client" and which not in job.trainers.clients:
        some = f"; the clients are {listed(job.members)}"
        wrong = f"no such client in the data{did_you_mean(which, job.members) or some}"
    elif kind == "client" and which not in reporting:
        wrong = (
            "this client will not send its taste: it never trains, or has fewer pairs than [privacy] "
            "minimum_pairs; name another client"
        )
    elif kind == "prototype" and int(which) >= count:
        there = pluralize(count, "prototype", "prototypes")
        wrong = f"{experiment.method.name} has {there}, numbered from 0; name another taste"
    if wrong:
        raise AlignError(f"[align] taste = {config.taste!r}: {wrong}")


def read_settings(record: RunRecord, overrides: Sequence[str] = (), *, anew: bool = False) -> AlignConfig:
    """Return :func:`stored_settings` with overrides.

    Args:
        overrides: ``KEY=VALUE``, as for :func:`~prefed.config.align.align_settings`.
        anew: as for :func:`stored_settings`.

    Raises:
        ConfigError: as :func:`~prefed.config.align.align_settings`.
        AlignError: prompts would be sent to a server that only the run directory names.
    """
    stored = stored_settings(record, anew=anew)
    file = None if stored is None else _settings_file(record, anew)
    config = align_settings(stored, overrides, record.path, file)
    for key, url in _servers(config).items():
        # The directory may be somebody else's.
        if not openai_or_here(url) and not any(url in override for override in overrides):
            raise AlignError(
                f"{record.path}: its settings send prompts and completions to {url}; if you trust this "
                f"server, name it: --set {key}={url}"
            )
    return config


def stored_settings(record: RunRecord, *, anew: bool = False) -> dict[str, Any] | None:
    """Return the settings of the run's last alignment, else its ``[align]`` table, else ``None``.

    Args:
        anew: ignore the last alignment, which failed before it wrote anything.
    """
    path = _settings_file(record, anew)
    if path.name == SETTINGS:
        # An older prefed kept all labelled pairs, and had no such setting.
        stored: dict[str, Any] = {"pairs": "all", **json.loads(path.read_text("utf-8"))}
        return stored
    table = record.config.get("align")
    return None if table is None else dict(table)


def _settings_file(record: RunRecord, anew: bool) -> Path:
    last = record.path / FOLDER / SETTINGS
    return last if last.exists() and not anew else record.path / "config.toml"


def _warn_of_collapse(record: RunRecord, config: AlignConfig, callback: Callback) -> None:
    tastes = record.tastes
    if not config.selectors_label or tastes is None or not tastes["collapsed"]:
        return
    callback.on_warning(
        f"the clients' tastes have collapsed: accuracy {tastes['own']:.3f} with their own taste, "
        f"{tastes['another']:.3f} with that of another client (tastes.json). Labels hardly depend on the "
        "taste, and a policy that takes tastes cannot learn differences; for remedies see: "
        f"prefed report {shlex.quote(str(record.path))}"
    )


def _alignment(
    record: RunRecord, config: AlignConfig, source: _Source, clients: Clients | None = None
) -> Alignment:
    experiment = recorded_experiment(record)
    count = getattr(experiment.method.settings, "selectors", 1)
    if isinstance(config.labels, int) and config.labels >= count:
        raise AlignError(
            f"[align] labels = {config.labels}: the run has {pluralize(count, 'selector', 'selectors')}, "
            "numbered from 0; choose another, or use --set align.labels=majority"
        )
    try:
        config.check_tastes(record.method, experiment.has_tastes)
    except ValueError as error:
        raise AlignError(str(error)) from error
    check_judge(config)
    commit = RunReader(record.path).commit
    asked = {**experiment.selector.model_dump(), "max_length": experiment.data.max_length}
    name = config.judge_name
    judge: Scorer | None = None
    origin: Any = [commit.digests.server, commit.fingerprint["model"], asked]
    judged: Mapping[str, Any] = {}
    if name is not None:
        own = make_judge(name, config.judge_options, source.run)
        judge, origin = JudgeLabels(own), own.identity
    if config.client_judge == SITE:
        if not record.sites:
            raise AlignError(f"{record.path}: client_judge = 'site': this run has no sites; name a judge")
        if clients is None:
            raise AlignError(f"{record.path}: its clients judge at their sites: name the hub with --hub")
        judged = clients.identity
    elif config.client_judge is not None:
        if record.sites or "peer" in record.summary or experiment.whole_graph is not None:
            hint = "; sites judge with client_judge = 'site'" if record.sites else ""
            raise AlignError(
                f"{record.path}: client_judge: the clients of this run are not on this machine{hint}"
            )
        if config.refresh is not None and experiment.privacy.kind is not None:
            raise AlignError(
                f"{record.path}: [align.refresh] takes further rounds, which epsilon in its summary does not "
                "count: leave out [privacy] or [align.refresh]"
            )
        clients = RunClients(source.run, config)
        judged = clients.identity
    votes = record.path / FOLDER / VOTES
    if clients is not None and config.labels == CLIENTS:
        judge, origin = clients.votes, judged
        if experiment.privacy.kind is not None:
            judge = NoisedVotes(source.run, clients, votes, source.callback)
            spent(source.run, votes)
    return Alignment(
        folder=record.path / FOLDER,
        config=config,
        seed=experiment.seed,
        model=_policy_model(experiment, config),
        data=experiment.data,
        max_tokens=experiment.engine.max_tokens,
        client_prompts=source.client_prompts,
        selectors=source.selectors,
        sources={
            "clients": commit.fingerprint["data"],
            "selectors": files.digest(json.dumps(origin).encode()),
            "judges": files.digest(json.dumps(judged).encode()),
        },
        judge=judge,
        tastes=source.tastes,
        unseen_pairs=source.unseen_pairs,
        clients=clients,
        # Votes of an earlier alignment stay spent.
        privacy=(lambda: spent(source.run, votes))
        if isinstance(judge, NoisedVotes) or votes.exists()
        else None,
        callback=source.callback,
    )


def _policy_model(experiment: Experiment, config: AlignConfig) -> ModelConfig:
    """Return the model to align; one that takes tastes has the taste width of the selectors."""
    model = with_kernels(with_dtype(config.model or experiment.model))
    if config.tastes is None:
        return model
    return model.model_copy(update={"variational": experiment.model.variational})


@dataclass
class _Source:
    """Inputs of an alignment from a run, which is loaded on first use."""

    path: Path
    config: AlignConfig
    callback: Callback

    @cached_property
    def run(self) -> LoadedRun:
        # The hub of a federation has no data of clients.
        run = load_run(self.path, data=not read_run(self.path).sites)
        labels = self.config.labels
        names = list(untrained(run)) if self.config.selectors_label else []
        if isinstance(labels, int):
            names = [name for name in names if name == list(run.published_models)[labels]]
        if names:
            self.callback.on_warning(
                f"untrained selectors label completions: {', '.join(names)}; use only a trained selector "
                "(--set align.labels=NUMBER), or resume the run with more rounds"
            )
        return run

    def client_prompts(self) -> ClientPrompts:
        tokens = self.run.trainers.dataset.tokens
        return ClientPrompts(tokens.prompts, tokens.record(0).prompt if len(tokens) else None)

    def unseen_pairs(self) -> list[Record]:
        """Read the first pairs to evaluate on whose prompts are in no client's training pairs.

        With a client's ``taste``, only this client's pairs are read.
        """
        job, dataset = self.run.job, self.run.trainers.dataset
        if not dataset.has_pairs:
            return []
        tokens, clients = dataset.tokens, dataset.clients
        trained = tokens.prompts[np.concatenate([data.train for data in clients.values()])]
        taste = self.config.taste or ""
        named = [taste] if taste in clients else job.evaluation_clients
        rows = np.concatenate([getattr(clients[client], job.evaluate.split) for client in named])
        rows = rows[~np.isin(tokens.prompts[rows], trained)]
        return [tokens.record(row) for row in rows[:: -(-len(rows) // UNSEEN) or 1]]

    def selectors(self) -> Selectors:
        unnamed = self.config.taste is None and self.config.tastes is None
        # If tastes have collapsed, no other taste is better than their mean.
        collapsed = (self.run.record.tastes or {}).get("collapsed", False)
        if unnamed and not collapsed and (share := common_taste(self.run)) < OPPOSED:
            self.callback.on_warning(
                "labels use the taste of the population, but the clients' tastes oppose each other "
                f"(agreement {share:.2f} of 1): label with one taste (--set align.taste=CLIENT, or "
                "prototype:K), or align a policy that takes tastes (--set align.tastes=posteriors)"
            )
        return selectors_of(self.run, self.config.taste)

    def check_tastes(self) -> None:
        """Check that the server knows the tastes."""
        if self.config.taste is not None:
            published_taste(self.run, self.config.taste)
        if self.config.tastes is not None:
            known = self.tastes()
            check_known(self.config.tastes, known.posteriors, known.labels)

    def tastes(self) -> KnownTastes:
        return known_tastes(self.run)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = lock(path)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def _threads(record: RunRecord) -> Iterator[None]:
    """Use the number of threads of the run, since it can change the last digits of results."""
    before = torch.get_num_threads()
    engine: Mapping[str, Any] = record.config.get("engine", {})
    torch.set_num_threads(engine.get("threads") or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
