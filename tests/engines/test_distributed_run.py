"""Late clients, a buffered server and neighbours on a real model, compared with the equations in plain
torch."""

from __future__ import annotations

import json

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from typer.testing import CliRunner

from finished import small_experiment
from plain_dpo import PlainDPO, flat, unflat
from prefed import load_run
from prefed.config import Experiment
from prefed.core import Key
from prefed.runs import theory_constants
from prefed.runs.run import run
from prefed.ui.cli import app

SIZES, STEPS, LR, CLIP = [6, 4, 3, 3], 2, 0.05, 0.2
METHOD = {"lr": LR, "clip": CLIP, "optimizer": "sgd", "weight_decay": 0.0, "batch_size": 64}
METHOD |= {"local_epochs": STEPS}


def finish(place, path, name, *, rounds=3, **tables):
    """A run of four clients, whose visits take all of their pairs in each step; its oracle and its log."""
    content = small_experiment(place, rounds=rounds, evaluate={"every": 0, "diagnose": 1}, **tables)
    content["model"]["lora"]["dropout"] = 0.0
    content["data"]["partition"] = {"by": "iid", "clients": 4, "sizes": SIZES}
    content["method"] = {"name": name, **METHOD}
    run(Experiment.from_tables(content, "x.toml"), path)
    loaded = load_run(path, data=True)
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    plain = PlainDPO(loaded)
    assert sorted(map(len, plain.pairs.values()), reverse=True) == SIZES
    return loaded, plain, records


def visit(plain, model, client):
    return flat(plain.train(unflat(model, plain.first), client, steps=STEPS, lr=LR, clip=CLIP))


def near(found, expected):
    """Float32 against float64: to 1e-5 of how far the models have moved."""
    return float((found.double() - expected).norm()) < 1e-5 * float(expected.norm())


