"""Whole runs of FedBiscuit on the toy federation: its log, evaluation, stops, workers, its bytes."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tests.engines.test_hostile import BAD, forging, scaled
from tests.engines.test_privacy import SMALL, Eavesdropper

import toy
from prefed.core.wire import decode_upload, encode
from prefed.engines import BACKENDS, InProcess, ServerRounds
from prefed.engines.config import EvaluateConfig
from prefed.engines.tasks import evaluate_client, evaluate_newcomer
from prefed.store import RunReader, RunWriter
from toy import Warned

BISCUIT = {"selectors": 2, "warmup_rounds": 1, "regroup_every": 2, "cluster_mean": "normalised"}
BISCUIT |= {"lr": 0.3, "local_steps": 8}
OPTIONS = {"method": "fedbiscuit", "settings": BISCUIT, "rounds": 5}
NAMES = [f"Client {number}/ü" for number in range(6)]


def play(path, backend=InProcess, resume=False, **changes):
    listener = Warned()
    server = toy.run(path, resume=resume, backend=backend, callback=listener, **{**OPTIONS, **changes})
    return server, RunReader(path).rounds(), listener.texts


def test_the_log_has_clusters_who_moved_and_each_selectors_loss(tmp_path):
    """Groupings are in rounds 3 and 5. The means are those of what the clients' exchange gives, by hand."""
    server, rounds, warnings = play(tmp_path / "run")
    assert warnings == []
    assert ["clusters" in record for record in rounds] == [False, False, True, False, True]
    assert rounds[2]["moved"] == []
    first, second = rounds[2]["clusters"], rounds[4]["clusters"]
    assert sorted(second[0] + second[1]) == NAMES
    assert sorted(map(len, second)) == [3, 3]
    assert rounds[4]["moved"] == sorted(name for name in NAMES if (name in first[0]) != (name in second[0]))
    assert {name: u for u, one in enumerate(second) for name in one} == dict(server.values["clusters"])
    job, before = toy.build(toy.text(**OPTIONS)), toy.run(tmp_path / "four", **{**OPTIONS, "rounds": 4})
    data = [job.trainers.data[name] for name in NAMES]
    for u, mean in enumerate(rounds[4]["selector_losses"]):
        model = job.trainers.initial.replace(before.tensors[f"selector-{u}"]).flat
        losses = [min(10.0, float(((model - d.targets) ** 2).sum(1).mean()) / 2) for d in data]
        assert mean == pytest.approx(sum(losses) / 6)
    assert rounds[4]["balance_gap"] == pytest.approx(0, abs=1e-12)
    for number, record in enumerate(rounds, 1):
        own = record["selectors"]
        if number <= 2:
            assert list(own) == [f"selector-{number - 1}"]
        assert sum(figures["merged"] for figures in own.values()) == 3
        assert set(record["evaluation"]) >= {
            "majority_accuracy",
            "choice_loss",
            "margin",
            "baseline_accuracy",
        }
        assert not set(record["evaluation"]) & {"dpo_loss", "normalized_accuracy", "shared_accuracy"}


def test_a_client_is_evaluated_with_its_clusters_selector_and_by_the_vote(tmp_path):
    server, rounds, _ = play(tmp_path / "run", settings={**BISCUIT, "selectors": 3}, cohort=6)
    job = toy.build(toy.text(**{**OPTIONS, "settings": {**BISCUIT, "selectors": 3}}))
    for client, u in server.values["clusters"].items():
        models = [job.trainers.initial.replace(server.tensors[f"selector-{k}"]) for k in range(3)]
        jury = [job.trainers.score(client, model, "test") for model in models]
        expected = jury[u].metrics(jury=jury)
        for name in ("preference_accuracy", "majority_accuracy"):
            assert rounds[-1]["evaluation"][name]["per_client"][client] == expected[name]
        for k, each in enumerate(jury):
            alone = rounds[-1]["evaluation"][f"selector_{k}_accuracy"]["per_client"][client]
            assert alone == each.metrics()["preference_accuracy"]
        votes = sum(np.sign(each.orders.mean(1)) for each in jury)
        assert expected["majority_accuracy"] == (votes > 0).mean()


