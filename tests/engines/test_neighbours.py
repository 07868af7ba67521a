"""Rounds without a server, in this process, on the toy federation."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import toy
from crashes import flip
from law_examples import examples
from prefed.core import Key, Owner, Tensors
from prefed.core.wire import decode_upload, encode
from prefed.engines import Job, NeighbourRounds, ServerRounds
from prefed.engines.config import CohortConfig
from prefed.engines.tasks import Task, run_task
from prefed.merge import Aggregator, MergeConfig
from prefed.merge.config import GraphConfig
from prefed.methods import METHODS, to_neighbours
from prefed.store import RunReader, RunWriter
from prefed.testing import QuadraticTrainer
from toy import records

AVERAGED = {*("feddpo", "fedsft", "fedprox", "fedpdpo", "fedper", "fedrep", "perfedavg", "feddpa")}
AVERAGED |= {"ditto", "pfedme", "fedala", "fedbn", "fedbis", "lore", "pal"}
"""Methods that can do without their server, with default settings."""
SCHEDULES = [
    {"name": "ring"},
    {"name": "star", "placement": "random"},
    {"name": "erdos_renyi", "probability": 0.6, "changes": "redrawn"},
    {"name": "complete", "changes": "matching"},
    {"name": "ring", "edge_failure": 0.4},
]


def job(graph, method="decdpo", *, rounds=4, merge=None, faults=None, split=False, **chosen):
    """The toy's clients with a method, and a graph over them."""
    trainers, kind = toy.ToyTrainers(toy.options()), METHODS[method]
    made = kind.Settings(**{"lr": 0.05, "local_steps": 2, "batch_size": 2, **chosen})
    layout, config = trainers.initial.layout, merge or MergeConfig()
    value = kind.build(made, layout, Aggregator(config, layout, 2.0), rounds)
    if graph is not None and value.exchanges[0].to != "neighbours":
        value = to_neighbours(value, made, config)
    if faults:
        (exchange,) = value.exchanges

        def work(trainer, private, download):
            upload, after = exchange.work(trainer, private, download)
            fault = faults.get(trainer.client)
            if fault == "huge":
                return replace(upload, tensors={"model": upload.tensors["model"] * 1e7}), after
            return toy.misbehave(upload, trainer.initial, fault), after

        value = replace(value, exchanges=(replace(exchange, work=work),))
    return Job(trainers, value, 7, rounds, graph=None if graph is None else GraphConfig(**graph))


def run(path, whole, *, resume=False, callback=None, make=toy.InProcess):
    kind = NeighbourRounds if whole.graph is not None else ServerRounds
    with RunWriter(path, resume=resume) as writer, make(whole, writer.states) as backend:
        writer.begin(encode(whole.method.init_server(whole.trainers.initial)), whole.trainers.fingerprint)
        return kind(whole, writer, backend, callback or toy.Callback()).run()


def nodes(path, whole):
    """The clients' models after the last round, by client."""
    reader = RunReader(path)
    return {client: reader.node(number) for number, client in enumerate(whole.members)}


def gossip(whole):
    """The plainest run without a server: dense matrices, everything in memory. Models, private states and
    consensus errors before and after each mix."""
    method, (exchange,) = whole.method, whole.method.exchanges
    first = method.init_server(whole.trainers.initial)
    models = dict.fromkeys(whole.members, first.tensors["model"])
    private = {client: method.init_client(whole.trainers.initial, client) for client in whole.members}
    errors = []

    def train(number):
        now = whole.round(number)
        for client in whole.members:
            trainer = QuadraticTrainer(
                client,
                whole.trainers.data[client],
                now,
                now.key.at("exchange", "train").at("client", client),
                method.ownership,
                whole.trainers.initial,
            )
            own = first.update({"model": models[client]})
            download = exchange.send(own, client, now)
            upload, private[client] = exchange.work(trainer, private[client], download)
            models[client] = models[client].replace(upload.tensors["model"])

    def mix(number):
        w = torch.from_numpy(whole.topology.matrix(number).toarray())
        rows = torch.stack([models[client].flat for client in whole.members])
        mixed = w @ rows
        errors.append([float((x - x.mean(0)).square().sum()) / len(x) for x in (rows, mixed)])
        for client, row in zip(whole.members, mixed, strict=True):
            models[client] = Tensors(models[client].layout, row)

    order = [train, mix] if whole.topology.config.order == "train_mix" else [mix, train]
    for number in range(1, whole.rounds + 1):
        for step in order:
            step(number)
    return models, private, errors


