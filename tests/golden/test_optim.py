"""The optimiser over the flat buffer against autograd of the whole loss and torch's own optimisers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from tests.small_models import Pairs, away, backbone

from prefed.core import (
    Entry,
    Key,
    Layout,
    Objective,
    Optimizer,
    Owner,
    Ownership,
    Penalty,
    Phase,
    Proximal,
    Tensors,
)
from prefed.testing import initial
from prefed.train import PairTrainer
from prefed.train.optimizer_steps import FlatOptimizer
from prefed.train.padded import PaddedForward

KINDS = get_args(get_type_hints(Penalty)["kind"])
WRITTEN = {
    "l1": lambda value: value.abs().sum(),
    "l2": lambda value: value.square().sum(),
    "gate": lambda value: value.sigmoid().sum(),
}
"""The penalties as core writes them: Σ|t|, ‖t‖² and Σ sigmoid(t)."""

START = away(
    initial(("lora", "personal_lora", "gate")).layout, initial(("lora", "personal_lora", "gate")), scale=0.7
)
LAYOUT = START.layout
HELD = ("lora/0/q/B", "personal_lora/1/q/A")
"""Not trained, and in the middle of the buffer: what moves lies in three pieces."""
MOVES = tuple(name for name in LAYOUT.names if name not in HELD)

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1.0, betas=(0.7, 0.95), weight_decay=0.2),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1.0, betas=(0.7, 0.95), weight_decay=0.2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.6, weight_decay=0.2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1.0, momentum=0.6, weight_decay=0.2),
}


def noise(seed: int) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return Tensors(LAYOUT, torch.randn(LAYOUT.size, dtype=torch.float64, generator=draw))


TARGETS, PULL, CORRECTION = (noise(seed) for seed in (10, 11, 12))


def stretch(train=MOVES, **changes) -> Phase:
    """A phase with everything on: two rates, a pull and a correction that also name what is held."""
    settings = {
        "name": "test",
        "train": tuple(train),
        "objective": Objective("dpo"),
        "optimizer": Optimizer("sgd", lr=0.05),
        "batch_size": 1,
        "steps": 3,
    }
    return Phase(**{**settings, **changes})


def burdens(layout: Layout = LAYOUT) -> dict[str, object]:
    shared = [entry.name for entry in layout.entries if entry.part == "lora"]
    own = tuple(entry.name for entry in layout.entries if entry.part == "personal_lora")
    gates = tuple(entry.name for entry in layout.entries if entry.part == "gate")
    which = {"l1": tuple(shared), "l2": own, "gate": gates}
    return {
        "proximal": Proximal(0.3, PULL.select(shared)),
        "correction": CORRECTION.select(shared),
        "penalties": tuple(Penalty(kind, 0.4, which[kind]) for kind in KINDS),
        "rates": dict.fromkeys(gates, 0.2),
    }


def buffer(start: Tensors) -> SimpleNamespace:
    """Of a backbone, what the optimiser looks at."""
    flat = start.flat.clone()
    return SimpleNamespace(
        layout=start.layout, flat=flat, grad=torch.zeros_like(flat), device=torch.device("cpu")
    )


def ours(phase: Phase, start: Tensors = START) -> tuple[Tensors, list[float]]:
    """Steps on ½ ‖φ − TARGETS‖², whose gradient is zero where the phase holds, as after ``train_only``."""
    at = buffer(start)
    optimizer, norms = FlatOptimizer(at, phase), []
    for _ in range(phase.steps):
        at.grad.zero_()
        for start_at, stop in start.layout.ranges(phase.train):
            at.grad[start_at:stop] = (at.flat - TARGETS.flat)[start_at:stop]
        optimizer.add()
        norms.append(optimizer.step())
    return Tensors(start.layout, at.flat), norms


def written(phase: Phase, value: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a phase adds to the data's loss, for autograd; ``value`` are the tensors that move."""
    total = torch.zeros((), dtype=next(iter(value.values())).dtype)
    if phase.proximal is not None:
        for name in phase.proximal.to.keys() & value.keys():
            total = (
                total + phase.proximal.strength / 2 * (value[name] - phase.proximal.to[name]).square().sum()
            )
    for penalty in phase.penalties:
        for name in set(penalty.names) & value.keys():
            total = total + penalty.strength * WRITTEN[penalty.kind](value[name])
    return total


