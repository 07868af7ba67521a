"""What the factory of trainers refuses, and what it knows without pairs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase, Round
from prefed.data import ClientData, ClientSizes, FederatedDataset, TokenSet
from prefed.data.dataset import RowCounts
from prefed.models import ModelError
from prefed.train import PairTrainer, PairTrainerFactory
from prefed.train.optimizer_steps import batches
from prefed.train.pair_cache import PairScoreCache
from small_models import VOCABULARY, Pair, backbone

CONTEXT = 64


class Tokens:
    """Two short pairs and one of which prompt and rejected response have ``longest`` tokens together."""

    letters = None

    def __init__(self, longest: int, first: int = 1) -> None:
        self.first, self.fingerprint = first, f"{first} tokens"
        self.lengths = np.array([[5, 3, 2], [4, 1, 6], [longest - 4, 2, 4]], np.int32)
        self.margins = np.full(3, np.nan, np.float32)

    def __len__(self) -> int:
        return 3

    def pair(self, row: int) -> Pair:
        return Pair(
            *(np.full(count, (row + self.first) % VOCABULARY, np.int32) for count in self.lengths[row])
        )


def trainers(
    family: str,
    longest: int,
    *test: int,
    validation: Sequence[int] = (),
    first: int = 1,
    cache: Path | None = None,
) -> PairTrainerFactory:
    """A factory whose only client trains on row 0 and is tested on the rows ``test``."""
    client = ClientData("a", np.array([0]), np.array(validation, np.int64), np.array(test, np.int64))
    sizes = {"a": ClientSizes(1, len(validation), len(test))}
    tokens = cast(TokenSet, Tokens(longest, first))
    dataset = FederatedDataset({"a": client}, sizes, tokens, frozenset(), RowCounts(), "data")
    return PairTrainerFactory(backbone(family), dataset, cache=cache)


def test_a_pair_as_long_as_the_context_is_read() -> None:
    """GPT-2 has a vector for each of 64 positions, and 60 + 4 tokens need no more."""
    made = trainers("gpt2", CONTEXT, 1, 2)
    assert np.isfinite(made.score("a", made.initial, "test").policy).all()


def test_a_pair_longer_than_learnt_positions_is_refused() -> None:
    message = (
        r"\[model\] name = 'gpt2': the context is 64 tokens, but the longest prompt with its response has "
        r"65; set \[data\] max_length = 64 or shorten such pairs"
    )
    with pytest.raises(ModelError, match=message):
        trainers("gpt2", CONTEXT + 1, 2)


def test_a_long_pair_that_nobody_holds_does_no_harm() -> None:
    assert len(trainers("gpt2", CONTEXT + 1, 1).clients) == 1


def test_rotary_positions_go_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "prefed"):
        made = trainers("llama", CONTEXT + 1, 2)
    assert "the context is 64 tokens, but the longest prompt with its response has" in caplog.text
    assert np.isfinite(made.score("a", made.initial, "test").policy).all()


def test_sizes_are_known_without_the_pairs() -> None:
    """A run that was passed on without its data: its clients can be listed and given models, not scored."""
    sizes = {"b": ClientSizes(4, 1, 2), "a": ClientSizes(3, 0, 0)}
    made = PairTrainerFactory(backbone("gpt2"), FederatedDataset.without_pairs(sizes))
    assert made.clients == sizes
    assert not made.dataset.has_pairs
    assert trainers("gpt2", CONTEXT, 1).dataset.has_pairs
    for client in sizes:
        with pytest.raises(ValueError, match="no preference pairs"):
            made.score(client, made.initial, "test")
    with pytest.raises(IndexError, match="no row 0: the data has 0 rows, counted from 0"):
        made.dataset.tokens.record(0)


def test_a_loss_is_of_the_pairs_of_its_split() -> None:
    """FedBiscuit groups clients by it. Without validation pairs, it is that of the training pairs."""
    for validation, row in ([1], 1), ([], 0):
        made = trainers("gpt2", CONTEXT, 2, validation=validation)
        ownership = Ownership.of(made.initial.layout, lambda entry: Owner.SHARED)
        client = made.trainer("a", Round(1, 1, Key(0), {"a": 1.0}), Key(0), ownership)
        sft = Objective("sft")
        losses = {split: client.loss(made.initial, sft, split) for split in ("train", "validation")}
        alone = [made.pair_trainer.loss(made.initial, sft, np.array([k])) for k in (0, row)]
        assert list(losses.values()) == alone
        assert (alone[0] == alone[1]) == (row == 0)


@pytest.mark.parametrize("other", [{"family": "llama"}, {"first": 50}], ids=["model", "data"])
def test_runs_that_share_a_folder_share_outputs_of_one_model_and_data_only(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """Another model or other data of the same lengths read nothing of what the first run has stored."""
    options: dict[str, Any] = {"family": "gpt2", **other}
    first = trainers("gpt2", CONTEXT, 1, cache=tmp_path)
    stored = first.score("a", first.initial, "test").reference
    family = options.pop("family")
    shared, alone = (trainers(family, CONTEXT, 1, cache=cache, **options) for cache in (tmp_path, None))
    rows = np.array([1])
    found, expected = (made.pair_trainer.score(made.initial, rows).reference for made in (shared, alone))
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, stored)


def test_pooled_pairs_are_those_of_clients_that_train() -> None:
    made = trainers("gpt2", CONTEXT, 2, validation=[1])
    clients = {"a": made.dataset.clients["a"], "b": ClientData("b", *(np.array([k]) for k in (2, 1, 0)))}
    dataset = replace(made.dataset, clients=clients)
    pooled = [
        PairTrainerFactory(made.backbone, dataset, unseen=unseen)._data("pooled").train.tolist()
        for unseen in ((), ("b",))
    ]
    assert pooled == [[0, 2], [0]]


def test_contexts_are_the_same_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    made, keys = trainers("gpt2", CONTEXT, 1), []
    latent = SimpleNamespace(posteriors=lambda *arguments: keys.append(arguments[3]))
    monkeypatch.setattr(PairTrainer, "scorer", latent)
    ownership = Ownership.of(made.initial.layout, lambda entry: Owner.SHARED)
    for number in (1, 2):
        now = Round(number, 2, Key(5).at("round", number), {"a": 1.0})
        made.trainer("a", now, now.key, ownership).posteriors(made.initial, Objective("latent"))
    assert keys[0] == keys[1] == Key(5).at("contexts").at("client", "a")


def test_scoring_and_training_have_files_of_their_own(tmp_path: Path) -> None:
    """Their groups differ, and so do the last digits of what the reference makes of a pair."""
    made = trainers("gpt2", CONTEXT, 0, cache=tmp_path)
    made.score("a", made.initial, "test")
    references = trainers("gpt2", CONTEXT, 0, cache=tmp_path).pair_trainer.references
    row = np.array([0])
    assert (references.scoring.missing(row), references.training.missing(row)) == (False, True)


def test_numbers_of_another_row_count_as_missing(tmp_path: Path) -> None:
    cache = PairScoreCache(2, tmp_path)
    cache.put(np.arange(2), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    path = tmp_path / "reference.f32"
    path.write_bytes(path.read_bytes()[12:] + path.read_bytes()[:12])
    swapped = PairScoreCache(2, tmp_path)
    assert [swapped.missing(np.array([row])) for row in (0, 1)] == [True, True]


def test_each_epoch_has_its_own_order() -> None:
    """Drawn at the number of the epoch."""
    work = Phase("train", ("a",), Objective("dpo"), Optimizer(), batch_size=10, epochs=2)
    orders = [batch.tolist() for batch in batches(np.arange(10), work, Key(1))]
    assert orders == [Key(1).at("epoch", k).numpy().permutation(10).tolist() for k in (0, 1)]
    assert orders[0] != orders[1]
