"""What an engine asks of the clients' data and of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from prefed.core import ClientTrainer, Key, Ownership, Round, Tensors
from prefed.train.metrics import ChoiceScores, PairScores


class Sizes(Protocol):
    """How many pairs a client holds."""

    @property
    def train(self) -> int:
        """Pairs it trains on."""

    @property
    def validation(self) -> int:
        """Pairs set apart for choosing settings."""

    @property
    def test(self) -> int:
        """Pairs set apart for evaluation."""


class TrainerFactory(Protocol):
    """The clients' data beside a frozen model: one factory in each process, for any number of clients."""

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from (full layout)."""

    @property
    def clients(self) -> Mapping[str, Sizes]:
        """Every client of the federation, and how many pairs it holds."""

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of what numbers depend on: the data and the initial model."""

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientTrainer:
        """A client's turn in a round; the client :data:`POOLED` holds the pairs of all clients."""

    def score(
        self, client: str, tensors: Tensors, split: Literal["validation", "test"]
    ) -> PairScores | ChoiceScores:
        """What a model (full layout) gives to a client's pairs of one split: see ``reads`` of a method."""

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        """Write ``tensors`` (full layout) as an adapter folder that PEFT loads."""
