"""What a client that never took part trains before it is judged: its method's own steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefed.core import Download, Key, Phase, Round, Tensors
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.testing import Quadratic, QuadraticTrainer, initial

ROUNDS = 5


def newcomer(name: str, steps: int, **settings: Any) -> tuple[Phase, Tensors, Tensors]:
    """The one phase it runs in the last of five rounds, the model before and after it."""
    kind = METHODS[name]
    chosen = kind.Settings(**settings)
    start = initial(kind.needs(chosen))
    method = kind.build(chosen, start.layout, Aggregator(MergeConfig(), start.layout, 2.0), ROUNDS)
    published = method.publish(method.init_server(start), "new")
    shared = {n: g.layout for n, g in published.tensors.items()}
    published = Download(
        {n: Tensors(layout, torch.ones(layout.size, dtype=torch.float64)) for n, layout in shared.items()},
        published.scalars,
    )
    data = Quadratic(torch.zeros(6, start.layout.size, dtype=torch.float64))
    now = Round(ROUNDS, ROUNDS, Key(0), {"old": 6.0})
    trainer = QuadraticTrainer("new", data, now, Key(1), method.ownership, start)
    assert method.adapt is not None
    after = method.adapt(trainer, published, steps)
    (phase,) = trainer.phases
    return phase, start.replace(*published.tensors.values()), after


@pytest.mark.parametrize(
    ("name", "lr", "special"),
    [
        ("feddpo", 1e-4, {}),
        ("fedpdpo", 5e-5, {"head": 1e-4, "bottleneck": 1e-4, "reward": 1e-4}),
        ("fedper", 5e-5, {"head": 1e-4}),
        ("fedrep", 5e-5, {"head": 1e-4}),
        ("fedsdg", 1e-3, {"gate": 5e-3, "personal_lora": 1e-3}),
        ("perfedavg", 0.01, {}),
        ("ditto", 1e-4, {}),
        ("fedamp", 5e-5, {}),
    ],
)
def test_rates_are_those_of_the_methods_first_round(name: str, lr: float, special: dict[str, float]) -> None:
    """The rates of the methods' tables, untouched by the cosine schedule though the run is at its end: a
    newcomer is at its beginning. Per-FedAvg adapts at its inner rate."""
    given = {"lr": lr} if name == "fedamp" else {}
    phase, _, after = newcomer(name, 3, **given)
    assert phase.steps == 3
    assert phase.optimizer.lr == lr
    assert {key.split("/")[0]: rate for key, rate in phase.rates.items()} == special
    assert {key.split("/")[0] for key in phase.train} == {key.split("/")[0] for key in after}


def test_it_sees_the_loss_as_clients_do() -> None:
    """FedPDPO's w_r is that of the last round, 0.5 + 1; FedSDG's gates and personal LoRA are penalised; PPO
    takes minibatches of two pairs."""
    assert newcomer("fedpdpo", 1)[0].objective.settings["weight"] == 1.5
    assert [penalty.kind for penalty in newcomer("fedsdg", 1)[0].penalties] == ["gate", "l2"]
    ppo = newcomer("fedper", 1, objective="ppo")[0]
    assert (ppo.batch_size, ppo.accumulate) == (2, 1)


@pytest.mark.parametrize(("name", "setting"), [("ditto", "lam"), ("pfedme", "lam"), ("fedprox", "mu")])
def test_a_pull_is_towards_what_was_published(name: str, setting: str) -> None:
    """With every target at 0 and a pull κ towards the published 1, gradient descent goes to κ / (1 + κ) = ¾
    for κ = 3: the minimum of ½ φ² + ½ κ (φ − 1)²."""
    rates = {"optimizer": "sgd", "clip": 0, "weight_decay": 0, "lr": 0.1}
    rates |= {"personal_lr": 0.1} if name == "ditto" else {}
    rates |= {"outer_lr": 0.1} if name == "pfedme" else {}
    phase, published, after = newcomer(name, 60, **{setting: 3.0}, **rates)
    assert phase.proximal is not None
    assert torch.equal(phase.proximal.to.flat, published.flat)
    torch.testing.assert_close(after.flat, torch.full_like(after.flat, 0.75))
