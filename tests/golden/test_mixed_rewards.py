"""LoRe and PAL against an independent twin in plain transformers and torch, and what only they hold."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prefed.core import Objective
from prefed.core.wire import encode
from tastes import ROWS, TESTS, TRAIN, Federation, backbone, copied, half, record

SETTINGS = {"lr": 0.02, "weights_lr": 0.5, "batch_size": 64, "local_steps": 3}
"""A batch of 32 pairs is all pairs of a client, so the twin needs none of prefed's draws."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return half(tmp_path_factory.mktemp("pairs"))


def lore(shared, weights, h):
    return (h @ shared["basis/weight"].T * weights).sum(-1)


def pal(shared, weights, h):
    def f(x):
        return network[2](F.gelu(network[0](x)))

    network = {0: _layer(shared, 0), 2: _layer(shared, 1)}
    ideal = sum(w * point for w, point in zip(weights, shared["ideal/prototypes"], strict=True))
    return -((f(h) - f(ideal)) ** 2).sum(-1).sqrt()


def _layer(shared, number):
    weight, bias = shared[f"ideal/{number}/weight"], shared[f"ideal/{number}/bias"]
    return lambda x: x @ weight.T + bias


def hidden(model, rows):
    """Mean hidden states over the tokens of chosen and rejected responses, each pair by itself."""
    both = []
    for row in rows:
        pair = record(int(row), warm=row < 20)
        for text in (pair.chosen, pair.rejected):
            ids = torch.tensor([model.tokenizer(pair.prompt + text + "<eos>")["input_ids"]])
            count = len(model.tokenizer(text + "<eos>")["input_ids"])
            with torch.no_grad():
                states = model.causal(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            both.append(states[-count:].mean(0))
    return torch.stack(both).view(len(rows), 2, -1)


@pytest.mark.parametrize(("name", "reward"), [("lore", lore), ("pal", pal)])
def test_three_rounds_are_those_of_a_plain_loop(pairs, name, reward):
    """Shared tensors, each client's weights, and scores of test pairs, after three rounds of four clients."""
    rates = {"lr": 0.3, "weights_lr": 2.0, "optimizer": "sgd"}
    run = Federation(name, {**SETTINGS, **rates}, pairs).run(3)
    plain = backbone(fast=False)
    h = {client: hidden(plain, rows) for client, rows in TRAIN.items()}
    shared = {n: t.clone() for n, t in run.model.initial.items() if n != "mixture/logits"}
    logits = {client: torch.zeros(8) for client in TRAIN}
    total = sum(map(len, TRAIN.values()))
    for _ in range(3):
        sums = {n: torch.zeros_like(t) for n, t in shared.items()}
        for client, rows in TRAIN.items():
            own = {n: t.clone().requires_grad_() for n, t in shared.items()}
            v = logits[client].clone().requires_grad_()
            groups = [{"params": list(own.values()), "lr": 0.3}, {"params": [v], "lr": 2.0}]
            sgd = torch.optim.SGD(groups, weight_decay=0.01)
            for _ in range(3):
                sgd.zero_grad()
                chosen, rejected = reward(own, v.softmax(0), h[client]).unbind(1)
                torch.log1p(torch.exp(rejected - chosen)).mean().backward()
                torch.nn.utils.clip_grad_norm_([*own.values(), v], 1.0)
                sgd.step()
            logits[client] = v.detach()
            for n, t in own.items():
                sums[n] += len(rows) / total * t.detach()
        shared = sums
    for n, t in shared.items():
        torch.testing.assert_close(run.server.tensors["model"][n], t, rtol=1e-3, atol=2e-4)
    for client, rows in TESTS.items():
        kept = run.private[client].tensors["personal"]["mixture/logits"]
        torch.testing.assert_close(kept, logits[client], rtol=1e-3, atol=2e-3)
        chosen, rejected = reward(shared, logits[client].softmax(0), hidden(plain, rows)).unbind(1)
        scores = run.trainer.score(run.predict(client), rows).orders
        torch.testing.assert_close(torch.tensor(scores).mean(1), chosen - rejected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["lore", "pal"])
def test_opposite_clients_learn_through_their_weights_alone(pairs, name):
    """Of a and b, who want opposites, each judges all its test pairs correctly, and with the other's weights
    none. The published rewards with equal weights are one model for both: ½, exactly."""
    run = Federation(name, {**SETTINGS, "local_steps": 2}, pairs).run(40)
    models = {client: run.predict(client) for client in "ab"}
    assert [run.accuracy(models[client], TESTS[client]) for client in "ab"] == [1.0, 1.0]
    assert [run.accuracy(models[other], TESTS[client]) for client, other in ("ab", "ba")] == [0.0, 0.0]
    assert models["a"].select(run.server.tensors["model"]).equal(run.server.tensors["model"])


@pytest.mark.parametrize("name", ["lore", "pal"])
def test_a_newcomer_fits_its_weights_alone_and_to_as_many_pairs_as_are_asked(pairs, name):
    """Weights fitted to 4 of 14 pairs do not change if the 10 others want the opposite, and do if one of the
    4 does. The shared tensors stay; without pairs, or before a step, so do the weights."""
    run = Federation(name, {**SETTINGS, "local_steps": 2}, pairs).run(20)
    published, start = run.method.publish(run.server, "new"), run.model.initial["mixture/logits"]
    rows = ROWS[:14]
    got = run.client("new", 1, rows).key.at("pairs").numpy().permutation(rows)[:4]

    def fitted(swapped):
        signs = type(run.trainer.model).signs
        with pytest.MonkeyPatch.context() as patch:
            turn = lambda model, r: np.where(np.isin(r, swapped), -1, 1) * signs(model, r)  # noqa: E731
            patch.setattr(type(run.trainer.model), "signs", lambda m, r: turn(m, r).astype(np.float32))
            return run.method.infer(run.client("new", 1, rows), published, 4)

    model = fitted([])
    assert model.equal(fitted(np.setdiff1d(rows, got)))
    assert not model.equal(fitted(got[:1]))
    assert not model["mixture/logits"].equal(start)
    nobody = run.method.infer(run.client("new", 1, rows[:0]), published, 4)
    steps = run.method.adapt(run.client("new", 1, rows), published, 5)
    assert nobody["mixture/logits"].equal(start)
    for each in (model, nobody, steps):
        assert each.select(published.tensors["model"]).equal(published.tensors["model"])


@pytest.mark.parametrize(("name", "settings"), [("lore", SETTINGS), ("pal", SETTINGS), ("fedvpa", {})])
def test_order_of_clients_and_a_stop_change_no_bit(pairs, name, settings):
    """In the second half clients go backwards, after all states went through bytes."""
    whole = Federation(name, settings, pairs).run(3, ["abd", "bcd"])
    parts = Federation(name, settings, pairs).run(2, ["abd", "bcd"], backwards=True)
    parts.server = copied(parts.server)
    parts.private = {client: copied(state) for client, state in parts.private.items()}
    parts.run(3, ["abd", "bcd"], backwards=True)
    assert encode(parts.server) == encode(whole.server)
    assert [encode(parts.private[client]) for client in "abcd"] == [
        encode(whole.private[client]) for client in "abcd"
    ]


@pytest.mark.parametrize("name", ["lore", "pal"])
def test_gradient_and_loss_are_those_of_bradley_and_terry(pairs, name):
    """The loss is that of all pairs, and the slope in one logit that of the loss, by central differences."""
    run = Federation(name, SETTINGS, pairs)
    start, goal, rows = run.model.initial, Objective("mixed"), ROWS[:10]
    gradient, loss = run.client("a", 1, rows).gradient(start, goal, batch_size=0, name="g")
    assert loss == pytest.approx(run.trainer.loss(start, goal, rows), rel=1e-5)
    shift = torch.zeros(8)
    shift[3] = 0.1
    ends = [
        run.trainer.loss(start.replace({"mixture/logits": start["mixture/logits"] + s * shift}), goal, rows)
        for s in (1, -1)
    ]
    slope = float(gradient["mixture/logits"][3])
    assert (ends[0] - ends[1]) / 0.2 == pytest.approx(slope, rel=0.02, abs=1e-5)
