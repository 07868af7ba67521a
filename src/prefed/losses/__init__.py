"""Objectives as pure functions of log-probabilities: DPO and its variants, PDPO, SFT, PPO."""

from prefed.losses.batch import LossOutput, PairBatch, reward_figures
from prefed.losses.dpo_family import cdpo, dpo, hinge, ipo, odpo, robust
from prefed.losses.kto import kto_pair
from prefed.losses.pdpo import pdpo
from prefed.losses.reference_free import orpo, simpo
from prefed.losses.registry import OBJECTIVES, PPO, PairLoss, objective
from prefed.losses.sft import sft
from prefed.losses.spec import ObjectiveSpec

__all__ = [
    "OBJECTIVES",
    "PPO",
    "LossOutput",
    "ObjectiveSpec",
    "PairBatch",
    "PairLoss",
    "cdpo",
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