def test_in_warm_up_clients_are_evaluated_with_the_selector_that_was_trained(tmp_path):
    server, rounds, _ = play(tmp_path / "run", rounds=1)
    job = toy.build(toy.text(**{**OPTIONS, "rounds": 1}))
    model = job.trainers.initial.replace(server.tensors["selector-0"])
    for client in NAMES:
        own = job.trainers.score(client, model, "test").metrics()["preference_accuracy"]
        assert rounds[0]["evaluation"]["preference_accuracy"]["per_client"][client] == own


def test_a_newcomer_takes_the_selector_of_its_least_loss_on_its_training_pairs(tmp_path):
    server, *_ = play(tmp_path / "run")
    job = replace(toy.build(toy.text(**OPTIONS)), evaluate=EvaluateConfig(unseen_steps=[0, 2]))
    for client in NAMES:
        published = job.method.publish(server, client)
        models = [job.trainers.initial.replace(server.tensors[f"selector-{u}"]) for u in (0, 1)]
        targets = job.trainers.data[client].targets
        best = min(models, key=lambda model: float(((model.flat - targets) ** 2).sum()))
        trainer = job.trainer(client, 5, "predict")
        assert job.method.newcomer(trainer, published).equal(best)
        adapted = job.method.adapt(trainer, published, 2)
        # Two steps of AdamW at this rate move each of 17 numbers by no more than about 0.6.
        assert 0 < (adapted - best).norm() < 2.6
        own = job.trainers.score(client, best, "test").metrics()["preference_accuracy"]
        assert evaluate_newcomer(job, client, published, 5)["0"] == own


def test_newcomers_report_every_selector_and_small_clients_are_in_means_alone(tmp_path):
    """The published selectors on a newcomer's pairs, without a step of its own."""
    job = replace(
        toy.build(toy.text(**OPTIONS)), unseen=NAMES[4:], evaluate=EvaluateConfig(unseen_steps=[0, 2])
    )
    listener, names = Warned(), ["majority_accuracy", "selector_0_accuracy", "selector_1_accuracy"]
    with RunWriter(tmp_path) as writer, InProcess(job, writer.states) as backend:
        writer.begin(encode(job.method.init_server(job.trainers.initial)), job.trainers.fingerprint)
        server = ServerRounds(job, writer, backend, listener).run()
    assert listener.texts == []
    evaluation = RunReader(tmp_path).rounds()[-1]["evaluation"]
    assert list(evaluation["unseen_accuracy"]) == ["0", "2"]
    assert list(evaluation["unseen_selectors"]) == names
    for client in NAMES[4:]:
        for u in (0, 1):
            model = job.trainers.initial.replace(server.tensors[f"selector-{u}"])
            own = job.trainers.score(client, model, "test").metrics()["preference_accuracy"]
            assert evaluation["unseen_selectors"][names[1 + u]]["per_client"][client] == own
    _, rounds, _ = play(tmp_path / "small", minimum_pairs=5)
    listed = set(rounds[-1]["evaluation"]["preference_accuracy"]["per_client"])
    assert listed < set(NAMES)
    for name in names:
        assert set(rounds[-1]["evaluation"][name]["per_client"]) == listed


def test_a_grouping_uploads_as_many_losses_as_there_are_selectors_and_nothing_else(tmp_path):
    """Bytes of every upload, decoded: no tensor and U numbers in "score"; small clients send none of them."""
    uploads = []
    play(tmp_path / "run", partial(Eavesdropper, uploads=uploads), cohort=None, minimum_pairs=5)
    scores = [upload for upload in uploads if not upload.tensors]
    assert len(uploads) == 5 * 6 + len(scores)
    assert len(scores) == 2 * 6
    for upload in scores:
        assert set(upload.scalars) == (set() if upload.client in SMALL else {"loss_0", "loss_1"})
        assert len(encode(upload)) < 600


def test_clients_that_are_never_scored_go_where_fewest_are(tmp_path):
    """Clients that may not report, two or more here, are placed after the others, and stay at later
    groupings."""
    server, rounds, _ = play(tmp_path / "run", cohort=None, minimum_pairs=5)
    members = server.values["clusters"]
    assert set(members) == set(NAMES)
    tellers = [sorted(set(one) - SMALL) for one in rounds[2]["clusters"]]
    assert abs(len(tellers[0]) - len(tellers[1])) <= 1
    sizes = [len(one) for one in rounds[2]["clusters"]]
    assert abs(sizes[0] - sizes[1]) <= 1
    assert not set(rounds[4]["moved"]) & SMALL