@pytest.mark.sample
@pytest.mark.parametrize("order", ["train_mix", "mix_train"])
@pytest.mark.parametrize("graph", SCHEDULES)
def test_a_run_agrees_with_the_plain_one(tmp_path, graph, order):
    """Oracle: :func:`gossip`, a dense product. FedBN's norms stay with their clients."""
    whole = job({**graph, "order": order}, "fedbn")
    mean = run(tmp_path / "run", whole)
    models, private, errors = gossip(whole)
    ours = nodes(tmp_path / "run", whole)
    for client, model in models.items():
        assert torch.allclose(ours[client], model.flat, rtol=0, atol=1e-12)
        state = RunReader(tmp_path / "run").client(client)
        assert (state.tensors["personal"] - private[client].tensors["personal"]).norm() < 1e-12
    average = torch.stack([model.flat for model in models.values()]).mean(0)
    assert torch.allclose(mean.tensors["model"].flat, average, rtol=0, atol=1e-12)
    got = [[r["consensus_before"], r["consensus_after"]] for r in records(tmp_path / "run")]
    assert np.allclose(got, errors, rtol=1e-9, atol=1e-15)


@examples(4)
@given(
    st.sampled_from(["adamw", "sgd"]),
    st.sampled_from(["fedit", "ffa", "fedsa"]),
    st.integers(1, 3),
    st.sampled_from([("decdpo", "feddpo"), ("fedbn", "fedbn")]),
)
def test_the_complete_graph_is_feddpo_with_uniform_weights(tmp_path_factory, optimizer, lora, rounds, names):
    """Law: bit for bit. Each row of W is 1/N, and a mixed row is the server's mean in the same order of sums.
    The visits' keys hold the exchange's name, which is the same."""
    folder, chosen = tmp_path_factory.mktemp("law"), {"optimizer": optimizer, "local_steps": 2}
    merge = MergeConfig(weights="uniform", lora=lora)
    one = job({"name": "complete"}, names[0], merge=merge, rounds=rounds, **chosen)
    other = job(None, names[1], merge=merge, rounds=rounds, **chosen)
    mean, server = run(folder / "one", one), run(folder / "other", other)
    for row in nodes(folder / "one", one).values():
        assert torch.equal(row, server.tensors["model"].flat)
    assert mean.tensors["model"].equal(server.tensors["model"])
    left, right = records(folder / "one")[-1], records(folder / "other")[-1]
    assert left["preference_accuracy"] == right["preference_accuracy"]
    assert left["consensus_after"] == 0


@examples(3)
@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from(["train_mix", "mix_train"]),
    st.lists(st.integers(1, 4), unique=True, max_size=4).map(sorted),
)
def test_stopped_and_resumed_to_the_bit(tmp_path_factory, graph, order, stops):
    """Law: a run in any number of sittings is the run in one; the optimisers' state is kept."""
    folder = tmp_path_factory.mktemp("stops")
    whole = job({**graph, "order": order}, rounds=5, optimizer_state="kept")
    run(folder / "whole", whole)
    for number in [*stops, 5]:
        run(folder / "parts", replace(whole, rounds=number), resume=(folder / "parts").exists())
    assert toy.outcome(folder / "whole") == toy.outcome(folder / "parts")


