"""Optimisers that are kept from visit to visit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.small_models import Pairs, backbone

from prefed.core import Download, Entry, Key, Layout, Round, State, Tensors
from prefed.core.wire import decode_state, encode
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.train import ClientPairTrainer, PairTrainer

PAIRS = Pairs(6)


def visits(steps: list[int], rule: str = "fedit", **settings: object) -> tuple[Tensors, State]:
    """The model that a client sends after its last visit, and its private state. Each visit starts from the
    model that the client sent at the one before. A step takes all of the client's pairs."""
    model = backbone()
    pair_trainer = PairTrainer(model, PAIRS)
    kind = METHODS["feddpo"]
    received, private = model.initial, State()
    for number, count in enumerate(steps, 1):
        chosen = kind.Settings(lr=1e-2, batch_size=6, local_steps=count, weight_decay=0.0, **settings)
        aggregator = Aggregator(MergeConfig(lora=rule), model.layout, 2.0)
        method = kind.build(chosen, model.layout, aggregator, 3)
        (exchange,) = method.exchanges
        rows = np.arange(6)
        trainer = ClientPairTrainer(
            rows, Key(1), method.ownership, pair_trainer, "a", rows, Round(number, 9, Key(0), {"a": 6.0})
        )
        upload, private = exchange.work(trainer, private, Download({"model": received}))
        received = received.replace(upload.tensors["model"])
    return received, private


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        ({"optimizer": "adamw"}, {"exp_avg", "exp_avg_sq"}),
        ({"optimizer": "adam"}, {"exp_avg", "exp_avg_sq"}),
        ({"optimizer": "sgd", "momentum": 0.9}, {"momentum_buffer"}),
        ({"optimizer": "rmsprop", "momentum": 0.5}, {"square_avg", "momentum_buffer"}),
    ],
)
def test_two_visits_with_a_kept_optimiser_are_one_visit_of_as_many_steps(
    optimizer: dict[str, object], slots: set[str]
) -> None:
    """Nothing else separates a client's visits when nobody else moves the model; a new optimiser does, for
    its first steps differ from a third and fourth."""
    once, none = visits([4], **optimizer)
    kept, private = visits([2, 2], optimizer_state="kept", **optimizer)
    anew, _ = visits([2, 2], **optimizer)
    start = backbone().initial
    moved = (once - start).norm()
    assert (kept - once).norm() < 1e-4 * moved
    assert (anew - once).norm() > 1e-2 * moved
    assert set(private.tensors) == {f"optimizer.train.{slot}" for slot in slots}
    assert private.values == {"optimizer.train": 4}
    assert none == State()


def test_rolora_has_an_optimiser_for_each_factor() -> None:
    """Visits train B, A, B, A in turn, 1, 2, 3 and 4 steps: two optimisers, of 4 and 6 steps, each of its own
    factor alone."""
    _, private = visits([1, 2, 3, 4], "rolora", optimizer_state="kept")
    assert private.values == {"optimizer.train": 4, "optimizer.train+2": 6}
    factors = {
        name: {tensor.rpartition("/")[2] for tensor in group} for name, group in private.tensors.items()
    }
    assert sorted(factors.values(), key=str) == [{"A"}, {"A"}, {"B"}, {"B"}]
    assert factors["optimizer.train.exp_avg"] != factors["optimizer.train+2.exp_avg"]


def test_what_optimisers_remember_keeps_its_digits() -> None:
    """(1e-4)² = 1e-8 is 0 in 16 bits, and Adam would divide by it; all else is stored as asked."""
    layout = Layout((Entry("lora/0/q/A", (1,), "lora", 0, "A"),))
    small = Tensors(layout, torch.tensor([1e-8]))
    state = State({"optimizer.train.exp_avg_sq": small, "personal": small})
    back = decode_state(encode(state, torch.float16)).tensors
    assert back["optimizer.train.exp_avg_sq"].equal(small)
    assert back["personal"].flat.item() == 0
