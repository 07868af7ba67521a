"""Rounds with a server, in this process, on the toy federation."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import toy
from prefed.core import POOLED, Callback, Key, Owner, State
from prefed.core.wire import decode_upload, encode
from prefed.engines import Job
from prefed.engines.config import CohortConfig
from prefed.engines.tasks import Task, run_task
from prefed.store import RunReader
from prefed.testing import Quadratic, simulate
from toy import records


class Listener(Callback):
    def __init__(self):
        self.warnings, self.records, self.steps = [], [], []

    def on_warning(self, text):
        self.warnings.append(text)

    def on_round_end(self, record):
        self.records.append(record)

    def on_task_end(self, what, done, of):
        self.steps.append((what, done, of))


def test_the_engine_agrees_with_the_plain_one(tmp_path):
    """Oracle: ``quadratic.federate`` keeps everything in memory, sends nothing through bytes and visits
    one client after the other. Server, private states and models must be bit-identical."""
    server = toy.run(tmp_path / "run", rounds=5)
    options = toy.options(rounds=5)
    trainers = toy.ToyTrainers(options)
    method = toy.toy_method(options)
    plain = simulate(method, trainers.data, trainers.initial, 5, cohort=3, seed=7)
    assert server.tensors["model"].equal(plain.server.tensors["model"])
    assert server.values == plain.server.values
    reader = RunReader(tmp_path / "run")
    for client, private in plain.private.items():
        state = reader.client(client) or method.init_client(trainers.initial, client)
        assert state.tensors["personal"].equal(private.tensors["personal"])
        assert state.values == private.values


def test_the_record_of_a_round(tmp_path):
    """The contract's keys; bytes are the lengths of the messages, summed over both exchanges.

    Round 2 scores all 6 clients and trains 3. Downloads hold the same model (12 float64) and one
    integer of one digit, so all 9 are equally long; so are a score's 6 uploads, but for the digits of
    the number they carry, which is why the sums are recomputed by running the same tasks.
    """
    listener = Listener()
    toy.run(tmp_path / "run", rounds=2, callback=listener)
    first, second = records(tmp_path / "run")
    assert list(first)[:11] == [
        "round", "loss", "preference_accuracy", "reward_accuracy", "chosen_shift", "rejected_shift",
        "evaluation", "bytes_up", "bytes_down", "seconds", "cohort",
    ]  # fmt: skip
    assert second["merges"] == 2
    assert second["score"] > 0
    job = toy.build(toy.text(rounds=2))
    method, now = job.method, job.round(1)
    server = method.init_server(job.trainers.initial)
    down = [len(encode(method.exchanges[1].send(server, client, now))) for client in first["cohort"]]
    assert first["bytes_down"] == sum(down)
    up, losses, weights = 0, [], []
    for client in job.sample(now):
        message = encode(method.exchanges[1].send(server, client, now))
        result = run_task(job, Task("visit", client, 1, "train", message), toy.MemoryStates())
        upload = decode_upload(result.message)
        up += len(result.message)
        losses.append(upload.scalars["loss"])
        weights.append(upload.weight)
    assert first["bytes_up"] == up
    assert first["loss"] == pytest.approx(
        sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    )
    assert second["bytes_down"] == 3 * first["bytes_down"]
    assert [step for step in listener.steps if step[0] == "score"] == [("score", k, 6) for k in range(1, 7)]
    totals = RunReader(tmp_path / "run").commit.totals
    assert totals["bytes_up"] == first["bytes_up"] + second["bytes_up"]
    assert totals["communicated"] == 12


def test_an_evaluation(tmp_path):
    """Accuracies over clients, from the toy's distances; personal models next to the shared one.

    A pair of the toy is chosen if the model is nearer to the target a than to −a: φ·a > 0.
    """
    server = toy.run(tmp_path / "run", rounds=3, every=0)
    rounds = records(tmp_path / "run")
    assert [("evaluation" in record) for record in rounds] == [False, False, True]
    options = toy.options()
    trainers = toy.ToyTrainers(options)
    reader, evaluation = RunReader(tmp_path / "run"), rounds[-1]["evaluation"]
    for client, data in trainers.data.items():
        shared = trainers.initial.replace(server.tensors["model"])
        private = reader.client(client)
        own = shared if private is None else shared.replace(private.tensors["personal"])
        for name, flat in (
            ("preference_accuracy", own.flat),
            ("shared_accuracy", shared.flat),
            ("baseline_accuracy", trainers.initial.flat),
        ):
            expected = float((data.targets @ flat > 0).double().mean())
            assert evaluation[name]["per_client"][client] == pytest.approx(expected, abs=1e-12)
    values = list(evaluation["preference_accuracy"]["per_client"].values())
    assert rounds[-1]["preference_accuracy"] == evaluation["preference_accuracy"]["mean"]
    assert evaluation["preference_accuracy"]["mean"] == pytest.approx(sum(values) / 6)
    assert evaluation["preference_accuracy"]["worst"] == min(values)


def test_a_reward_heads_margin_weighs_as_the_method_says():
    """Pair j has Δ_er = −Δ_ir / (j + ½), so that Δ_ir + w Δ_er = Δ_ir (1 − w / (j + ½)) is above 0 where
    Δ_ir > 0 and j + ½ > w, or neither. The toy's w: the round times the client's visits."""

    class Rewarded(toy.ToyTrainers):
        def score(self, client, tensors, split):
            scores = super().score(client, tensors, split)
            margin = (scores.policy - scores.reference) @ [1, -1]
            head = -margin / (np.arange(len(margin)) + 0.5)
            return replace(scores, rewards=np.stack([head, np.zeros_like(head)], 1))

    trainers = Rewarded(toy.options())
    method = replace(
        toy.toy_method(toy.options()), reward_weight=lambda private, number: number * private.values["visits"]
    )
    job, client = Job(trainers, method, 7, 4), "Client 2/ü"
    server = method.init_server(trainers.initial)
    moved = State({"model": server.tensors["model"] + 0.5}, server.values)
    private = method.init_client(trainers.initial, client).update(values={"visits": 2})
    task = Task("evaluate", client, 3, "", encode(method.publish(moved, client)))
    figures = json.loads(run_task(job, task, toy.MemoryStates({client: encode(private)})).message)
    own = trainers.initial.replace(moved.tensors["model"]).replace(private.tensors["personal"])
    scores = trainers.score(client, own, "test")
    positive = (scores.policy - scores.reference) @ [1, -1] > 0
    later = np.arange(len(positive)) + 0.5 > 3 * 2
    assert later.any()
    assert figures["combined_accuracy"] == np.mean(positive == later)
    assert figures["agreement"] == 0


def test_models_that_diverged_are_named(tmp_path):
    """From round 2 on all pairs of two clients have no number: each such evaluation warns once and says
    whose, and their accuracy is 0; of round 1, where all is well, the record has no such key."""

    class Diverging(toy.ToyTrainers):
        def score(self, client, tensors, split):
            scores = super().score(client, tensors, split)
            gone = client in ("Client 2/ü", "Client 4/ü") and self.now > 1
            return replace(scores, policy=scores.policy * np.nan) if gone else scores

        def trainer(self, client, now, key, ownership):
            self.now = now.number
            return super().trainer(client, now, key, ownership)

    trainers, listener = Diverging(toy.options()), Listener()
    toy.run_job(
        tmp_path / "run",
        Job(trainers, toy.toy_method(toy.options()), 7, 3, CohortConfig(size=3)),
        callback=listener,
    )
    first, second, third = (record["evaluation"] for record in records(tmp_path / "run"))
    pairs = {client: len(trainers.data[client].targets) for client in ("Client 2/ü", "Client 4/ü")}
    assert second["not_finite"] == third["not_finite"] == pairs
    assert "not_finite" not in first
    assert third["preference_accuracy"]["per_client"]["Client 4/ü"] == 0
    words = f"{pairs['Client 2/ü']} of {pairs['Client 2/ü']} pairs of client 'Client 2/ü'"
    words += " have no finite log-probability, as have 1 more; lower method.lr"
    assert listener.warnings == [f"round {k}: {words}" for k in (2, 3)]


def test_clients_without_test_pairs_are_left_out_and_counted(tmp_path):
    toy.run(tmp_path / "run", rounds=1, untested=["Client 0/ü", "Client 3/ü"])
    evaluation = records(tmp_path / "run")[0]["evaluation"]
    assert (evaluation["clients"], evaluation["left_out"]) == (4, 2)
    assert "Client 3/ü" not in evaluation["preference_accuracy"]["per_client"]


def test_no_test_pair_at_all_is_an_error():
    everybody = [f"Client {number}/ü" for number in range(6)]
    with pytest.raises(ValueError, match=r"^split = 'test'"):
        toy.build(toy.text(untested=everybody))


def test_clients_without_training_pairs_are_evaluated_but_never_asked(tmp_path):
    toy.run(tmp_path / "run", rounds=2, cohort=None, untrained=["Client 1/ü"])
    for record in records(tmp_path / "run"):
        assert len(record["cohort"]) == 5
        assert "Client 1/ü" not in record["cohort"]
        assert "Client 1/ü" in record["evaluation"]["preference_accuracy"]["per_client"]


def test_only_some_are_evaluated(tmp_path):
    toy.run(tmp_path / "run", rounds=2, evaluation_cohort=2)
    first, second = (
        set(r["evaluation"]["preference_accuracy"]["per_client"]) for r in records(tmp_path / "run")
    )
    assert len(first) == 2
    assert first == second


def test_a_cohort_is_drawn_without_replacement_from_the_round_alone():
    job = toy.build(toy.text(clients=20, cohort=7))
    cohorts = [job.sample(job.round(number)) for number in range(1, 30)]
    assert all(len(set(cohort)) == 7 for cohort in cohorts)
    assert len(set(cohorts)) > 20
    assert cohorts[4] == job.sample(job.round(5))
    assert set().union(*cohorts) == set(job.members)


def test_a_cohort_larger_than_the_federation_is_refused():
    with pytest.raises(ValueError, match=r"^cohort = 7, but only 6 clients"):
        toy.build(toy.text(cohort=7))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "NaN or infinity"),
        ("leak", "not shared: head"),
        ("number", "does not expect: first_prompt_length"),
        ("infinite", "'loss' is inf"),
        ("heavy", "has weight 1000000"),
        ("light", r"has weight 1\.0, not its \d+ training pairs"),
        ("shape", r"lora/0/A in group 'model' has shape \(3, 2\), not \(2, 3\)"),
        ("stranger", "is from a client other than 'Client 2/ü'"),
    ],
)
def test_a_bad_upload_is_dropped_and_named(tmp_path, fault, reason):
    """A round with a bad client merges what the round without it would have merged."""
    bad, listener = "Client 2/ü", Listener()
    toy.run(tmp_path / "bad", rounds=1, cohort=None, faults={bad: fault}, callback=listener)
    (record,) = records(tmp_path / "bad")
    (drop,) = record["dropped"]
    assert (drop["client"], drop["exchange"]) == (bad, "train")
    assert re.search(reason, drop["reason"])
    assert len(listener.warnings) == 1
    assert bad in listener.warnings[0]
    toy.run(tmp_path / "without", rounds=1, cohort=None, untrained=[bad])
    left, right = RunReader(tmp_path / "bad"), RunReader(tmp_path / "without")
    assert left.server().tensors["model"].equal(right.server().tensors["model"])
    assert left.client(bad) is None  # a visit that came to nothing leaves no private state
    assert left.commit.totals["dropped"] == 1


def test_what_must_not_leave_never_becomes_bytes():
    """The client's own side withholds: the refused upload is not encoded at all."""
    client = "Client 2/ü"
    job = toy.build(toy.text(faults={client: "leak"}))
    server = job.method.init_server(job.trainers.initial)
    message = encode(job.method.exchanges[1].send(server, client, job.round(1)))
    states = toy.MemoryStates()
    result = run_task(job, Task("visit", client, 1, "train", message), states)
    assert result.message == b""
    assert states.staged == {}
    assert "head" in result.withheld


