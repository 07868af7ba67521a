"""Objectives as pure functions of log-probabilities: DPO and its variants, KTO, PDPO, SFT, PPO.

Losses of selectors take log-odds of choices.
"""

from prefed.train.losses.batch import LossOutput, PairBatch, reward_metrics
from prefed.train.losses.preference import (
    ChoiceBatch,
    ThumbBatch,
    cdpo,
    choice,
    dpo,
    hinge,
    ipo,
    kto,
    kto_pair,
    odpo,
    orpo,
    pdpo,
    robust,
    sft,
    simpo,
)
from prefed.train.losses.registry import (
    CHOICE,
    LATENT,
    MIXED,
    OBJECTIVES,
    PPO,
    ObjectiveSpec,
    PairLoss,
    objective,
    reads_thumbs,
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
    "cdpo",
    "choice",
    "dpo",
    "hinge",
    "ipo",
    "kto",
    "kto_pair",
    "objective",
    "odpo",
    "orpo",
    "pdpo",
    "reads_thumbs",
    "reward_metrics",
    "robust",
    "sft",
    "simpo",
]
