"""Merge uploads into the next model: means, robust rules, LoRA rules and server optimisers."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.merge.aggregator import Aggregator, WeightFunction
    from prefed.merge.attention import (
        alignment_weights,
        distance_attention,
        largest_alpha,
        mean_squared_distance,
        similarity_attention,
    )
    from prefed.merge.config import LoraRule, MergeConfig, ServerOptimizer, Staleness
    from prefed.merge.groups import by_mass, merge_groups
    from prefed.merge.oversized_updates import check_update_sizes, update_norm
    from prefed.merge.uploads import BadUpload, TooFewUploads, check_upload, from_newest, sort_uploads

__all__ = [
    "Aggregator",
    "BadUpload",
    "LoraRule",
    "MergeConfig",
    "ServerOptimizer",
    "Staleness",
    "TooFewUploads",
    "WeightFunction",
    "alignment_weights",
    "by_mass",
    "check_update_sizes",
    "check_upload",
    "distance_attention",
    "from_newest",
    "largest_alpha",
    "mean_squared_distance",
    "merge_groups",
    "similarity_attention",
    "sort_uploads",
    "update_norm",
]

attach(__name__, __file__)
