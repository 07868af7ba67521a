"""Clients of opposite tastes on made texts, and a small selector with a latent taste over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from prefed.core import (
    NO_MINIMUM,
    Key,
    Method,
    Objective,
    Optimizer,
    Owner,
    Ownership,
    Phase,
    Privacy,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.core.wire import decode_state, encode
from prefed.data import Record, SelectorConfig, TokenSet, write_choices
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.models import Backbone, ModelConfig, make_backbone
from prefed.train import ClientPairTrainer, PairTrainer
from preferences import tokenizer

LATENT = frozenset({"variational", "posterior", "latent"})
ALL = LATENT | {"prototypes", "cap"}
SMALL = {"latent": 4, "widths": (16, 8), "prototypes": 2, "scale": 2.0, "dropout": 0.0}


def record(number: int, warm: bool, *, client: str | None = None) -> Record:
    """A prompt with a warm and a cold answer; ``warm`` is preferred, or cold."""
    answers = [f" so nice {number % 7}!", f" no {number % 5}."]
    return Record(f"Q{number}?", *(answers if warm else answers[::-1]), client=client)


def token_set(folder: Path, tastes: list[bool]) -> TokenSet:
    """One pair for each entry of ``tastes``; row k has number k."""
    pairs = [record(number, warm) for number, warm in enumerate(tastes)]
    return write_choices(folder, tokenizer(), SelectorConfig(), pairs, 160)


def backbone(needs: frozenset[str] = LATENT, *, fast: bool = True, **variational: Any) -> Backbone:
    """A random GPT-2 of two blocks that reads bytes; the same weights every time."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=261, n_positions=160, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    settings = {
        "name": "gpt2",
        "fast": fast,
        "device": "cpu",
        "lora": {"rank": 2, "alpha": 4.0, "dropout": 0.0},
        "variational": {**SMALL, **variational},
    }
    return make_backbone(model, tokenizer(), ModelConfig.model_validate(settings), Key(1), needs)


def ownership(model: Backbone) -> Ownership:
    """All is shared but z, which is filled in."""
    return Ownership.of(model.layout, lambda e: Owner.FROZEN if e.part == "latent" else Owner.SHARED)


def trained(model: Backbone) -> tuple[str, ...]:
    """What a phase trains."""
    return tuple(e.name for e in model.layout.entries if e.part in ("variational", "prototypes", "lora"))


ROWS = np.arange(40)
"""The pairs of :func:`half`."""


def half(folder: Path) -> TokenSet:
    """Forty pairs: warm is chosen in the first twenty, cold in the others."""
    return token_set(folder, [row < 20 for row in range(40)])


def taught(trainer: PairTrainer) -> Tensors:
    """One selector trained by two clients of opposite taste in turn, 24 visits of four steps each."""
    model, tensors = trainer.backbone, trainer.backbone.initial
    phase = Phase(
        "train",
        trained(model),
        Objective("latent", {"beta": 0.01}),
        Optimizer("adamw", lr=1e-2, clip=0.0),
        batch_size=6,
        steps=4,
    )
    for visit in range(24):
        for number, rows in enumerate((ROWS[:14], ROWS[20:34])):
            key = Key(visit).at("client", number)
            tensors = trainer.visit(rows, key, ownership(model)).train(tensors, phase).tensors
    return tensors


TRAIN = {"a": ROWS[:14], "b": ROWS[20:34], "c": ROWS[2:12], "d": ROWS[22:32]}
"""Clients a and c like it warm, b and d cold."""
WEIGHTS = {client: float(len(rows)) for client, rows in TRAIN.items()}
TESTS = {"a": ROWS[14:20], "b": ROWS[34:], "c": ROWS[14:20], "d": ROWS[34:]}


@dataclass
class Federation:
    """Four clients over one small model, and the plainest engine. ``rounds`` are those that it has run."""

    name: str
    settings: dict[str, Any]
    tokens: TokenSet
    total: int = 3
    privacy: Privacy = NO_MINIMUM
    seed: int = 5
    merge: MergeConfig = field(default_factory=MergeConfig)
    uploads: list[Upload] = field(default_factory=list)
    rounds: int = 0

    def __post_init__(self) -> None:
        kind = METHODS[self.name]
        common = {"lr": 5e-3, "local_steps": 2, "batch_size": 8}
        chosen = kind.Settings(**{**common, **self.settings})
        self.model = backbone(kind.needs(chosen))
        self.trainer = PairTrainer(self.model, self.tokens)
        layout = self.model.layout
        self.method: Method = kind.build(chosen, layout, Aggregator(self.merge, layout, 2.0), self.total)
        self.server = self.method.init_server(self.model.initial)
        self.private = {client: self.method.init_client(self.model.initial, client) for client in TRAIN}

    def now(self, number: int) -> Round:
        return Round(number, self.total, Key(self.seed).at("round", number), WEIGHTS, self.privacy)

    def client(self, client: str, number: int, rows: Any = None) -> ClientPairTrainer:
        """A client's turn; ``rows`` in place of its training pairs."""
        now, own = self.now(number), TRAIN.get(client) if rows is None else rows
        key = now.key.at("client", client)
        return ClientPairTrainer(own, key, self.method.ownership, self.trainer, client, ROWS[:0], now)

    def run(self, rounds: int, cohorts: Sequence[str] = ("abcd",), backwards: bool = False) -> Federation:
        """Go on to the end of round ``rounds``; the cohorts take turns."""
        (exchange,) = self.method.exchanges
        for number in range(self.rounds + 1, rounds + 1):
            uploads = []
            for client in sorted(cohorts[(number - 1) % len(cohorts)], reverse=backwards):
                download = exchange.send(self.server, client, self.now(number))
                trainer = self.client(client, number)
                upload, self.private[client] = exchange.work(trainer, self.private[client], download)
                uploads.append(upload)
            self.server, _ = exchange.merge(self.server, uploads, self.now(number))
            self.uploads += uploads
        self.rounds = rounds
        return self

    def predict(self, client: str) -> Tensors:
        """The model with which a client judges."""
        published = self.method.publish(self.server, client)
        return self.method.predict(self.client(client, self.rounds), self.private[client], published)

    def accuracy(self, model: Tensors, rows: Any) -> float:
        return float((self.trainer.score(model, rows).orders.mean(1) > 0).mean())


def copied(state: State) -> State:
    """A state after its trip through bytes."""
    return decode_state(encode(state))
