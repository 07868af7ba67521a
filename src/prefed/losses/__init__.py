"""Objectives as pure functions of log-probabilities: DPO and its variants, PDPO, SFT, PPO."""

from prefed.losses.batch import Batch, Losses, pair_figures
from prefed.losses.kto import kto_pair
from prefed.losses.logistic import cdpo, dpo, odpo, robust
from prefed.losses.margin import hinge, ipo
from prefed.losses.pdpo import pdpo
from prefed.losses.reference_free import orpo, simpo
from prefed.losses.registry import OBJECTIVES, PPO, Loss, objective, recipe
from prefed.losses.sft import sft
from prefed.losses.spec import ObjectiveSpec

__all__ = [
    "OBJECTIVES",
    "PPO",
    "Batch",
    "Loss",
    "Losses",
    "ObjectiveSpec",
    "cdpo",
    "dpo",
    "hinge",
    "ipo",
    "kto_pair",
    "objective",
    "odpo",
    "orpo",
    "pair_figures",
    "pdpo",
    "recipe",
    "robust",
    "sft",
    "simpo",
]
