"""Evaluation on the client's side: metrics of a client on its own pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, cast

from prefed.core import Download, State, Tensors
from prefed.engines.job import PAIRS, Job
from prefed.train.feedback.kind import Scores
from prefed.train.metrics import ChoiceScores, jury_metrics

Score: TypeAlias = Callable[[Tensors], Scores]
"""Model (full layout) → its scores of the pairs of an evaluation."""


def pair_figures(
    job: Job, scores: Scores, weight: float = 1.0, jury: Sequence[Scores] = ()
) -> dict[str, float]:
    """The metrics of a model, depending on the client's kind of feedback.

    Args:
        weight: weight of a reward head's margin, as for ``metrics`` of scores.
        jury: scores of the voting models.
    """
    own = {metric.name: float(metric.function(scores).mean()) for metric in job.metrics}
    return own | scores.metrics(job.beta, weight, jury)


def evaluate_client(
    job: Job, client: str, private: State, published: Download, number: int, score: Score | None = None
) -> dict[str, float]:
    """The metrics of a client's model.

    They are those of the scores of its feedback, such as :class:`~prefed.train.metrics.PairScores`, plus
    ``shared_accuracy`` for a personal method: the preference accuracy of the published model. If the method
    publishes several models, these are the jury.

    Args:
        number: the round after which the client is evaluated.
        score: scores the pairs (default: the client's pairs in the job's split).
    """
    score = score or own_pairs(job, client, job.evaluate.split)
    model = job.client_model(client, private, published, number)
    if job.jury:
        models = job.shared_models(published).values()
        jury = [(each, score(each)) for each in models]
        # The client's own model is usually one of them.
        own = next((scores for each, scores in jury if each.equal(model)), None)
        return pair_figures(job, own or score(model), jury=[scores for _, scores in jury])
    figures = pair_figures(job, score(model), job.method.reward_weight(private, number))
    if job.method.personal:
        shared = pair_figures(job, score(job.shared(published)))
        figures["shared_accuracy"] = shared["preference_accuracy"]
    return figures


def evaluate_newcomer(job: Job, client: str, published: Download, number: int) -> dict[str, float]:
    """Preference accuracy of an unseen client by number of local steps or of context pairs.

    If several models are published, the :func:`~prefed.train.metrics.jury_metrics` of these are added.

    Before the first local step, or without training pairs, the client uses the published model, because
    randomly initialised personal tensors would only add noise. Of several published models the method chooses
    one.
    """
    method, score = job.method, own_pairs(job, client, job.evaluate.split)
    accuracies: dict[str, float] = {}
    trainer = job.trainer(client, number, "predict")
    for name, count in job.newcomer_figures.items():
        if method.infer is not None and name.startswith(PAIRS):
            model = method.infer(trainer, published, count)
        elif method.adapt is not None and count and trainer.size:
            model = method.adapt(trainer, published, count)
        elif method.newcomer is not None:
            model = method.newcomer(trainer, published)
        else:
            model = job.shared(published)
        accuracies[name] = pair_figures(job, score(model))["preference_accuracy"]
    if job.jury:
        jury = [cast("ChoiceScores", score(each)) for each in job.shared_models(published).values()]
        accuracies |= jury_metrics(jury)
    return accuracies


def own_pairs(job: Job, client: str, split: Literal["validation", "test"]) -> Score:
    """A function that scores a client's pairs of a split."""
    return lambda tensors: job.trainers.score(client, tensors, split)
