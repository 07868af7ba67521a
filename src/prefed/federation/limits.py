"""What a site refuses, as its administrator says."""

from __future__ import annotations

from prefed.config import Experiment
from prefed.engines.diagnostics import DIAGNOSE
from prefed.engines.tasks import Task
from prefed.federation.config import SiteConfig


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
            "[tell] pairs = false: a merge weighs clients by their pairs, which this site does not tell"
        )
    if limits.methods and method.name not in limits.methods:
        raise RefusalError(f"[limits] methods: {method.name} is none of {', '.join(limits.methods)}")
    if experiment.whole_graph is not None or experiment.whole_fleet is not None:
        raise RefusalError(f"{method.name} with these settings is for one process: a federation has a server")
    if experiment.privacy.kind is not None:
        raise RefusalError("[privacy] kind: a visit done again would draw other noise than the one before")
    if method.name == "centralized":
        raise RefusalError("centralized pools all pairs in one place, and these stay here")
    if experiment.rounds > limits.rounds:
        raise RefusalError(
            f"[limits] rounds: {experiment.rounds} are asked for, and {limits.rounds} are allowed"
        )
    if experiment.privacy.minimum_pairs < limits.minimum_pairs:
        raise RefusalError(
            f"[limits] minimum_pairs: the run must have [privacy] minimum_pairs = {limits.minimum_pairs}"
        )


def check_members(experiment: Experiment, config: SiteConfig, members: int) -> None:
    """Refuse a federation that is too small, by what the hub says of it.

    Raises:
        RefusalError: it is.
    """
    least = config.limits.minimum_cohort
    size = experiment.cohort.of(members) or members
    if size < least:
        raise RefusalError(f"[limits] minimum_cohort: a round has {size} clients, and must have {least}")


def check_task(task: Task, experiment: Experiment, config: SiteConfig) -> None:
    """Refuse a task that the limits do not allow.

    Raises:
        RefusalError: they do not.
    """
    limits = config.limits
    if not 1 <= task.round <= experiment.rounds:
        raise RefusalError(f"round {task.round} of {experiment.rounds}")
    if task.kind == "evaluate" and not limits.evaluate:
        raise RefusalError("[limits] evaluate = false: no figures over held-out pairs leave this site")
    if task.kind == "visit" and limits.exchanges and task.exchange not in limits.exchanges:
        named = "a diagnosis" if task.exchange == DIAGNOSE else repr(task.exchange)
        raise RefusalError(f"[limits] exchanges: {named} is none of {', '.join(limits.exchanges)}")
