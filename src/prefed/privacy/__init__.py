"""Differential privacy of clients: clipping, noise, and what a run has spent. Needs ``prefed[privacy]``."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.privacy.accountant import Guarantee, guarantee_of
    from prefed.privacy.clip_and_noise import (
        clipped_steps,
        flat_steps,
        mean_of_sum,
        noised_mean,
        noised_votes,
        privatize,
        vote_noise,
    )
    from prefed.privacy.distributed import Grid, MetricError, MetricSum, VoteSum, source_of

__all__ = [
    "Grid",
    "Guarantee",
    "MetricError",
    "MetricSum",
    "VoteSum",
    "clipped_steps",
    "flat_steps",
    "guarantee_of",
    "mean_of_sum",
    "noised_mean",
    "noised_votes",
    "privatize",
    "source_of",
    "vote_noise",
]

attach(__name__, __file__)