def test_if_nothing_can_be_merged_the_server_keeps_its_state(tmp_path):
    listener = Listener()
    everybody = {f"Client {number}/ü": "nan" for number in range(6)}
    server = toy.run(tmp_path / "run", rounds=3, faults=everybody, callback=listener)
    job = toy.build(toy.text())
    assert server.tensors["model"].equal(job.method.init_server(job.trainers.initial).tensors["model"])
    assert sum("server keeps its state" in warning for warning in listener.warnings) == 3
    assert [record["loss"] for record in records(tmp_path / "run")] == [None] * 3


def test_a_client_without_private_state_writes_nothing(tmp_path):
    toy.run(tmp_path / "run", personal=False)
    assert list((tmp_path / "run/checkpoint/clients").iterdir()) == []
    assert "shared_accuracy" not in records(tmp_path / "run")[0]["evaluation"]


def test_pooled_is_one_client_on_all_pairs(tmp_path):
    """Oracle: the plain engine on one client with everybody's targets. All are judged."""
    server = toy.run(tmp_path / "run", pooled=True, personal=False)
    options = toy.options(pooled=True, personal=False)
    trainers, method = toy.ToyTrainers(options), toy.toy_method(options)
    whole = {POOLED: Quadratic(torch.cat([trainers.data[name].targets for name in sorted(trainers.data)]))}
    plain = simulate(method, whole, trainers.initial, 4, seed=7)
    assert server.tensors["model"].equal(plain.server.tensors["model"])
    (record, *_) = records(tmp_path / "run")
    assert record["cohort"] == [POOLED]
    assert len(record["evaluation"]["preference_accuracy"]["per_client"]) == 6


