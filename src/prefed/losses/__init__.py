"""Objectives as pure functions of log-probabilities: DPO and its variants, PDPO, SFT, PPO.

The loss of selectors reads log-odds of choices.
"""

from prefed.losses.batch import LossOutput, PairBatch, reward_figures
from prefed.losses.choices import ChoiceBatch, choice
from prefed.losses.dpo_family import cdpo, dpo, hinge, ipo, kto_pair, odpo, robust
from prefed.losses.pdpo import pdpo
from prefed.losses.reference_free import orpo, sft, simpo
from prefed.losses.registry import CHOICE, OBJECTIVES, PPO, ObjectiveSpec, PairLoss, objective

__all__ = [
    "CHOICE",
    "OBJECTIVES",
    "PPO",
    "ChoiceBatch",
    "LossOutput",
    "ObjectiveSpec",
    "PairBatch",
    "PairLoss",
    "cdpo",
    "choice",
    "dpo",
    "hinge",
    "ipo",
    "kto_pair",
    "objective",
    "odpo",
    "orpo",
    "pdpo",
    "reward_figures",
    "robust",
    "sft",
    "simpo",
]
