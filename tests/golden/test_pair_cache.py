"""The reference's log-probabilities: of the pairs that are needed, once, and the same whoever asks first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.small_models import Pairs, backbone

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase, Tensors
from prefed.train import PairTrainer

PAIRS = Pairs(12)
HELD = np.arange(1, 11)


def phase(parts: Ownership, name: str, **length: int) -> Phase:
    goal = Objective("dpo", {"beta": 0.5})
    return Phase(name, parts.names(Owner.SHARED), goal, Optimizer("sgd", lr=0.1), batch_size=2, **length)


def trained(pair_trainer: PairTrainer, *names: str) -> dict[str, Tensors]:
    """What two steps of two pairs end with, for phases of these names: each has batches of its own."""
    model = pair_trainer.backbone
    parts = Ownership.of(model.layout, lambda entry: Owner.SHARED)
    return {
        name: pair_trainer.train(model.initial, phase(parts, name, steps=2), HELD, Key(3), parts).tensors
        for name in names
    }


def seen(pair_trainer: PairTrainer) -> list[int]:
    """Rows in the order in which they go through the model from here on."""
    rows: list[int] = []
    once, number = pair_trainer.forward, {id(PAIRS.pair(row).prompt): row for row in range(12)}

    def told(pairs, **kwargs):
        rows.extend(number[id(pair.prompt)] for pair in pairs)
        return once(pairs, **kwargs)

    pair_trainer.forward = told  # type: ignore[assignment]
    return rows


def test_a_visit_runs_the_reference_over_the_pairs_it_takes_and_no_others() -> None:
    """Two steps of two pairs out of ten: four pairs, each once by the reference and once in its step; asked
    again, in its step alone."""
    pair_trainer = PairTrainer(backbone(), PAIRS)
    rows = seen(pair_trainer)
    trained(pair_trainer, "a")
    assert len(rows) == 8
    assert sorted(rows[:4]) == sorted(rows[4:])
    assert len(set(rows)) == 4
    again = rows.copy()
    rows.clear()
    trained(pair_trainer, "a")
    assert rows == again[4:]


@pytest.mark.parametrize("alone", [True, False])
def test_whoever_asks_first_gets_the_same_bits(alone: bool) -> None:
    """A pair's block depends on the client's pairs alone: alone on a CPU, the client's groups elsewhere."""

    def pair_trainer() -> PairTrainer:
        made = PairTrainer(backbone(), PAIRS, max_tokens=60)
        made._alone = alone
        return made

    one, other = trained(pair_trainer(), "a", "b", "c"), trained(pair_trainer(), "c", "b", "a")
    for name, tensors in one.items():
        assert tensors.equal(other[name])


def test_a_cache_that_was_left_half_full_gives_the_same_bits(tmp_path: Path) -> None:
    """A run killed after its first visits goes on from what they left on the disk."""
    whole = trained(PairTrainer(backbone(), PAIRS), "a", "b")
    trained(PairTrainer(backbone(), PAIRS, cache=tmp_path), "b")
    rest = trained(PairTrainer(backbone(), PAIRS, cache=tmp_path), "a", "b")
    for name, tensors in whole.items():
        assert tensors.equal(rest[name])


def test_training_leaves_what_scoring_reads_alone() -> None:
    """Scored together, policy and reference are equal to the bit at the start, after training too."""
    pair_trainer = PairTrainer(backbone(), PAIRS)
    trained(pair_trainer, "a")
    scores = pair_trainer.score(pair_trainer.backbone.reference, HELD)
    np.testing.assert_array_equal(scores.policy, scores.reference)


def test_scoring_in_any_order_and_after_a_kill_gives_the_same_bits(tmp_path: Path) -> None:
    """Two clients' splits; a second process computes what the first, killed between them, left out, and no
    pair of a client that nobody asked for goes through."""
    splits = {"a": np.arange(5), "b": np.arange(5, 9)}

    def scored(pair_trainer: PairTrainer, *clients: str) -> dict[str, bytes]:
        start = pair_trainer.backbone.initial
        return {client: pair_trainer.score(start, splits[client]).reference.tobytes() for client in clients}

    whole = scored(PairTrainer(backbone(), PAIRS, max_tokens=40), "a", "b")
    assert scored(PairTrainer(backbone(), PAIRS, max_tokens=40), "b", "a") == whole
    first = PairTrainer(backbone(), PAIRS, max_tokens=40, cache=tmp_path)
    rows = seen(first)
    scored(first, "b")
    assert rows == 2 * splits["b"].tolist()
    second = PairTrainer(backbone(), PAIRS, max_tokens=40, cache=tmp_path)
    rows = seen(second)
    assert scored(second, "a", "b") == whole
    assert rows == 2 * splits["a"].tolist() + splits["b"].tolist()
