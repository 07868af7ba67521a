"""From an experiment to a job: its data, its model, its method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from prefed import files
from prefed.config import ConfigError, Experiment
from prefed.core import Key, Owner
from prefed.data import FederatedDataset, build_dataset
from prefed.engines import Job
from prefed.merge import Aggregator, TooFewUploads, lora
from prefed.merge.robust import enough
from prefed.methods import TrainingSettings
from prefed.methods.base.ppo import BaselineSettings
from prefed.models import load_backbone, pretrained
from prefed.train.trainer_factory import PairTrainerFactory

__all__ = ["build_data", "build_job", "build_trainers", "job_over", "worker_job"]


def build_data(experiment: Experiment, folder: Path) -> FederatedDataset:
    """The experiment's federation, read and tokenised into ``folder`` (or opened if it is there).

    Raises:
        DataError: the data cannot be used.
        ModelError: there is no tokenizer under the model's name.
    """
    from transformers import AutoTokenizer

    model = experiment.model
    tokenizer = pretrained(AutoTokenizer, "[model] name", model.name, "tokenizer", revision=model.revision)
    return build_dataset(experiment.data, tokenizer, Key(experiment.seed).at("data"), folder)


def build_job(experiment: Experiment, folder: Path) -> Job:
    """Load the data and the model, and build the method on them.

    Args:
        experiment: what to run.
        folder: keeps tokens and the reference's log-probabilities, also for the next time.

    Raises:
        DataError, ModelError: the data or the model cannot be used.
        ConfigError: all clients are to be unseen, or the cohort is too small for the merge rule.
        ValueError: the clients cannot do what is asked, see :class:`~prefed.engines.Job`.
    """
    files.private(folder)
    federation = build_data(experiment, folder / "data")
    return job_over(experiment, build_trainers(experiment, federation, folder / "reference"))


def build_trainers(
    experiment: Experiment,
    federation: FederatedDataset,
    cache: Path | None,
    kind: Callable[..., PairTrainerFactory] = PairTrainerFactory,
) -> PairTrainerFactory:
    """Load the experiment's model, with the parts that its method needs, beside a federation.

    Args:
        experiment: names the model and the method.
        federation: who holds which pairs.
        cache: folder that keeps the reference's log-probabilities; ``None`` keeps them in memory.
        kind: what to make; it is called as :class:`~prefed.train.trainer_factory.PairTrainerFactory` is.

    Raises:
        ModelError: the model cannot be used.
        ConfigError: all clients are to be unseen.
    """
    settings = experiment.method.settings
    needs = experiment.method.kind.needs(settings) | lora.needs(experiment.merge.lora)
    return kind(
        load_backbone(experiment.model, Key(experiment.seed).at("model"), needs),
        federation,
        cache=cache,
        max_tokens=experiment.engine.max_tokens,
        fast=experiment.model.fast,
        unseen=_unseen(experiment, federation),
        reward_model=_reward_model(settings),
    )


def job_over(experiment: Experiment, place: PairTrainerFactory) -> Job:
    """Build the experiment's method on a place that :func:`build_trainers` gave.

    Raises:
        ConfigError: the cohort is too small for the merge rule.
        ValueError: the clients cannot do what is asked, see :class:`~prefed.engines.Job`.
    """
    settings, judged, backbone = experiment.method.settings, experiment.evaluate, place.backbone
    aggregator = Aggregator(experiment.merge, backbone.layout, backbone.scaling)
    method = experiment.method.kind.build(settings, backbone.layout, aggregator, experiment.rounds)
    unseen = _unseen(experiment, place.federation)
    job = Job(
        trainers=place,
        method=method,
        seed=experiment.seed,
        rounds=experiment.rounds,
        cohort=experiment.cohort.of(len(place.federation.clients) - len(unseen)),
        every=judged.every,
        split=judged.split,
        judged=judged.clients,
        beta=judged.beta or float(getattr(settings, "beta", 0.1)),
        keep=getattr(torch, experiment.engine.state_dtype),
        unseen=unseen,
        unseen_steps=tuple(judged.unseen_steps),
        untouched=backbone.reference,
        privacy=experiment.privacy,
    )
    _enough(experiment, job)
    return job


def _reward_model(settings: TrainingSettings) -> str | None:
    """The reward model that a method's settings ask for: one where they train on offline PPO, else none."""
    return settings.reward_model if isinstance(settings, BaselineSettings) and settings.ppo else None


def _enough(experiment: Experiment, job: Job) -> None:
    """Refuse a merge rule that every round's cohort would be too small for."""
    merge, asked = experiment.merge, job.asked
    if not job.method.ownership.names(Owner.SHARED):
        return
    try:
        enough(merge.rule, asked, liars=merge.liars, trim=merge.trim)
    except TooFewUploads as error:
        raise ConfigError(
            f"[merge] rule = {merge.rule!r} does not serve a cohort of {asked} clients, of the "
            f"{len(job.members)} that train ([cohort] size): {error}"
        ) from error


def _unseen(experiment: Experiment, federation: FederatedDataset) -> tuple[str, ...]:
    """The clients that never train: those that are named, or so many drawn by the seed."""
    asked, names = experiment.evaluate.unseen, sorted(federation.clients)
    if not isinstance(asked, int):
        return tuple(sorted(asked))
    if asked >= len(names):
        raise ConfigError(f"[evaluate] unseen = {asked}, but there are {len(names)} clients in all")
    draw = Key(experiment.seed).at("unseen").numpy().choice(len(names), asked, replace=False)
    return tuple(names[index] for index in sorted(draw))


def worker_job(text: str) -> Job:
    """What a worker process calls: :func:`build_job` of an experiment and a folder as JSON."""
    from prefed.trackers.terminal import quiet

    quiet()
    order = json.loads(text)
    return build_job(Experiment.parse(order["experiment"]), Path(order["folder"]))
