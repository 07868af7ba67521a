"""Turning uploads into the next model: means, robust rules, LoRA-aware rules, server optimisers."""

from prefed.merge.aggregator import FIGURES, Aggregator, Weigh
from prefed.merge.alignment import alignment_weights
from prefed.merge.attention import (
    Coefficients,
    distance_attention,
    largest_alpha,
    similarity_attention,
    spread,
)
from prefed.merge.checks import BadUpload, TooFewUploads, check, length, proportion
from prefed.merge.config import LoraRule, MergeConfig, ServerOptimizer, Staleness
from prefed.merge.means import ordered
from prefed.merge.robust import clip_norms, coordinate_median, krum, krum_scores, multi_krum, trimmed_mean

__all__ = [
    "FIGURES",
    "Aggregator",
    "BadUpload",
    "Coefficients",
    "LoraRule",
    "MergeConfig",
    "ServerOptimizer",
    "Staleness",
    "TooFewUploads",
    "Weigh",
    "alignment_weights",
    "check",
    "clip_norms",
    "coordinate_median",
    "distance_attention",
    "krum",
    "krum_scores",
    "largest_alpha",
    "length",
    "multi_krum",
    "ordered",
    "proportion",
    "similarity_attention",
    "spread",
    "trimmed_mean",
]