def test_a_round_that_was_left_is_done_anew(tmp_path):
    """Interrupted after any answer and resumed, also in the same process."""
    whole = job({"name": "ring", "order": "mix_train"}, rounds=2)
    run(tmp_path / "whole", whole)

    for number in (1, 9, 14, 20):
        path = tmp_path / str(number)
        with pytest.raises(KeyboardInterrupt):
            run(path, whole, callback=toy.InterruptAt(number))
        run(path, whole, resume=True)
        assert toy.outcome(path) == toy.outcome(tmp_path / "whole")


@pytest.mark.usefixtures("forked_workers")
def test_worker_processes_give_the_same(tmp_path):
    """The visits may be done elsewhere, bit for bit."""
    run(tmp_path / "here", job({"name": "ring"}, lr=0.05))
    run(tmp_path / "there", build_ring(""), make=lambda j, s: toy.BACKENDS["processes"](j, FACTORY, s, TWO))
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there")


FACTORY, TWO = partial(toy.JobFactory, "engines.test_neighbours:build_ring", ""), toy.BackendSettings(2)


def build_ring(text):
    """For worker processes."""
    return job({"name": "ring"}, lr=0.05)


def test_bytes_are_counted_per_copy(tmp_path):
    """In a star of 6 the hub has 5 neighbours and the others 1: 10 copies. A copy is the encoded upload
    without numbers and without the number of pairs; the loss is in the log alone."""
    whole = job({"name": "star"}, rounds=1)
    run(tmp_path / "run", whole)
    (exchange,), client = whole.method.exchanges, whole.members[0]
    start = whole.method.init_server(whole.trainers.initial)
    message = encode(exchange.send(start, client, whole.round(1)))
    result = run_task(whole, Task("visit", client, 1, "train", message), toy.MemoryStates())
    upload = decode_upload(result.message)
    assert (upload.weight, upload.scalars) == (1.0, {})
    assert set(result.report) == {"loss"}
    (record,) = records(tmp_path / "run")
    assert record["bytes_up"] == 10 * len(result.message)
    assert record["bytes_down"] == 0
    assert record["loss"] > 0
    assert record["rho"] == pytest.approx(1 - 1 / 6)  # star: the smallest weight is 1/N


def test_neighbours_do_not_learn_how_many_pairs_a_client_has():
    """An upload that weighs n_i is withheld at the client: the rule is checked on both sides."""
    from prefed.engines.validation import validate_upload

    whole = job({"name": "ring"})
    (exchange,), client = whole.method.exchanges, whole.members[0]
    start = whole.method.init_server(whole.trainers.initial)
    trainer = whole.trainer(client, 1, "exchange", "train")
    private = whole.method.init_client(whole.trainers.initial, client)
    upload, _ = exchange.work(trainer, private, exchange.send(start, client, whole.round(1)))

    def verdict(upload):
        model, ownership = whole.trainers.initial, whole.method.ownership
        return validate_upload(upload, client, exchange, ownership, model, whole.round(1))

    assert "not 1, as among neighbours" in verdict(upload)
    assert "numbers that the exchange does not expect: loss" in verdict(replace(upload, weight=1.0))
    assert verdict(replace(upload, weight=1.0, scalars={})) == ""
    large = replace(upload, weight=1.0, scalars={}, tensors={"model": upload.tensors["model"] * 0 + 1e39})
    assert "beyond the range of float32" in verdict(large)


@pytest.mark.parametrize("fault", ["nan", "leak", "shape", "stranger"])
def test_a_model_that_is_not_valid_does_not_go_out(tmp_path, fault):
    """Its edges fail at both ends: W stays doubly stochastic, and the bad client keeps its model."""
    bad = "Client 2/ü"
    whole = job({"name": "ring"}, rounds=1, faults={bad: fault})
    run(tmp_path / "run", whole)
    (record,) = records(tmp_path / "run")
    assert [drop["client"] for drop in record["dropped"]] == [bad]
    assert record["edges"] == 4  # of the ring's 6
    start = whole.method.init_server(whole.trainers.initial).tensors["model"].flat
    ours = nodes(tmp_path / "run", whole)
    assert torch.equal(ours[bad], start)
    clean = job({"name": "ring"}, rounds=1)
    run(tmp_path / "clean", clean)
    theirs = nodes(tmp_path / "clean", clean)
    assert torch.equal(ours["Client 5/ü"], theirs["Client 5/ü"])  # two edges away


