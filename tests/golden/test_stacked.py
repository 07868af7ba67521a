"""Visits of several clients that share passes, next to the same visits one by one."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch
from tests.small_models import Pairs, away, backbone, float64

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase, PhaseResult, Tensors
from prefed.models import ModelError, stacked_lora
from prefed.train import PairTrainer
from prefed.train.lockstep import Lockstep
from waiting import WATCHDOG

DPO, ADAM = Objective("dpo", {"beta": 0.3}), Optimizer("adamw", lr=0.01)
CLIENTS = {"a": np.arange(5), "b": np.arange(5, 7), "c": np.arange(7, 12)}
"""The rows of each client: two batches of three, one of two, and again two."""


class Visits:
    """A trainer, and a phase of each client from tensors of its own."""

    def __init__(self, model, objective=DPO, optimizer=ADAM, epochs=1, **changes) -> None:
        self.trainer = PairTrainer(model, Pairs(12), **changes)
        self.parts = Ownership.of(model.layout, lambda entry: Owner.SHARED)
        names = self.parts.names(Owner.SHARED)
        self.phase = Phase("train", names, objective, optimizer, 3, epochs=epochs)
        self.starts = {c: away(model.layout, model.initial, seed=n) for n, c in enumerate(CLIENTS)}

    def visit(self, client: str) -> PhaseResult:
        key = Key(1).at("client", client)
        return self.trainer.visit(CLIENTS[client], key, self.parts).train(self.starts[client], self.phase)

    def alone(self) -> list[PhaseResult]:
        return [self.visit(client) for client in CLIENTS]

    def together(self) -> tuple[list[PhaseResult], dict[str, int]]:
        lockstep = Lockstep(self.trainer, len(CLIENTS))
        return lockstep.run([partial(self.visit, client) for client in CLIENTS]), lockstep.figures()[
            "stacked_steps"
        ]


def steps(visits: Visits, results: list[PhaseResult]) -> list[Tensors]:
    """How far each client went."""
    starts = visits.starts.values()
    return [result.tensors - start for result, start in zip(results, starts, strict=True)]


@pytest.mark.sample
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "objective", [DPO, Objective("rpo"), Objective("sft")], ids=lambda objective: objective.name
)
@float64()
def test_gradients_equal_those_of_one_client_in_float64(family: str, objective: Objective) -> None:
    """SGD with rate 1 goes as far as the gradient. Other clients' rows change only how products are blocked,
    so the steps of every client agree to 1e-12 of their norm once all that is fp32 is computed in float64."""
    visits = Visits(backbone(family), objective, Optimizer("sgd", lr=1.0, clip=0.0))
    alone, (together, counts) = visits.alone(), visits.together()
    assert counts == {"together": 5, "alone": 0}
    for ours, theirs in zip(steps(visits, together), steps(visits, alone), strict=True):
        assert ours.dtype == torch.float64
        assert (ours - theirs).norm() < 1e-12 * theirs.norm()


@float64()
def test_losses_dropout_and_metrics_are_the_clients_own() -> None:
    """With dropout 0.5 another mask would change a loss by far more than rounding does, here in float64."""
    visits = Visits(backbone(dropout=0.5), epochs=2)
    alone, (together, counts) = visits.alone(), visits.together()
    assert counts == {"together": 10, "alone": 0}
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.steps, ours.pairs) == (theirs.steps, theirs.pairs)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-7)
        assert ours.figures == pytest.approx(theirs.figures, rel=1e-6)
    for ours, theirs in zip(steps(visits, together), steps(visits, alone), strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_a_client_that_diverges_leaves_the_others_as_they_are() -> None:
    """Client a starts with an infinite factor, so that its rows become NaN in every layer."""
    visits = Visits(backbone())
    name = next(iter(visits.starts["a"]))
    visits.starts["a"][name].fill_(torch.inf)
    alone, (together, _) = visits.alone(), visits.together()
    assert not together[0].tensors.isfinite()
    for ours, theirs in zip(together[1:], alone[1:], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert (ours.tensors - theirs.tensors).norm() < 1e-5 * theirs.tensors.norm()


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs PyTorch's grouped product")
def test_the_grouped_product_of_a_gpu_equals_the_products_of_a_cpu(monkeypatch) -> None:
    """Rank 4 and widths of 32 and more are rows of 16 bytes in fp32, as the kernel requires."""
    visits = Visits(backbone("llama", rank=4))
    want, _ = visits.together()
    monkeypatch.setattr(stacked_lora, "_one_kernel", lambda x, matrices: True)
    got, _ = visits.together()
    for ours, theirs in zip(steps(visits, got), steps(visits, want), strict=True):
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()


def test_what_cannot_share_a_pass_runs_alone() -> None:
    """Batches of more tokens than a pass may have are split, and recomputed blocks draw dropout twice."""
    split = Visits(backbone(), max_tokens=20)
    (together, counts), alone = split.together(), split.alone()
    assert counts == {"together": 0, "alone": 5}
    assert all(torch.equal(a.tensors.flat, b.tensors.flat) for a, b in zip(together, alone, strict=True))
    recomputed = Visits(backbone(dropout=0.5, checkpointing=True)).together()[1]
    assert recomputed == {"together": 0, "alone": 5}


def test_clients_that_do_not_fit_in_one_pass_form_several() -> None:
    """Two of three clients fit in a pass, so the third is alone in its own."""
    visits = Visits(backbone())
    lengths = visits.trainer.model.tokens.lengths.sum(1)
    # The tokens of the longest of all batches, twice: no order of pairs makes three fit.
    most = 2 * int(max(np.sort(lengths[rows])[-3:].sum() for rows in CLIENTS.values()))
    counts = Visits(backbone(), max_tokens=most).together()[1]
    assert sum(counts.values()) == 5
    assert counts["together"] >= 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"needs": frozenset({"lora", "reward"})}, r"more than their LoRA \(reward\)"),
        ({"fast": False}, "plain"),
    ],
)
def test_models_whose_clients_cannot_share_a_pass_are_refused(settings, reason) -> None:
    """The message names the key."""
    fast = settings.get("fast", True)
    trainer = PairTrainer(backbone("gpt2", **settings), Pairs(3), fast=fast)
    with pytest.raises(ModelError, match=rf"\[engine\] stack = 2 .*{reason}"):
        Lockstep(trainer, 2)


def test_an_error_in_a_visit_ends_all_of_them() -> None:
    """The caller gets the error itself, and the threads of waiting visits end."""
    visits, before = Visits(backbone()), threading.active_count()

    def fails() -> PhaseResult:
        raise KeyError("no such group")

    with pytest.raises(KeyError, match="no such group"):
        Lockstep(visits.trainer, 3).run([partial(visits.visit, "a"), fails, partial(visits.visit, "b")])
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon and "_run" in thread.name:
            thread.join(WATCHDOG)
    assert threading.active_count() == before
