"""Evaluation on the client's side: one client's figures on its own pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from prefed.core import Download, State, Tensors
from prefed.engines.job import Job
from prefed.metrics import PairScores, client_metrics

Score: TypeAlias = Callable[[Tensors], PairScores]
"""A model (full layout) → the log-probabilities that it gives to the pairs of an evaluation."""


def evaluate_client(
    job: Job, client: str, private: State, published: Download, number: int, score: Score | None = None
) -> dict[str, float]:
    """The figures of the model with which a client predicts.

    They are what :func:`~prefed.metrics.client_metrics` gives, and for a personal method also
    ``shared_accuracy``, the preference accuracy of the published model alone.

    Args:
        number: the round after which it is evaluated.
        score: scores the pairs; left out: the client's own pairs of the job's split.
    """
    score = score or _own_pairs(job, client)
    model = job.client_model(client, private, published, number)
    weight = job.method.reward_weight(private, number)
    figures = client_metrics(score(model), job.beta, weight)
    if job.method.personal:
        shared = client_metrics(score(job.shared(published)), job.beta)
        figures["shared_accuracy"] = shared["preference_accuracy"]
    return figures


def evaluate_newcomer(job: Job, client: str, published: Download, number: int) -> dict[str, float]:
    """Number of local steps → preference accuracy of a client that never took part.

    Before its first step, or without a pair to train on, the client has the published model alone: personal
    tensors that start at random are noise.
    """
    adapt, accuracies, score = job.method.adapt, {}, _own_pairs(job, client)
    trainer = job.trainer(client, number, "predict")
    for steps in job.unseen_steps:
        if adapt is not None and steps and trainer.size:
            model = adapt(trainer, published, steps)
        else:
            model = job.shared(published)
        accuracies[str(steps)] = client_metrics(score(model), job.beta)["preference_accuracy"]
    return accuracies


def _own_pairs(job: Job, client: str) -> Score:
    return lambda tensors: job.trainers.score(client, tensors, job.split)