def test_a_model_out_of_all_proportion_is_not_mixed(tmp_path):
    """Both ends see it by comparing lengths; other clients' mixes continue."""
    bad = "Client 2/ü"
    whole = job({"name": "ring"}, rounds=1, faults={bad: "huge"})
    run(tmp_path / "run", whole)
    (record,) = records(tmp_path / "run")
    assert [drop["client"] for drop in record["dropped"]] == [bad, bad]
    assert "max_ratio = 10000" in record["dropped"][0]["reason"]
    others = [row for client, row in nodes(tmp_path / "run", whole).items() if client != bad]
    assert max(float(row.norm()) for row in others) < 100


def test_a_client_predicts_with_its_own_model(tmp_path):
    """Accuracies of the toy: a pair is chosen if φ·a > 0, with the client's own φ."""
    whole = job({"name": "path"}, rounds=2)
    run(tmp_path / "run", whole)
    evaluation = records(tmp_path / "run")[-1]["evaluation"]["preference_accuracy"]["per_client"]
    shared = whole.method.ownership.names(Owner.SHARED)
    for client, row in nodes(tmp_path / "run", whole).items():
        layout = whole.trainers.initial.layout.select(shared)
        model = whole.trainers.initial.replace(Tensors(layout, row))
        expected = float((whole.trainers.data[client].targets @ model.flat > 0).double().mean())
        assert evaluation[client] == pytest.approx(expected, abs=1e-12)


def without_server(name, **merge):
    """A method whose clients mix with their neighbours."""
    kind, config = METHODS[name], MergeConfig(**merge)
    chosen = kind.Settings()
    made = kind.build(chosen, toy.LAYOUT, Aggregator(config, toy.LAYOUT, 2.0), 3)
    return made if name == "decdpo" else to_neighbours(made, chosen, config)


def test_which_methods_can_do_without_their_server(subtests):
    """Those whose server sends a model and averages models. DecDPO is FedDPO without its server."""
    impossible = r"\[graph\] determines how models are mixed|does more than|use rule 'mean'"
    for name in METHODS:
        with subtests.test(name):
            if name not in AVERAGED | {"decdpo"}:
                with pytest.raises(ValueError, match="does more than average models"):
                    without_server(name)
                continue
            assert [exchange.to for exchange in without_server(name).exchanges] == ["neighbours"]
            for merge in ({"rule": "median"}, {"optimizer": {"name": "fedadam"}}, {"weights": "mass"}):
                with pytest.raises(ValueError, match=impossible):
                    without_server(name, **merge)


def test_what_a_graph_cannot_serve_is_refused():
    with pytest.raises(ValueError, match=r"^graph .*cohort"):
        replace(job({"name": "ring"}), cohort=CohortConfig(size=3))
    with pytest.raises(ValueError, match="not connected"):
        job({"name": "erdos_renyi", "probability": 1e-9})
    assert Key(7).at("graph").number() != Key(7).at("round", 1).number()


def test_a_damaged_file_of_nodes_is_refused(tmp_path):
    whole = job({"name": "ring"}, rounds=2)
    run(tmp_path / "run", whole)
    (path,) = (tmp_path / "run/checkpoint/nodes").iterdir()
    assert path.name == "nodes@000002.safetensors"
    flip(path)
    with pytest.raises(RuntimeError, match=r"nodes@000002.* is damaged"):
        run(tmp_path / "run", replace(whole, rounds=3), resume=True)
    path.unlink()
    with pytest.raises(RuntimeError, match="the nodes' state of round 2 is missing"):
        run(tmp_path / "run", replace(whole, rounds=3), resume=True)
