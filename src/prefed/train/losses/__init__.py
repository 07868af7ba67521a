"""Objectives: losses on pairs, thumbs and choices as pure functions of a model's outputs, and others."""

from prefed.train.feedback.choices import ChoiceBatch, choice
from prefed.train.feedback.kind import LossOutput
from prefed.train.feedback.pairs import PairBatch, reward_metrics
from prefed.train.feedback.thumbs import ThumbBatch
from prefed.train.losses.registry import (
    CHOICE,
    LATENT,
    MIXED,
    OBJECTIVES,
    PPO,
    ObjectiveSpec,
    PairLoss,
    check_feedback,
    feedback_of,
    find_objective,
    objective,
)

__all__ = [
    "CHOICE",
    "LATENT",
    "MIXED",
    "OBJECTIVES",
    "PPO",
    "ChoiceBatch",
    "LossOutput",
    "ObjectiveSpec",
    "PairBatch",
    "PairLoss",
    "ThumbBatch",
    "check_feedback",
    "choice",
    "feedback_of",
    "find_objective",
    "objective",
    "reward_metrics",
]
