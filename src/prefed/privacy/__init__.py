"""Differential privacy of clients: clipping, noise, and what a run has spent. Needs ``prefed[privacy]``."""

from prefed.privacy.accountant import Guarantee, guarantee_of
from prefed.privacy.mechanism import noised_mean, privatize

__all__ = ["Guarantee", "guarantee_of", "noised_mean", "privatize"]
