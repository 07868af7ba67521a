"""Clients of opposite tastes on made texts, and a small selector with a latent taste over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from prefed.core import Key, Owner, Ownership
from prefed.data import Record, SelectorConfig, TokenSet, write_choices
from prefed.models import Backbone, ModelConfig, make_backbone
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
