"""The reference's log-probabilities: computed once, only for needed pairs, and the same in any order."""

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
    """The tensors after two steps of two pairs, for phases of these names; each phase has its own batches."""
    model = pair_trainer.backbone
    parts = Ownership.of(model.layout, lambda entry: Owner.SHARED)
    return {
        name: pair_trainer.visit(HELD, Key(3), parts)
        .train(model.initial, phase(parts, name, steps=2))
        .tensors
        for name in names
    }


def rows_through(pair_trainer: PairTrainer) -> list[int]:
    """A list that records the rows that go through the model, in order."""
    rows: list[int] = []
    forward, number = pair_trainer.model.forward, {id(PAIRS.pair(row).prompt): row for row in range(12)}

    def record(pairs, **kwargs):
        rows.extend(number[id(pair.prompt)] for pair in pairs)
        return forward(pairs, **kwargs)

    pair_trainer.model.forward = record  # type: ignore[assignment]
    return rows


def test_a_visit_runs_the_reference_over_the_pairs_it_takes_and_no_others() -> None:
    """Two steps of two pairs out of ten: each of the four pairs goes through the reference once and through
    its step once. When the phase runs again, each goes through its step only."""
    pair_trainer = PairTrainer(backbone(), PAIRS)
    rows = rows_through(pair_trainer)
    trained(pair_trainer, "a")
    assert len(rows) == 8
    assert sorted(rows[:4]) == sorted(rows[4:])
    assert len(set(rows)) == 4
    again = rows.copy()
    rows.clear()
    trained(pair_trainer, "a")
    assert rows == again[4:]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_whoever_asks_first_gets_the_same_bits(one_by_one: bool) -> None:
    """Only the client's pairs determine the block in which a pair goes through the model, on any device."""

    def make() -> PairTrainer:
        pair_trainer = PairTrainer(backbone(), PAIRS, max_tokens=60)
        pair_trainer.references.one_by_one = one_by_one
        return pair_trainer

    one, other = trained(make(), "a", "b", "c"), trained(make(), "c", "b", "a")
    for name, tensors in one.items():
        assert tensors.equal(other[name])


def test_a_cache_that_was_left_half_full_gives_the_same_bits(tmp_path: Path) -> None:
    """A run that was killed after its first visits continues with their numbers on the disk."""
    whole = trained(PairTrainer(backbone(), PAIRS), "a", "b")
    trained(PairTrainer(backbone(), PAIRS, cache=tmp_path), "b")
    rest = trained(PairTrainer(backbone(), PAIRS, cache=tmp_path), "a", "b")
    for name, tensors in whole.items():
        assert tensors.equal(rest[name])


def test_another_run_may_store_the_same_rows_meanwhile(tmp_path: Path) -> None:
    """Runs of a sweep share the folder: another one stores a visit's rows after this one missed them."""
    whole = trained(PairTrainer(backbone(), PAIRS), "a")
    late = PairTrainer(backbone(), PAIRS, cache=tmp_path)
    cache = late.references.training
    missing, asked = cache.missing, []

    def missing_then_stored(rows: np.ndarray) -> bool:
        asked.append(missing(rows))
        if len(asked) == 1:
            trained(PairTrainer(backbone(), PAIRS, cache=tmp_path), "a")
        return asked[-1]

    cache.missing = missing_then_stored  # type: ignore[method-assign]
    assert trained(late, "a")["a"].equal(whole["a"])
    assert asked[0]
    assert not any(asked[1:])


def test_training_leaves_what_scoring_reads_alone() -> None:
    """At the start, policy and reference are bit-identical, also if training came before scoring."""
    pair_trainer = PairTrainer(backbone(), PAIRS)
    trained(pair_trainer, "a")
    scores = pair_trainer.score(pair_trainer.backbone.reference, HELD)
    np.testing.assert_array_equal(scores.policy, scores.reference)


def test_scoring_in_any_order_and_after_a_kill_gives_the_same_bits(tmp_path: Path) -> None:
    """Two clients' splits, and a first process that is killed between them. The second process computes only
    the missing split. No pair of a client that is not scored goes through the model."""
    splits = {"a": np.arange(5), "b": np.arange(5, 9)}

    def scored(pair_trainer: PairTrainer, *clients: str) -> dict[str, bytes]:
        start = pair_trainer.backbone.initial
        return {client: pair_trainer.score(start, splits[client]).reference.tobytes() for client in clients}

    whole = scored(PairTrainer(backbone(), PAIRS, max_tokens=40), "a", "b")
    assert scored(PairTrainer(backbone(), PAIRS, max_tokens=40), "b", "a") == whole
    first = PairTrainer(backbone(), PAIRS, max_tokens=40, cache=tmp_path)
    rows = rows_through(first)
    scored(first, "b")
    assert rows == 2 * splits["b"].tolist()
    second = PairTrainer(backbone(), PAIRS, max_tokens=40, cache=tmp_path)
    rows = rows_through(second)
    assert scored(second, "a", "b") == whole
    assert rows == 2 * splits["a"].tolist() + splits["b"].tolist()
