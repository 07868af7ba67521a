"""Diagnostics of a run on quadratics, whose gradients are known."""

from dataclasses import replace

import pytest
import torch

import toy
from engines.test_neighbours import job, nodes, run
from prefed.core import Entry, Layout, Objective, Owner, Privacy, Tensors, Upload
from prefed.engines.diagnostics import Diagnostics
from prefed.store import RunReader
from toy import records


def diagnosed(graph, pairs, *, every=2, uniform=False, batch=2, method="feddpo"):
    how = Diagnostics(every, pairs, Objective("dpo"), batch, uniform)
    return replace(job(graph, method, rounds=2), diagnostics=how)


def slopes(whole, model):
    """Weight, gradient (φ − mean target, where shared) and loss of each client on all of its pairs."""
    names = whole.method.ownership.names(Owner.SHARED)
    full = whole.trainers.initial.replace(model)
    for client in whole.members:
        data = whole.trainers.data[client]
        away = Tensors(full.layout, full.flat - data.targets.mean(0)).select(names).flat
        yield float(data.size), away, data.loss(full.flat, torch.arange(data.size))


@pytest.mark.parametrize("graph", [None, {"name": "ring"}])
def test_on_all_pairs_the_figures_are_those_of_the_objective(tmp_path, graph):
    """Closed form: g_i = φ − ā_i. With a server p_i ∝ n_i at the server's model, without one p_i = 1/N at the
    mean model. Every second round is diagnosed."""
    whole = diagnosed(graph, None, uniform=graph is not None)
    server = run(tmp_path / "run", whole)
    first, second = records(tmp_path / "run")
    assert "kappa2" not in first
    rows = list(slopes(whole, server.tensors["model"]))
    sizes = [1.0 if graph else size for size, _, _ in rows]
    shares = [size / sum(sizes) for size in sizes]
    mean = sum(p * g for p, (_, g, _) in zip(shares, rows, strict=True))
    assert second["gradient_norm"] == pytest.approx(float(mean.norm()))
    kappa = sum(p * float((g - mean).square().sum()) for p, (_, g, _) in zip(shares, rows, strict=True))
    assert second["kappa2"] == pytest.approx(kappa)
    assert second["global_loss"] == pytest.approx(
        sum(p * loss for p, (_, _, loss) in zip(shares, rows, strict=True))
    )
    assert 0 < second["paper_gap"] <= 1
    assert second["zeta2"] > 0


def test_without_shared_tensors_each_client_is_measured_at_its_own_model(tmp_path):
    """Closed form of a method that shares nothing: g_i = φ_i − ā_i, where φ_i is the client's own model."""
    whole = diagnosed(None, None, batch=99, method="local")
    run(tmp_path / "run", whole)
    second = records(tmp_path / "run")[-1]
    assert not {"gradient_norm", "kappa2"} & second.keys()
    names = whole.method.ownership.names(Owner.PERSONAL)
    total, gap, loss = sum(whole.weights.values()), 0.0, 0.0
    for client, weight in whole.weights.items():
        own = RunReader(tmp_path / "run").client(client).tensors["personal"]
        full, data = whole.trainers.initial.replace(own), whole.trainers.data[client]
        away = Tensors(full.layout, full.flat - data.targets.mean(0)).select(names)
        gap += weight / total * min(away.norm(), 1.0) ** 2
        loss += weight / total * data.loss(full.flat, torch.arange(data.size))
    assert (second["paper_gap"], second["global_loss"]) == pytest.approx((gap, loss))
    assert second["paper_gap"] > 0


def test_few_pairs_estimate_the_same_without_bias():
    """Means over 150 draws. A batch of 2 of client i's pairs has the variance S_i²/2 · (1 − 2/n_i).

    S_i² is the sum of the sample variances. κ² is what all pairs give, though each g_i is of 4 pairs.
    """
    from prefed.engines.diagnostics import Diagnosis

    whole = diagnosed(None, 4, batch=2)
    exchange, method = whole.diagnosis, whole.method
    server = method.init_server(whole.trainers.initial)
    draws = []
    for number in range(1, 151):
        sums = Diagnosis(whole.diagnostics)
        for client in whole.members:
            trainer = whole.trainer(client, number, "exchange", "diagnose")
            private = method.init_client(whole.trainers.initial, client)
            download = exchange.send(server, client, whole.round(number))
            sums.add(exchange.work(trainer, private, download)[0])
        draws.append(sums.figures())
    rows = list(slopes(whole, server.tensors["model"]))
    total, names = sum(size for size, _, _ in rows), method.ownership.names(Owner.SHARED)
    mean = sum(size / total * g for size, g, _ in rows)
    kappa = sum(size / total * float((g - mean).square().sum()) for size, g, _ in rows)
    zeta = 0.0
    for client, (size, _, _) in zip(whole.members, rows, strict=True):
        targets = whole.trainers.data[client].targets
        spread = Tensors(whole.trainers.initial.layout, targets.var(0)).select(names).flat.sum()
        zeta += size / total * float(spread) / 2 * (1 - 2 / size)
    for name, expected in (("kappa2", kappa), ("zeta2", zeta)):
        found = sum(draw[name] for draw in draws) / len(draws)
        assert found == pytest.approx(expected, rel=0.15), name


def test_kappa2_is_corrected_for_the_noise_of_few_pairs():
    """With weights p of 1/4 and 3/4, gradients (2, 0) and 0, and variances V of 8 and 0 between two batches:
    Σ p ‖g‖² = 1 has Σ p V/2 of noise, ‖Σ p g‖² = 1/4 has Σ p² V/2, so κ² is 3/4 − (1/4 − 1/16) · 4 = 0."""
    from prefed.engines.diagnostics import Diagnosis

    layout = Layout((Entry("a", (2,), "lora"),))
    sums = Diagnosis(Diagnostics(1, 4, Objective("dpo"), 2))
    for client, weight, slope, variance in (("a", 1.0, 2.0, 8.0), ("b", 3.0, 0.0, 0.0)):
        gradient = Tensors(layout, torch.tensor([slope, 0.0]))
        numbers = {"loss": 0.0, "variance": variance, "clipped": 0.0}
        sums.add(Upload(client, weight, {"gradient": gradient}, numbers, 1))
    assert sums.figures()["kappa2"] == pytest.approx(0.0, abs=1e-12)


def test_a_diagnosis_changes_nothing_but_the_log(tmp_path):
    """States are those of the run without it, and its bytes are not counted."""
    run(tmp_path / "plain", job({"name": "ring"}, rounds=2))
    whole = replace(job({"name": "ring"}, rounds=2), diagnostics=Diagnostics(1, 4, Objective("dpo"), 2))
    run(tmp_path / "diagnosed", whole)
    left, right = (nodes(tmp_path / name, whole) for name in ("plain", "diagnosed"))
    assert all(torch.equal(left[client], right[client]) for client in left)
    plain, other = (records(tmp_path / name) for name in ("plain", "diagnosed"))
    assert [r["bytes_up"] for r in plain] == [r["bytes_up"] for r in other]
    assert RunReader(tmp_path / "plain").commit.private == RunReader(tmp_path / "diagnosed").commit.private


def test_a_diagnosis_keeps_to_minimum_pairs():
    """Means over 2 pairs may not be reported where the minimum is 3, and smaller clients take no part."""
    words = "would report means over 2 pairs, fewer than minimum_pairs = 3: draw at least 6 pairs"
    with pytest.raises(ValueError, match=rf"^diagnostics {words}$"):
        replace(diagnosed(None, 4), privacy=Privacy(minimum_pairs=3))
    assert toy.build(toy.text()).diagnostics is None