def test_no_client_may_have_the_name_of_all(tmp_path):
    """Its pairs would be taken for everybody's. Where methods do not pool it is a name like any other."""

    class Named(toy.ToyTrainers):
        def __init__(self, options):
            super().__init__(options)
            self.clients = {POOLED: self.clients.pop("Client 0/ü"), **self.clients}

    options = toy.options(pooled=True)
    with pytest.raises(ValueError, match="a client in the data has that name: rename it"):
        Job(Named(options), toy.toy_method(options), 7, 4)
    assert POOLED in Job(Named(options), toy.toy_method(toy.options()), 7, 4).members


def test_pooling_one_client_changes_nothing(tmp_path):
    """Law: one client ≡ centralised."""
    one = toy.run(tmp_path / "one", clients=1, cohort=None, personal=False)
    pooled = toy.run(tmp_path / "pooled", clients=1, cohort=None, personal=False, pooled=True)
    assert one.tensors["model"].equal(pooled.tensors["model"])


def test_private_states_can_be_kept_in_bfloat16(tmp_path):
    """Kept rounded they are half the size or less, and a resumed run still equals the whole one."""
    job = toy.build(toy.text())
    for name, stops in (("whole", [4]), ("stopped", [2, 4])):
        for number in stops:
            half = Job(job.trainers, job.method, 7, number, CohortConfig(size=3), state_dtype=torch.bfloat16)
            toy.run_job(tmp_path / name, half, resume=(tmp_path / name).exists())
    left, right = RunReader(tmp_path / "whole"), RunReader(tmp_path / "stopped")
    for client in job.trainers.clients:
        mine, other = left.client(client), right.client(client)
        assert (mine is None) == (other is None)
        if mine is not None and "personal" in mine.tensors:
            assert mine.tensors["personal"].equal(other.tensors["personal"])
            rounded = mine.tensors["personal"].to(torch.bfloat16).to(torch.float64)
            assert mine.tensors["personal"].equal(rounded)


