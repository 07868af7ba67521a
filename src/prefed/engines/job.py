"""What an engine runs, and the place where a client's work is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import torch

from prefed.core import (
    NO_MINIMUM,
    POOLED,
    ClientTrainer,
    Download,
    Key,
    Method,
    Ownership,
    Privacy,
    Round,
    Tensors,
)
from prefed.metrics import PairScores

__all__ = ["POOLED", "Job", "Sizes", "TrainerFactory"]


class Sizes(Protocol):
    """How many pairs a client holds."""

    @property
    def train(self) -> int:
        """Pairs it trains on."""

    @property
    def validation(self) -> int:
        """Pairs set apart for choosing."""

    @property
    def test(self) -> int:
        """Pairs set apart for judging."""


class TrainerFactory(Protocol):
    """Where clients' data and a frozen model meet: one per process, for any number of clients."""

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from (full layout)."""

    @property
    def clients(self) -> Mapping[str, Sizes]:
        """Every client of the federation."""

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of what numbers depend on: the data and the model's start."""

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientTrainer:
        """A visit to a client, :data:`POOLED` meaning all of them as one."""

    def score(self, client: str, tensors: Tensors, split: Literal["validation", "test"]) -> PairScores:
        """The log-probabilities that a model (full layout) gives to a client's pairs of one split."""

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        """Write ``tensors`` (full layout) as an adapter folder that PEFT loads."""


@dataclass(frozen=True)
class Job:
    """A run, apart from where it runs and where it is kept.

    Attributes:
        trainers: the data and the model.
        method: what is run.
        seed: of every random draw.
        rounds: how many.
        cohort: clients sampled a round, without replacement; ``None`` for all.
        every: rounds from one evaluation to the next; 0 for one after the last round alone.
        split: the pairs that clients are judged on.
        judged: at most so many clients are judged, the same ones each time; ``None`` for all.
        beta: of the DPO loss that evaluations report.
        keep: dtype of clients' private tensors on disk; ``None`` for their own.
        unseen: clients that never train; they are judged apart, as newcomers.
        unseen_steps: numbers of local steps after each of which a newcomer is judged.
        untouched: the tensors (full layout) under which the model is the one that nothing was done to;
            ``None`` where clients start from it.
        privacy: what must not leave a client.

    Raises:
        ValueError: the parts do not cover the model, nobody has a training pair, the cohort is larger
            than the federation, nobody has a pair to be judged on, nobody has enough for a figure that may be
            told, or a client has the name of all clients.
    """

    trainers: TrainerFactory
    method: Method
    seed: int
    rounds: int
    cohort: int | None = None
    every: int = 1
    split: Literal["validation", "test"] = "test"
    judged: int | None = None
    beta: float = 0.1
    keep: torch.dtype | None = None
    unseen: tuple[str, ...] = ()
    unseen_steps: tuple[int, ...] = ()
    untouched: Tensors | None = None
    privacy: Privacy = NO_MINIMUM

    def __post_init__(self) -> None:
        self.method.ownership.check(self.trainers.initial.layout)
        if self.method.pooled and POOLED in self.trainers.clients and len(self.trainers.clients) > 1:
            # Its pairs would be taken for everybody's.
            raise ValueError(
                f"[method] {self.method.name} trains on all clients' pairs as one client named {POOLED!r}, "
                "and a client of the data has that name: rename it"
            )
        if not self.weights:
            raise ValueError("no client has a training pair")
        if self.cohort is not None and not self.method.pooled and self.cohort > len(self.members):
            raise ValueError(
                f"[cohort] size = {self.cohort}, but only {len(self.members)} clients have training pairs"
            )
        strangers = [client for client in self.unseen if client not in self.trainers.clients]
        if strangers:
            raise ValueError(f"[evaluate] unseen: there is no client {strangers[0]!r}")
        if not self.judges:
            raise ValueError(
                f"no client has a pair in its {self.split} split: nothing to evaluate on; set "
                f"data.{self.split}_fraction or data.{self.split}, or another evaluate.split"
            )
        if self.privacy.minimum_pairs:
            self._tell(self.judges, "client")
            self._tell(self.newcomers, "newcomer")

    def _tell(self, judged: tuple[str, ...], what: str) -> None:
        """Refuse clients of whom none has pairs enough for a figure of its own."""
        most = max((getattr(self.trainers.clients[client], self.split) for client in judged), default=None)
        if most is not None and not self.privacy.may_report(most):
            raise ValueError(
                f"[privacy] minimum_pairs = {self.privacy.minimum_pairs}: no {what} is judged on so many "
                f"{self.split} pairs (the most are {most}), and no figure could be told; lower it, or set "
                f"more pairs apart (data.{self.split}_fraction or data.{self.split})"
            )

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """Member → number of training pairs n_i."""
        sizes = {
            client: float(size.train)
            for client, size in self.trainers.clients.items()
            if size.train and client not in self.unseen
        }
        if self.method.pooled and len(sizes) > 1:
            return {POOLED: sum(sizes.values())}
        return {client: sizes[client] for client in sorted(sizes)}

    @property
    def members(self) -> tuple[str, ...]:
        """The clients that train, sorted."""
        return tuple(self.weights)

    @property
    def asked(self) -> int:
        """How many members a round's cohort has."""
        return len(self.members) if self.cohort is None or self.method.pooled else self.cohort

    @cached_property
    def judges(self) -> tuple[str, ...]:
        """The clients that evaluations ask, sorted: those that have pairs in the split."""
        able = [client for client in self._able if client not in self.unseen]
        if self.judged is None or self.judged >= len(able):
            return tuple(able)
        draw = Key(self.seed).at("judges").numpy().choice(len(able), self.judged, replace=False)
        return tuple(able[index] for index in sorted(draw))

    @property
    def _able(self) -> list[str]:
        clients = self.trainers.clients
        return [client for client in sorted(clients) if getattr(clients[client], self.split)]

    @cached_property
    def newcomers(self) -> tuple[str, ...]:
        """The unseen clients that have pairs in the split, sorted."""
        return tuple(client for client in self._able if client in self.unseen)

    def shared(self, published: Download) -> Tensors:
        """The model (full layout) that was published, with nothing of any client's own.

        Where nothing was published the model is the untouched one: what personal parts start from, such as
        a small random LoRA, is no part of a shared model.
        """
        whole = self.trainers.initial if self.untouched is None else self.untouched
        for group in published.tensors.values():
            whole = whole.replace(group)
        return whole

    def round(self, number: int) -> Round:
        """Round ``number``, 1 for the first."""
        return Round(number, self.rounds, Key(self.seed).at("round", number), self.weights, self.privacy)

    def sample(self, now: Round) -> tuple[str, ...]:
        """The round's cohort, sorted: a function of the seed and the round alone."""
        draw = now.key.at("cohort").numpy().choice(len(self.members), self.asked, replace=False)
        return tuple(self.members[index] for index in sorted(draw))