def twin(phase: Phase, data, start: Tensors) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The phase on one leaf a tensor: autograd of the whole loss, the correction added to the gradient,
    torch's clip over all of them, torch's optimiser. ``data`` gives the data's loss of the leaves."""
    value = {name: torch.nn.Parameter(start[name].clone()) for name in phase.train}
    groups = [{"params": [leaf], "lr": phase.rates.get(n, phase.optimizer.lr)} for n, leaf in value.items()]
    optimizer, norms = OPTIMIZERS[phase.optimizer.name](groups), []
    for _ in range(phase.steps):
        optimizer.zero_grad()
        (data(value) + written(phase, value)).backward()
        for name in (phase.correction or {}).keys() & value.keys():
            value[name].grad += phase.correction[name]
        most = phase.optimizer.clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(value.values()), most)))
        optimizer.step()
    return {name: leaf.detach() for name, leaf in value.items()}, norms


def near_targets(value: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(0.5 * (leaf - TARGETS[name]).square().sum() for name, leaf in value.items())


@pytest.mark.sample
@pytest.mark.parametrize("clip", [0.0, 0.3, 1e3], ids=["no-clip", "clip-bites", "clip-idle"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_three_steps_equal_one_tensor_at_a_time(name: str, clip: float) -> None:
    """Three steps with two learning rates, decay, momentum or betas, a pull, a correction and every penalty,
    over a buffer in pieces: in fp64 the tensors are those of torch's optimiser with a leaf for each tensor
    under the gradient of

        ½ ‖φ − a‖² + μ/2 ‖φ − φ_g‖² + λ_k Σ_k penalty_k(φ),  plus c − c_i,

    clipped over all the leaves as one vector. The norms that come back are those before the clip: all
    above 0.3 and below 1000, so that one clip acts in every step and the other in none."""
    how = Optimizer(name, lr=0.05, betas=(0.7, 0.95), momentum=0.6, weight_decay=0.2, clip=clip)
    phase = stretch(optimizer=how, **burdens())
    got, norms = ours(phase)
    want, expected = twin(phase, near_targets, START)
    assert norms == pytest.approx(expected, rel=1e-9)
    assert all(0.3 < norm < 1e3 for norm in norms)
    for tensor, value in want.items():
        # A clip divides by the norm + 1e-6 in both; the sums' order leaves the last digits.
        torch.testing.assert_close(got[tensor], value, rtol=1e-8, atol=1e-10)
        assert not torch.equal(value, START[tensor])
    for tensor in HELD:
        assert torch.equal(got[tensor], START[tensor])


@pytest.mark.parametrize("kind", KINDS)
def test_slope_of_a_penalty(kind: str) -> None:
    """One SGD step of rate 1 on a penalty of strength ½ alone, from t = (2, 0, −2, ln 3):
    ½ Σ|t| moves t by −½ sign(t), ½ ‖t‖² by −t, and ½ Σ σ(t) by −½ σ(t) σ(−t), which is 1/8 at 0 and
    3/32 at ln 3 (σ = ¾)."""
    layout = Layout((Entry("t", (4,), "gate"),))
    third = torch.tensor(3.0, dtype=torch.float64).log()
    start = torch.tensor([2.0, 0.0, -2.0, float(third)], dtype=torch.float64)
    flank = float(torch.tensor(2.0, dtype=torch.float64).sigmoid())
    flank *= 0.5 * (1 - flank)
    moves = {
        "l1": torch.tensor([0.5, 0.0, -0.5, 0.5]),
        "l2": start.clone(),
        "gate": torch.tensor([flank, 1 / 8, flank, 3 / 32]),
    }
    at = buffer(Tensors(layout, start))
    phase = stretch(
        ["t"], optimizer=Optimizer("sgd", lr=1.0, clip=0.0), penalties=(Penalty(kind, 0.5, ("t",)),)
    )
    optimizer = FlatOptimizer(at, phase)
    optimizer.add()
    optimizer.step()
    torch.testing.assert_close(at.flat, start - moves[kind].double(), rtol=1e-12, atol=1e-7)


def test_the_clip_sees_all_that_moves_and_nothing_else() -> None:
    """Gradients 3 and 4 in two pieces of the buffer make a norm of 5, which a clip of 1 brings to
    (0.6, 0.8), so that SGD of rate 1 leaves (−0.6, −0.8); a held 100 between them, under a pull, a
    correction and a penalty of its own, neither moves nor counts."""
    layout = Layout((Entry("a", (1,), "lora"), Entry("held", (1,), "lora"), Entry("b", (1,), "lora")))
    everywhere = Tensors(layout, torch.tensor([0.0, 100.0, 0.0], dtype=torch.float64))
    phase = stretch(
        ["a", "b"],
        optimizer=Optimizer("sgd", lr=1.0, clip=1.0),
        proximal=Proximal(1.0, everywhere * 0.5),
        correction=everywhere,
        penalties=(Penalty("l2", 1.0, layout.names),),
    )
    at = buffer(everywhere)
    optimizer = FlatOptimizer(at, phase)
    at.grad.copy_(torch.tensor([3.0, 0.0, 4.0]))
    optimizer.add()
    assert optimizer.step() == pytest.approx(5.0, rel=1e-12)
    torch.testing.assert_close(
        at.flat, torch.tensor([-0.6, 100.0, -0.8], dtype=torch.float64), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("clip", [0.3, 1e3])
def test_a_phase_on_a_model_adds_all_of_it_to_the_loss(clip: float) -> None:
    """The trainer's own loop, on FedSDG's parts of a GPT-2: three steps of SGD with momentum on mean DPO
    + μ/2 ‖φ − φ_g‖² + penalties, with a correction, equal the twin's on the padded forward."""
    needs, pairs = frozenset({"lora", "personal_lora", "gate", "outputs"}), Pairs(6)
    model, plain = backbone("gpt2", needs), backbone("gpt2", needs, fast=False)
    layout, start = model.layout, away(model.layout, model.initial)
    shared = [entry.name for entry in layout.entries if entry.part == "lora"]
    own = tuple(entry.name for entry in layout.entries if entry.part == "personal_lora")
    gates = tuple(entry.name for entry in layout.entries if entry.part == "gate")
    phase = stretch(
        [name for name in layout.names if name != shared[3]],
        objective=Objective("dpo", {"beta": 0.5}),
        optimizer=Optimizer("sgd", lr=0.02, momentum=0.6, weight_decay=0.2, clip=clip),
        batch_size=6,
        proximal=Proximal(0.3, away(layout, start, seed=5).select(shared)),
        correction=(0.01 * away(layout, start, scale=1.0, seed=6)).select(shared),
        penalties=(Penalty("gate", 0.4, gates), Penalty("l2", 0.1, own)),
        rates=dict.fromkeys(gates, 0.2),
    )
    parts = Ownership.of(layout, lambda entry: Owner.SHARED)
    rows = np.arange(6)
    pair_trainer = PairTrainer(model, pairs)
    trained = pair_trainer.visit(rows, Key(5), parts).train(start, phase)
    reference = torch.from_numpy(pair_trainer.score(model.reference, rows).reference)
    plain.load(start)

    def dpo(value: dict[str, torch.Tensor]) -> torch.Tensor:
        """The leaves' own graph: their values go into the model, its gradients come back as slopes."""
        with torch.no_grad():
            for name, leaf in value.items():
                plain.parameters[name].copy_(leaf)
        plain.train_only(value)
        plain.grad.zero_()
        ratio = PaddedForward(plain)([pairs.pair(int(row)) for row in rows]) - reference
        loss = -torch.nn.functional.logsigmoid(0.5 * (ratio[:, 0] - ratio[:, 1])).mean()
        loss.backward()
        return sum((leaf * plain.parameters[name].grad.clone()).sum() for name, leaf in value.items())

    want, norms = twin(phase, dpo, start)
    assert trained.figures["grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-4)
    assert all(0.3 < norm < 1e3 for norm in norms)
    for name in layout.names:
        torch.testing.assert_close(trained.tensors[name], want.get(name, start[name]), rtol=1e-4, atol=2e-6)
