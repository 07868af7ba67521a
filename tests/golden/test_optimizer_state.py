"""Optimisers that are kept from visit to visit."""

from __future__ import annotations

import numpy as np
import pytest
from tests.small_models import Pairs, backbone

from prefed.core import Download, Key, Round, State, Tensors
from prefed.merge import MergeConfig, Merger
from prefed.methods import METHODS
from prefed.train import Bench
from prefed.train.desk import Desk

PAIRS = Pairs(6)


def visits(steps: list[int], **settings: object) -> tuple[Tensors, State]:
    """A client that is visited again and again, finding each time the model that it sent: what it sends in
    the end, and what it keeps. A step takes all of its pairs."""
    model = backbone()
    bench = Bench(model, PAIRS)
    kind = METHODS["feddpo"]
    received, private = model.initial, State()
    for count in steps:
        chosen = kind.Settings(lr=1e-2, batch_size=6, local_steps=count, weight_decay=0.0, **settings)
        merger = Merger(MergeConfig(), model.layout, 2.0)
        method = kind.build(chosen, model.layout, merger, 3)
        (exchange,) = method.exchanges
        rows = np.arange(6)
        desk = Desk(bench, "a", rows, rows, Round(1, 3, Key(0), {"a": 6.0}), Key(1), method.parts)
        upload, private = exchange.work(desk, private, Download({"model": received}))
        received = upload.tensors["model"]
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