def test_unreachable_clients_keep_their_cluster(tmp_path):
    """From the second grouping on two clients answer no more, whatever the others' losses say."""

    gone = NAMES[:2]

    class Deaf(InProcess):
        def run(self, tasks):
            return super().run(t for t in tasks if t.round < 5 or not t.exchange or t.client not in gone)

    server, rounds, _ = play(tmp_path / "run", Deaf, cohort=None)
    before = {name: u for u, one in enumerate(rounds[2]["clusters"]) for name in one}
    after = server.values["clusters"]
    assert [after[name] for name in gone] == [before[name] for name in gone]
    others = [after[name] for name in NAMES if name not in gone]
    assert sorted(map(others.count, (0, 1))) == [2, 2]


def test_a_client_may_lie_about_its_losses_but_not_end_the_run(tmp_path):
    """NaN is not let in, and then the client is as one that is not reached; a number beyond the highest loss
    counts as the highest: the run is bit for bit that of a client that sends 10."""

    def claiming(value):
        def forge(message):
            upload = decode_upload(message)
            return (
                message
                if upload.tensors
                else encode(replace(upload, scalars={"loss_0": 0.0, "loss_1": value}))
            )

        return forging(forge)

    bold, *_ = play(tmp_path / "bold", claiming(1e30))
    modest, *_ = play(tmp_path / "modest", claiming(10.0))
    assert encode(bold) == encode(modest)
    _, rounds, warnings = play(tmp_path / "nan", claiming(float("nan")))
    assert [drop["client"] for drop in rounds[2]["dropped"]] == [BAD]
    assert "loss_1" in warnings[0]


def test_an_oversized_update_is_refused_against_its_own_selector(tmp_path):
    """Its size is compared with the whole cohort's, though a cluster has but three or fewer uploads."""
    _, rounds, _ = play(tmp_path / "run", forging(scaled(1e9)), cohort=None)
    assert [[drop["client"] for drop in record["dropped"]] for record in rounds] == [[BAD]] * 5
    assert "times the median of the round" in rounds[4]["dropped"][0]["reason"]


def test_a_run_stopped_after_any_task_goes_on_to_the_same_bytes(tmp_path):
    """In warm-up, in a grouping, between it and its round's training, in an evaluation."""
    options = {**OPTIONS, "clients": 4, "cohort": 2, "rounds": 4}
    toy.run(tmp_path / "whole", **options)
    job = toy.build(toy.text(**options))
    for task in (2, 5, 13, 15, 17, 19, 25):
        path = tmp_path / str(task)
        with RunWriter(path) as writer, InProcess(job, writer.states) as backend:
            writer.begin(encode(job.method.init_server(job.trainers.initial)), job.trainers.fingerprint)
            with pytest.raises(KeyboardInterrupt):
                ServerRounds(job, writer, backend, toy.InterruptAt(task)).run()
        toy.run(path, resume=True, **options)
        assert toy.outcome(path) == toy.outcome(tmp_path / "whole"), f"after task {task}"


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "in_process"])
def test_any_number_of_workers_and_any_order_of_clients_give_the_same_bytes(name, tmp_path):
    toy.run(tmp_path / "here", **OPTIONS)
    backend = partial(toy.registered, name, toy.text(**OPTIONS), workers=2)
    toy.run(tmp_path / "there", backend=backend, **OPTIONS)
    toy.run(tmp_path / "back", order=-1, **OPTIONS)
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there") == toy.outcome(tmp_path / "back")


def test_figures_of_a_selector_are_what_a_server_expects(tmp_path):
    """A vote where there are several selectors, none for one; never a figure of policies."""
    for count in (1, 2):
        options = {**OPTIONS, "settings": {**BISCUIT, "selectors": count}}
        server, rounds, warnings = play(tmp_path / str(count), settings=options["settings"])
        assert ("majority_accuracy" in rounds[-1]["evaluation"]) == (count > 1)
        assert warnings == []
        job = toy.build(toy.text(**options))
        client = NAMES[0]
        figures = evaluate_client(job, client, job.method.init_client(job.trainers.initial, client),
                                  job.method.publish(server, client), 5)  # fmt: skip
        assert json.loads(json.dumps(figures)).keys() == figures.keys()
