"""FedDPA's two phases and its combination, by hand and against plain torch."""

from __future__ import annotations

import math

import numpy as np
import torch
from tests.small_models import Pairs, backbone, causal
from torch.func import functional_call

from prefed.core import Entry, Key, Layout, Round, Tensors
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.testing import Quadratic, simulate
from prefed.train import ClientPairTrainer, PairTrainer

ALPHA, BETA, RATE, STEPS = 0.25, 0.1, 0.1, 2
PLAIN = {
    "optimizer": "sgd",
    "clip": 0,
    "weight_decay": 0,
    "lr": RATE,
    "personal_lr": 2 * RATE,
    "local_steps": STEPS,
    "batch_size": 8,
    "accumulate": 1,
    "schedule": "constant",
    "local_weight": ALPHA,
}
TWO = Layout(
    (
        Entry("lora/0/q/B", (1, 2), "lora", 0, "B"),
        Entry("personal_lora/0/q/B", (1, 2), "personal_lora", 0, "B"),
        Entry("gate/0", (1,), "gate", 0),
    )
)


def build(layout: Layout, **settings: object):
    aggregator = Aggregator(MergeConfig(), layout, 2.0)
    return METHODS["feddpa"].build(METHODS["feddpa"].Settings(**PLAIN | settings), layout, aggregator, 9)


def test_a_round_by_hand():
    """H = I, one step from θ_g = (1, 1); the target of θ_g is (2, 0), that of the local adapter (3, 0).

    θ_g = (1, 1) + 0.1 · (1, −1) = (1.1, 0.9). The local adapter starts from 0, whatever the model's start is:
    θ_l = 0.2 · (3, 0) = (0.6, 0). A client predicts with ¾ θ_g, θ_l and a gate of σ(a) = ¼; one that was
    never asked with θ_g and no local adapter.
    """
    start = Tensors(TWO, torch.tensor([1.0, 1, 5, 5, 0], dtype=torch.float64))
    clients = {"a": Quadratic.at([2.0, 0, 3, 0, 4])}
    method = build(TWO, local_steps=1)
    run = simulate(method, clients, start, 1)
    np.testing.assert_allclose(run.server.tensors["model"].flat, [1.1, 0.9], rtol=1e-12)
    mine = run.models(method, clients, start)["a"]
    np.testing.assert_allclose(mine.flat, [0.825, 0.675, 0.6, 0, -math.log(3)], rtol=1e-12, atol=1e-15)
    new = simulate(method, clients, start, 0).models(method, clients, start)["a"]
    assert new.flat[:4].tolist() == [1, 1, 0, 0]


def test_the_shared_model_is_that_of_feddpo():
    """Bit for bit after three rounds: FedDPO of the global adapter only, towards the same targets."""
    one = Layout(TWO.entries[:1])
    targets = {"a": [2.0, 0, 3, 0, 4], "b": [-1.0, 5, 1, 7, 2]}
    kind, aggregator = METHODS["feddpo"], Aggregator(MergeConfig(), one, 2.0)
    plain = {name: value for name, value in PLAIN.items() if name in kind.Settings.model_fields}
    feddpo = kind.build(kind.Settings(**plain), one, aggregator, 9)
    finished = []
    for method, layout in ((build(TWO), TWO), (feddpo, one)):
        clients = {c: Quadratic.at(t[: layout.size], size=k + 1) for k, (c, t) in enumerate(targets.items())}
        finished.append(simulate(method, clients, Tensors(layout, torch.ones(layout.size).double()), 3))
    ours, theirs = (run.server.tensors["model"] for run in finished)
    assert ours.equal(theirs)
    assert {*finished[0].uploads[0].tensors["model"]} == {*one.names}


def test_a_visit_is_that_of_plain_torch():
    """Gradient descent on W0 + s B_g A_g, then on W0 + s ((1 − α) B_g A_g + α B_l A_l) with B_g A_g as
    received, in float64 on a GPT-2 of transformers: the adapters and a client's log-probabilities agree."""
    model = backbone("gpt2", frozenset({"lora", "personal_lora", "gate"}), rank=2)
    pairs, layout = Pairs(4), model.layout
    method, rows, now = build(layout), np.arange(4), Round(1, 9, Key(0), {"a": 4.0})
    trainer = ClientPairTrainer(rows, Key(1), method.ownership, PairTrainer(model, pairs), "a", rows[:0], now)
    noise = 0.05 * torch.randn(layout.size, generator=torch.Generator().manual_seed(3))
    server = method.init_server(Tensors(layout, model.initial.flat + noise))
    (exchange,) = method.exchanges
    private = method.init_client(model.initial, "a")
    upload, private = exchange.work(trainer, private, exchange.send(server, "a", now))

    received = {name: value.double() for name, value in server.tensors["model"].items()}
    plain = causal("gpt2").double()
    base = {name: value.detach() for name, value in plain.named_parameters()}

    def logprob(adapters: list[tuple[float, dict[str, torch.Tensor]]], prompt, ids) -> torch.Tensor:
        weights = dict(base)
        for weight, adapter in adapters:
            for name in (name for name in adapter if name.endswith("/A")):
                _, block, module, _ = name.split("/")
                path = f"transformer.h.{block}.{module}.weight"
                weights[path] = weights[path] + weight * 2.0 * (adapter[name[:-1] + "B"] @ adapter[name]).T
        tokens = torch.tensor([[*prompt, *ids]])
        logits = functional_call(plain, weights, (tokens,)).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(list(map(int, ids)))[:, None]).sum()

    def margin(adapters, pair) -> torch.Tensor:
        return logprob(adapters, pair.prompt, pair.chosen) - logprob(adapters, pair.prompt, pair.rejected)

    def trained(adapter, rate: float, mixed) -> dict[str, torch.Tensor]:
        for _ in range(STEPS):
            leaves = {name: value.detach().requires_grad_() for name, value in adapter.items()}
            gaps = torch.stack(
                [margin(mixed(leaves), pairs.pair(k)) - margin([], pairs.pair(k)) for k in rows]
            )
            loss = -torch.nn.functional.logsigmoid(BETA * gaps).mean()
            slopes = torch.autograd.grad(loss, [*leaves.values()])
            adapter = {n: v.detach() - rate * g for (n, v), g in zip(leaves.items(), slopes, strict=True)}
        return adapter

    shared = trained(received, RATE, lambda adapter: [(1.0, adapter)])
    first = {
        name: model.initial[name].double() * (layout[name].factor == "A")
        for name in layout.names
        if layout[name].part == "personal_lora"
    }
    own = trained(first, 2 * RATE, lambda adapter: [(1 - ALPHA, received), (ALPHA, adapter)])
    for name, value in shared.items():
        torch.testing.assert_close(upload.tensors["model"][name].double(), value, rtol=1e-4, atol=1e-6)
    for name, value in own.items():
        torch.testing.assert_close(private.tensors["personal"][name].double(), value, rtol=1e-4, atol=1e-6)
    assert max(float(value.abs().max()) for name, value in own.items() if name.endswith("B")) > 1e-4

    predicted = method.predict(trainer, private, method.publish(server, "a"))
    model.load(predicted)
    forward = trainer.pair_trainer.model.forward
    with torch.no_grad():
        got = forward([pairs.pair(k) for k in rows], rewards=False)
    mixture = [(1 - ALPHA, received), (ALPHA, own)]
    pair = pairs.pair(0)
    want = [float(logprob(mixture, pair.prompt, ids).detach()) for ids in (pair.chosen, pair.rejected)]
    np.testing.assert_allclose(got[0], want, rtol=1e-4)
