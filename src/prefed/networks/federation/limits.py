"""What a site refuses, as its administrator says."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from prefed.config import Experiment
from prefed.core import Privacy
from prefed.core.text import pluralize
from prefed.engines.tasks import Task
from prefed.networks.federation.config import Limits, SiteConfig
from prefed.runs.start_or_resume import differing, settings_digest


class RefusalError(ValueError):
    """The site does not do what the hub asks; the message goes to the hub."""


def check_experiment(experiment: Experiment, config: SiteConfig) -> None:
    """Refuse a run that the limits do not allow.

    Raises:
        RefusalError: they do not.
    """
    limits, method = config.limits, experiment.method
    if not config.tell.pairs:
        raise RefusalError(
            "[tell] pairs = false: a merge weighs clients by their pairs, which this site does not report"
        )
    if limits.methods is not None and method.name not in limits.methods:
        raise RefusalError(f"[limits] methods: {method.name} is none of {', '.join(limits.methods)}")
    if experiment.whole_graph is not None or experiment.fleet is not None:
        raise RefusalError(f"{method.name} with these settings is for one process: a federation has a server")
    if method.name == "centralized":
        raise RefusalError("centralized pools all pairs in one place, and these stay here")
    requested = {
        "rounds": experiment.rounds,
        "max_length": experiment.data.max_length,
        "max_tokens": experiment.engine.max_tokens,
        "rank": experiment.model.lora.rank,
    }
    for name, value in requested.items():
        if value > (most := getattr(limits, name)):
            raise RefusalError(f"[limits] {name}: {value:,} requested, at most {most:,} allowed")
    threads = experiment.engine.threads or 1
    if config.threads is None and threads > (most := limits.threads or os.cpu_count() or 1):
        raise RefusalError(
            f"[limits] threads: {threads:,} requested, at most {most:,} allowed; with `threads` in its "
            "file a site takes its own number"
        )
    if experiment.privacy.minimum_pairs < limits.minimum_pairs:
        raise RefusalError(
            f"[limits] minimum_pairs: the run must have [privacy] minimum_pairs = {limits.minimum_pairs}"
        )
    _check_noise(experiment.privacy, limits)


def _check_noise(privacy: Privacy, limits: Limits) -> None:
    """Refuse a run whose noise is less than the limits ask for, or another's."""
    allowed = {"local": ("local",), "central": ("local", "central"), None: (None, "local", "central")}
    if privacy.kind not in allowed[limits.privacy] or (limits.privacy and not privacy.noise):
        kinds = " or ".join(map(repr, allowed[limits.privacy]))
        raise RefusalError(f"[limits] privacy: the run must have [privacy] kind = {kinds}, with noise")
    if (privacy.noise_multiplier or 0.0) < limits.noise_multiplier:
        raise RefusalError(
            f"[limits] noise_multiplier: the run must have [privacy] noise_multiplier = "
            f"{limits.noise_multiplier:g} at least, and has {privacy.noise_multiplier or 0.0:g}"
        )
    if limits.epsilon is not None and not (privacy.kind == "local" and privacy.noise):
        raise RefusalError(
            "[limits] epsilon: this site's account is of its own noise: the run must have [privacy] kind = "
            "'local', with noise"
        )


def check_same(run: str, known: Experiment, asked: Experiment) -> None:
    """Refuse another experiment under the name of a run that this site knows.

    Private states of a run are what its experiment says: another one could have them shared, or give them
    away with less noise. A run that continues may have more rounds, and whatever else a
    resumed run may change.

    Args:
        known: the experiment that the run has here.

    Raises:
        RefusalError: the settings differ; the message names the first.
    """
    before, after = known.tables(), asked.tables()
    if settings_digest(before) == settings_digest(after):
        return
    changed = (
        f"{name} = {new!r}, which was {old!r}"
        for name, (old, new) in differing(before, after).items()
        if settings_digest({name: old}) != settings_digest({name: new})
    )
    raise RefusalError(
        f"run {run} started here with another experiment ({next(changed, 'its settings')}): start a new run"
    )


def check_members(experiment: Experiment, config: SiteConfig, members: int) -> None:
    """Refuse a federation that is too small, by what the hub says of it.

    Raises:
        RefusalError: it is.
    """
    least = config.limits.minimum_cohort
    size = experiment.cohort.of(members) or members
    if size < least:
        clients = pluralize(size, "client", "clients")
        raise RefusalError(f"[limits] minimum_cohort: a round has {clients}, and must have {least}")


def check_task(
    task: Task,
    experiment: Experiment,
    config: SiteConfig,
    pairs: Sequence[int],
    exchanges: Collection[str],
) -> None:
    """Refuse a task that the limits do not allow, or that the client or the method has nothing for.

    Args:
        pairs: how many the client has: of training, of validation, of test.
        exchanges: of the method, by name.

    Raises:
        RefusalError: they do not.
    """
    limits = config.limits
    if not 1 <= task.round <= experiment.rounds:
        raise RefusalError(f"round {task.round} of {experiment.rounds}")
    if not 0 <= task.asked <= task.round:
        raise RefusalError(f"round {task.round} with a visit that was asked for in round {task.asked}")
    if task.kind == "evaluate" and not limits.evaluate:
        raise RefusalError("[limits] evaluate = false: no metrics over held-out pairs leave this site")
    judged = pairs[2] if experiment.evaluate.split == "test" else pairs[1]
    if task.kind == "evaluate" and not experiment.privacy.may_report(judged):
        raise RefusalError(
            f"[privacy] minimum_pairs = {experiment.privacy.minimum_pairs}: the client has {judged} pairs to "
            "be judged on, and metrics over so few do not leave this site"
        )
    allowed = limits.exchanges
    if task.kind == "visit" and allowed is not None and task.exchange not in allowed:
        raise RefusalError(f"[limits] exchanges: {task.exchange!r} is none of {', '.join(allowed)}")
    if task.kind == "visit" and task.exchange not in exchanges:
        raise RefusalError(f"{experiment.method.name} has no exchange {task.exchange!r}")
    if not (pairs[0] if task.kind == "visit" else judged):
        raise RefusalError(f"the client has no pair for {task.exchange or 'an evaluation'}")
