"""Train and score client tensors on preference pairs. Every fast path has a plain counterpart."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.train.packed import Packing
    from prefed.train.pair_trainer import ClientPairTrainer, PairTrainerFactory
    from prefed.train.trainers import PairTrainer

__all__ = ["ClientPairTrainer", "Packing", "PairTrainer", "PairTrainerFactory"]

attach(__name__, __file__)
