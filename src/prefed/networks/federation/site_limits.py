"""Checks of the hub's requests against the limits of a site."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from prefed.config import Experiment
from prefed.core import Privacy
from prefed.core.strict_settings import differing
from prefed.core.text import pluralize
from prefed.engines.tasks import Task
from prefed.networks.federation.config import Limits, SiteConfig
from prefed.runs.start_or_resume import settings_digest


class RefusalError(ValueError):
    """The site refuses a request. The message is sent to the hub."""


def check_experiment(experiment: Experiment, config: SiteConfig) -> None:
    """Check a run against the limits.

    Raises:
        RefusalError: the limits do not allow it.
    """
    limits, method = config.limits, experiment.method
    if not config.disclose.pairs:
        raise RefusalError(
            "[disclose] pairs = false: the merge weights clients by pairs, which this site does not report"
        )
    if limits.methods is not None and method.name not in limits.methods:
        raise RefusalError(f"[limits] methods: {method.name} is not one of {', '.join(limits.methods)}")
    if experiment.whole_graph is not None or experiment.fleet is not None:
        raise RefusalError(f"{method.name}: [graph], [fleet] and decdpo are not available in a federation")
    if method.name == "centralized":
        raise RefusalError("centralized pools all pairs in one place: this site's pairs do not leave it")
    requested = {
        "rounds": experiment.rounds,
        "max_length": experiment.data.max_length,
        "max_tokens": experiment.engine.max_tokens,
        "rank": experiment.model.lora.rank,
        "width": _width(experiment),
    }
    for name, value in requested.items():
        if value > (most := getattr(limits, name)):
            raise RefusalError(f"[limits] {name}: {value:,} requested, at most {most:,} allowed")
    threads = experiment.engine.threads or 1
    if config.threads is None and threads > (most := limits.threads or os.cpu_count() or 1):
        raise RefusalError(
            f"[limits] threads: {threads:,} requested, at most {most:,} allowed; a site can set `threads` in "
            "its file to use its own number"
        )
    if experiment.privacy.minimum_pairs < limits.minimum_pairs:
        raise RefusalError(
            f"[limits] minimum_pairs: the run must have [privacy] minimum_pairs = {limits.minimum_pairs}"
        )
    _check_noise(experiment.privacy, limits)


def _width(experiment: Experiment) -> int:
    """The largest size that a run chooses for the parts that it adds to the model."""
    model, taste, mixture = experiment.model, experiment.model.variational, experiment.model.mixture
    sizes = (model.bottleneck.width, model.reward.width, mixture.count, mixture.width)
    samples = getattr(experiment.method.settings, "samples", 1)
    return max(*sizes, taste.latent, *taste.widths, taste.prototypes, samples)


def _check_noise(privacy: Privacy, limits: Limits) -> None:
    allowed: dict[str | None, tuple[str | None, ...]] = {"local": ("local",)}
    allowed["distributed"] = (*allowed["local"], "distributed")
    allowed["central"] = (*allowed["distributed"], "central")
    allowed[None] = (*allowed["central"], None)
    if privacy.kind not in allowed[limits.privacy] or (limits.privacy and not privacy.noise):
        kinds = " or ".join(map(repr, allowed[limits.privacy]))
        raise RefusalError(f"[limits] privacy: the run must have [privacy] kind = {kinds}, with noise")
    if (privacy.noise_multiplier or 0.0) < limits.noise_multiplier:
        raise RefusalError(
            f"[limits] noise_multiplier: {privacy.noise_multiplier or 0.0:g} requested, at least "
            f"{limits.noise_multiplier:g} required"
        )
    if privacy.kind == "distributed" and privacy.colluding(0) < limits.colluders:
        raise RefusalError(
            f"[limits] colluders: noise against {privacy.colluding(0)} colluding sites requested, at least "
            f"{limits.colluders} required"
        )
    if limits.epsilon is not None and not (privacy.kind in ("distributed", "local") and privacy.noise):
        raise RefusalError(
            "[limits] epsilon: this site accounts only for its own noise: the run must have [privacy] kind = "
            "'local' or 'distributed', with noise"
        )


def check_same(run: str, known: Experiment, asked: Experiment, apart: Collection[str] = ()) -> None:
    """Refuse a different experiment under the name of a known run.

    The experiment decides what stays private. A different one could upload the private states of the run, or
    use less noise. Settings that may change on resuming, such as the number of rounds, are not compared.

    Args:
        known: the experiment with which the run started at this site.
        apart: tables that are not compared.

    Raises:
        RefusalError: the settings differ; the message names the first one.
    """
    before, after = (
        {name: table for name, table in each.tables().items() if name not in apart} for each in (known, asked)
    )
    if settings_digest(before) == settings_digest(after):
        return
    changed = (
        f"{name} = {new!r}, which was {old!r}"
        for name, (old, new) in differing(before, after).items()
        if settings_digest({name: old}) != settings_digest({name: new})
    )
    raise RefusalError(
        f"run {run} started here with different settings ({next(changed, 'unknown')}): start a new run"
    )


def check_members(experiment: Experiment, config: SiteConfig, members: int) -> None:
    """Check the size of a cohort, as reported by the hub.

    Raises:
        RefusalError: it is smaller than ``minimum_cohort``.
    """
    least = config.limits.minimum_cohort
    size = experiment.cohort.of(members) or members
    if size < least:
        clients = pluralize(size, "client", "clients")
        raise RefusalError(f"[limits] minimum_cohort: a round has {clients}, at least {least} required")


def check_task(
    task: Task, experiment: Experiment, config: SiteConfig, pairs: Sequence[int], exchanges: Collection[str]
) -> None:
    """Check a task against the limits, the method and the client's pairs.

    Args:
        pairs: the client's number of training, validation and test pairs.
        exchanges: names of the method's exchanges.

    Raises:
        RefusalError: the task is not allowed or not possible.
    """
    limits = config.limits
    if not 1 <= task.round <= experiment.rounds:
        raise RefusalError(f"round {task.round} does not exist: the run has {experiment.rounds} rounds")
    if not 0 <= task.asked <= task.round:
        raise RefusalError(f"a visit cannot be requested in round {task.asked} and end in round {task.round}")
    if task.kind == "evaluate" and not limits.evaluate:
        raise RefusalError("[limits] evaluate = false: no metrics over held-out pairs leave this site")
    held_out = pairs[2] if experiment.evaluate.split == "test" else pairs[1]
    single = experiment.privacy.kind != "distributed"
    if task.kind == "evaluate" and single and not experiment.privacy.may_report(held_out):
        raise RefusalError(
            f"[privacy] minimum_pairs = {experiment.privacy.minimum_pairs}: the client has only {held_out} "
            "held-out pairs, so its metrics do not leave this site"
        )
    allowed = limits.exchanges
    if task.kind == "visit" and allowed is not None and task.exchange not in allowed:
        raise RefusalError(f"[limits] exchanges: {task.exchange!r} is not one of {', '.join(allowed)}")
    if task.kind == "visit" and task.exchange not in exchanges:
        raise RefusalError(f"{experiment.method.name} has no exchange {task.exchange!r}")
    if not (pairs[0] if task.kind == "visit" else held_out):
        raise RefusalError(f"the client has no pairs for {task.exchange or 'an evaluation'}")