def test_an_exception_in_a_visit_carries_its_place(tmp_path):
    class Broken(toy.ToyTrainers):
        def trainer(self, *arguments):
            raise RuntimeError("no such file")

    job = toy.build(toy.text())
    broken = Job(Broken(toy.options()), job.method, 7, 4)
    with pytest.raises(RuntimeError) as caught:
        run_task(broken, Task("visit", "Client 1/ü", 3, "train", b""), toy.MemoryStates())
    assert caught.value.__notes__ == ["(client 'Client 1/ü', round 3, train)"]


def test_parts_must_cover_the_model():
    job = toy.build(toy.text())

    class Bare(toy.ToyTrainers):
        def __init__(self, options):
            super().__init__(options)
            self.initial = self.initial.select(job.method.ownership.names(Owner.SHARED))

    with pytest.raises(ValueError, match="only in the ownership: head, norm"):
        Job(Bare(toy.options()), job.method, 7, 4)


def test_the_seed_decides(tmp_path):
    models = [toy.run(tmp_path / str(seed), seed=seed, rounds=2).tensors["model"] for seed in (1, 2)]
    assert not models[0].equal(models[1])
    assert math.isfinite(models[0].norm())
    assert Key(1).at("round", 1).number() != Key(2).at("round", 1).number()