def check_diagnosis(plain, model, shares, record):
    """Figures at the merged model, on all pairs."""
    got = [plain.gradient(unflat(model, plain.first), client) for client in shares]
    gradients = torch.stack([gradient for gradient, _ in got])
    p = torch.tensor(list(shares.values()), dtype=torch.float64)
    mean = p @ gradients
    loss = sum(share * value for share, (_, value) in zip(shares.values(), got, strict=True))
    assert record["global_loss"] == pytest.approx(loss, rel=1e-4)
    assert record["gradient_norm"] == pytest.approx(float(mean.norm()), rel=1e-3)
    assert record["kappa2"] == pytest.approx(float(p @ (gradients - mean).square().sum(1)), rel=1e-3)
    # All pairs fit into one batch of the method, so it is the client's own gradient that is clipped.
    clipped = p @ gradients.norm(dim=1).clamp(max=1).square()
    assert record["paper_gap"] == pytest.approx(float(clipped), rel=1e-3)
    assert record["zeta2"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("late", ["model", "delta"])
def test_feddpo_with_drawn_delays(place, tmp_path, late):
    """[D] eq. 11: θ^{r+1} = Σ λ_i θ_i with θ_i trained from θ^{r − q_i}, λ_i ∝ n_i s(q_i); and FedBuff's
    θ^r + Σ λ_i s(q_i)(θ_i − θ^{r − q_i}) with λ_i ∝ n_i. s(q) = (1 + q)^{−½}."""
    merge = {"late": late, "staleness": {"name": "polynomial"}}
    fleet = {"max_delay": 2}
    loaded, plain, records = finish(place, tmp_path / "run", "feddpo", fleet=fleet, merge=merge)
    models = [flat(plain.first)]
    for number, record in enumerate(records):
        assert [v["client"] for v in record["visits"]] == sorted(plain.pairs)
        assert all(0 <= v["late"] <= min(2, number) for v in record["visits"])
        models.append(merged(plain, models, record["visits"], late))
    assert sum(v["late"] for record in records for v in record["visits"]) > 0
    ours = loaded.server.tensors["model"].flat
    assert near(ours, models[-1])
    assert not near(models[-2], models[-1])
    total = sum(SIZES)
    check_diagnosis(plain, models[-1], {c: len(rows) / total for c, rows in plain.pairs.items()}, records[-1])


def merged(plain, models, visits, late):
    """The next model of the server."""
    newest = models[-1]
    trained = [(v, visit(plain, models[len(models) - 1 - v["late"]], v["client"])) for v in visits]
    weights = np.array([len(plain.pairs[v["client"]]) for v in visits], dtype=float)
    discounts = np.array([(1 + v["late"]) ** -0.5 for v in visits])
    if late == "model":
        weights = weights * discounts
        return sum(w * model for w, (_, model) in zip(weights / weights.sum(), trained, strict=True))
    steps = (model - models[len(models) - 1 - v["late"]] for v, model in trained)
    return newest + sum(
        w * s * step for w, s, step in zip(weights / weights.sum(), discounts, steps, strict=True)
    )


def test_a_buffered_server(place, tmp_path):
    """FedBuff with K = 2, all four clients at work. A visit takes n_i/4 seconds, for the mean client has four
    pairs; the clock is a loop over quarters of a second."""
    fleet = {"server": "buffered", "buffer": 2}
    merge = {"staleness": {"name": "polynomial"}, "weights": "uniform"}
    loaded, plain, records = finish(place, tmp_path / "run", "feddpo", fleet=fleet, merge=merge)
    names = sorted(plain.pairs)
    busy = dict.fromkeys(names, (0.0, 0))
    waiting, rounds, now = [], [], 0.0
    while len(rounds) < len(records):
        now += 0.25
        ends = {client: asked + len(plain.pairs[client]) / 4 for client, (asked, _) in busy.items()}
        waiting += [(client, busy.pop(client)[1]) for client in names if ends.get(client, 1e9) <= now + 1e-9]
        while len(waiting) >= 2:
            rounds.append((now, sorted(waiting[:2])))
            waiting = waiting[2:]
        idle = {*names} - {*busy} - {client for client, start in waiting if start == len(rounds)}
        busy |= {client: (now, len(rounds)) for client in idle}
    models = [flat(plain.first)]
    for number, (record, (at, expected)) in enumerate(zip(records, rounds[: len(records)], strict=True)):
        assert record["time"] == pytest.approx(at)
        assert [(v["client"], number - v["late"]) for v in record["visits"]] == expected
        newest, steps = models[-1], []
        for client, start in expected:
            discount = (1 + number - start) ** -0.5
            steps.append(discount * (visit(plain, models[start], client) - models[start]))
        models.append(newest + sum(steps) / 2)
    assert max(v["late"] for record in records for v in record["visits"]) > 0
    assert near(loaded.server.tensors["model"].flat, models[-1])


@pytest.mark.rare
def test_constants_of_a_run(place, tmp_path):
    """κ² and ζ_g² are the largest of the log. L is compared with the largest eigenvalue of the Hessian, from
    scipy's Lanczos and double backward passes: power iteration comes from below."""
    loaded, plain, records = finish(place, tmp_path / "run", "feddpo", rounds=2, fleet={"max_delay": 1})
    words = ["theory", "--run", str(tmp_path / "run"), "--set", "epsilon=0.5", "--json"]
    content = json.loads(CliRunner().invoke(app, words).stdout)
    got, found = content["constants"], content["measured"]
    assert (got["L"], got["epsilon"]) == (got["smoothness"], 0.5)
    assert got["kappa2"] == max(record["kappa2"] for record in records)
    assert (got["clients"], got["cohort"], got["local_steps"], got["rounds"]) == (4, 4, STEPS, 2)
    assert (got["lr"], got["beta"]) == (LR, 0.1)
    assert got["max_delay"] == max(v["late"] for record in records for v in record["visits"])
    assert got["horizon"] == max(
        len(ids) for rows in plain.pairs.values() for pair in rows for ids in pair[1:]
    )
    squares = [record["gradient_norm"] ** 2 for record in records]
    assert found["mean_squared_gradient"] == pytest.approx(sum(squares) / 2)
    assert found["paper_gap"] == pytest.approx(sum(record["paper_gap"] for record in records) / 2)
    model = unflat(loaded.server.tensors["model"].flat.double(), plain.first)

    def bent(vector):
        return plain.hessian_product(model, "client-0", torch.from_numpy(vector.reshape(-1))).numpy()

    numbers = flat(model).numel()
    operator = LinearOperator((numbers, numbers), matvec=bent, dtype=np.float64)
    largest = abs(eigsh(operator, k=1, tol=1e-2, return_eigenvectors=False, v0=np.ones(numbers))[0])
    key = Key(3).at("theory").at("client", "client-0")
    norm = theory_constants.hessian_norm(loaded, "client-0", key, last=True)
    assert 0.9 * largest < norm < 1.02 * largest
    assert got["smoothness"] >= norm


@pytest.mark.parametrize(("graph", "order"), [("path", "train_mix"), ("star", "mix_train")])
def test_decdpo(place, tmp_path, graph, order):
    """θ_i ← Σ_j W_ij θ_j with Metropolis–Hastings weights from the degrees, as networkx has them."""
    tables = {"graph": {"name": graph, "order": order}}
    loaded, plain, records = finish(place, tmp_path / "run", "decdpo", **tables)
    names = sorted(plain.pairs)
    made = {"path": nx.path_graph, "star": lambda n: nx.star_graph(n - 1)}[graph](4)
    w = np.zeros((4, 4))
    for i, j in made.edges:
        w[i, j] = w[j, i] = 1 / (1 + max(made.degree[i], made.degree[j]))
    w = torch.from_numpy(w + np.diag(1 - w.sum(1)))
    rows = flat(plain.first).repeat(4, 1)
    for record in records:
        for step in ("train", "mix") if order == "train_mix" else ("mix", "train"):
            if step == "train":
                rows = torch.stack([visit(plain, row, c) for row, c in zip(rows, names, strict=True)])
            else:
                apart = [float((x - x.mean(0)).square().sum()) / 4 for x in (rows, w @ rows)]
                assert record["consensus_before"] == pytest.approx(apart[0], rel=1e-3, abs=1e-12)
                assert record["consensus_after"] == pytest.approx(apart[1], rel=1e-3, abs=1e-12)
                rows = w @ rows
    for number, row in enumerate(rows):
        assert near(loaded.reader.node(number), row)
    assert near(loaded.server.tensors["model"].flat, rows.mean(0))
    assert records[-1]["rho"] == pytest.approx(float(np.linalg.norm(w - 0.25, 2)))
    check_diagnosis(plain, rows.mean(0), dict.fromkeys(names, 0.25), records[-1])
