"""What a place of work refuses before anyone visits it."""

from __future__ import annotations

import logging
from typing import cast

import numpy as np
import pytest

from prefed.data import ClientData, FederatedDataset, TokenSet
from prefed.data.dataset import Report
from prefed.models import ModelError
from prefed.train import PairTrainerFactory
from small_models import VOCABULARY, Pair, backbone

CONTEXT = 64


class Tokens:
    """Two short pairs and one of which prompt and rejected response have ``longest`` tokens together."""

    fingerprint = "tokens"

    def __init__(self, longest: int) -> None:
        self.lengths = np.array([[5, 3, 2], [4, 1, 6], [longest - 4, 2, 4]], np.int32)
        self.margins = np.full(3, np.nan, np.float32)

    def __len__(self) -> int:
        return 3

    def pair(self, row: int) -> Pair:
        return Pair(*(np.full(count, row % VOCABULARY + 1, np.int32) for count in self.lengths[row]))


def place(family: str, longest: int, *held: int) -> PairTrainerFactory:
    """A place whose only client tests on the rows ``held`` and trains on row 0."""
    nothing = np.zeros(0, np.int64)
    client = ClientData("a", np.array([0]), nothing, np.array(held, np.int64))
    federation = FederatedDataset(
        {"a": client}, cast(TokenSet, Tokens(longest)), frozenset(), Report(), "federation"
    )
    return PairTrainerFactory(backbone(family), federation)


def test_a_pair_as_long_as_the_context_is_read() -> None:
    """GPT-2 has a vector for each of 64 positions, and 60 + 4 tokens need no more."""
    made = place("gpt2", CONTEXT, 1, 2)
    assert np.isfinite(made.score("a", made.initial, "test").policy).all()


def test_a_pair_longer_than_learnt_positions_is_refused() -> None:
    message = (
        r"\[model\] name = 'gpt2' has a context of 64 tokens, .* has 65: set "
        r"\[data\] max_length = 64"
    )
    with pytest.raises(ModelError, match=message):
        place("gpt2", CONTEXT + 1, 2)


def test_a_long_pair_that_nobody_holds_does_no_harm() -> None:
    assert len(place("gpt2", CONTEXT + 1, 1).clients) == 1


def test_rotary_positions_go_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "prefed"):
        made = place("llama", CONTEXT + 1, 2)
    assert "context of 64 tokens" in caplog.text
    assert np.isfinite(made.score("a", made.initial, "test").policy).all()
