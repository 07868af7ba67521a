"""The bench: loads a client's tensors, runs its phases fast, scores its pairs."""

from prefed.train.client_trainer import ClientPairTrainer
from prefed.train.packing import Packing, PairTokens
from prefed.train.pair_trainer import PairStore, PairTrainer, Scores
from prefed.train.trainer_factory import PairTrainerFactory

__all__ = [
    "ClientPairTrainer",
    "Packing",
    "PairStore",
    "PairTokens",
    "PairTrainer",
    "PairTrainerFactory",
    "Scores",
]
