"""Rounds with ``[privacy] kind``: what leaves a client, what the server merges, what is counted."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.engines.test_privacy import Eavesdropper

import toy
from prefed.core import Key
from prefed.core.wire import encode
from prefed.engines import InProcess, privacy
from prefed.engines.cohorts import draw_cohort
from prefed.networks.peers.run import of_peer
from prefed.store import RunReader, RunWriter, StoreError
from prefed.store.commit import RoundStarts

LOCAL = {"kind": "local", "clip": 0.3, "noise_multiplier": 1.0, "delta": 1e-5}
CENTRAL = {**LOCAL, "kind": "central"}
DISTRIBUTED = {**LOCAL, "kind": "distributed"}
UNIFORM = {"method": "feddpo", "merge": {"weights": "uniform"}, "rounds": 3}


@pytest.fixture(autouse=True)
def accountant(monkeypatch):
    """ε = number of releases: what the accountant makes of them is asked in its own tests."""
    monkeypatch.setattr("prefed.privacy.accountant.require", lambda: None)
    monkeypatch.setattr(privacy.Guarantee, "epsilon", lambda self, releases, delta: float(releases))


def heard(folder, **options):
    """The run's server state, and every upload that left a client."""
    uploads = []
    return toy.run(folder, backend=partial(Eavesdropper, uploads=uploads), **options), uploads


def test_a_local_upload_has_noise_and_no_number(tmp_path):
    """The same visit without noise is the oracle: in round 1 all start from one model, so that clipped update
    plus noise is what the upload differs by."""
    _, plain = heard(tmp_path / "plain", **UNIFORM, privacy={**LOCAL, "noise_multiplier": 0.0})
    _, noisy = heard(tmp_path / "noisy", **UNIFORM, privacy=LOCAL)
    start = toy.build(toy.text()).trainers.initial
    size = 0
    for one, other in zip(plain[:3], noisy[:3], strict=True):
        assert (one.client, one.sent_at) == (other.client, other.sent_at)
        assert (other.weight, other.scalars) == (1.0, {})
        model, got = one.tensors["model"], other.tensors["model"]
        assert (model - start.select(model)).norm() <= 0.3 + 1e-12
        draws = (got - model).flat / 0.3
        size += len(draws)
        assert 0.4 < float(draws.std()) < 2  # 17 draws of N(0, 1)
    assert size == 3 * 17


def test_noise_is_drawn_anew_for_each_client_and_round(tmp_path):
    uploads = heard(tmp_path / "run", **UNIFORM, cohort=None, privacy=LOCAL)[1]
    _, plain = heard(tmp_path / "plain", **UNIFORM, cohort=None, privacy={**LOCAL, "noise_multiplier": 0.0})
    first = [
        (a.tensors["model"] - b.tensors["model"]).flat for a, b in zip(uploads[:6], plain[:6], strict=True)
    ]
    together = torch.stack(first)
    assert len({tuple(row.tolist()) for row in together}) == 6
    # Rows of 17 independent draws: no two are nearly one direction.
    unit = together / together.norm(dim=1, keepdim=True)
    assert float((unit @ unit.T - torch.eye(6, dtype=unit.dtype)).abs().max()) < 0.95


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("privacy", [LOCAL, CENTRAL, DISTRIBUTED])
def test_worker_processes_give_the_same_noise(privacy, tmp_path):
    options = {**UNIFORM, "privacy": privacy}
    toy.run(tmp_path / "here", **options)
    toy.run(tmp_path / "there", backend="processes", **options)
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there")


SUMMED = "feddpo", "fedprox", "scaffold", "fedpdpo", "fedper", "fedrep", "fedbis", "lore", "pal"


@pytest.mark.parametrize(
    ("method", "merge"), [*((name, {}) for name in SUMMED), ("feddpo", {"optimizer": {"name": "fedavgm"}})]
)
def test_a_distributed_mean_is_the_central_one(method, merge, tmp_path):
    """With next to no noise, of zC √(6/4)/3 = 1.2e-4 a round on each number, and steps of less than that."""
    options = {**UNIFORM, "method": method, "merge": {"weights": "uniform", **merge}}
    central = toy.run(tmp_path / "central", **options, privacy={**CENTRAL, "noise_multiplier": 0.0})
    noise = {**DISTRIBUTED, "noise_multiplier": 1e-3}
    summed = toy.run(tmp_path / "distributed", **options, privacy=noise)
    start = toy.build(toy.text(method=method)).trainers.initial
    moved = central.tensors["model"] - start.select(central.tensors["model"])
    assert float(moved.norm()) > 0.05
    assert ("control" in central.tensors) == (method == "scaffold")
    for group, tensors in central.tensors.items():
        assert 0 < float((tensors - summed.tensors[group]).flat.abs().max()) < 2e-3


@pytest.mark.parametrize("privacy", [LOCAL, CENTRAL, DISTRIBUTED])
def test_a_nan_is_dropped_and_a_round_goes_on(privacy, tmp_path):
    """The toy's own method, which averages by weight: all weigh 1 here."""
    options = {"faults": {"Client 1/ü": "nan"}, "cohort": None, "rounds": 2, "privacy": privacy}
    server = toy.run(tmp_path / "run", **options)
    assert server.tensors["model"].isfinite()
    for record in RunReader(tmp_path / "run").rounds():
        assert [each["client"] for each in record["dropped"]] == ["Client 1/ü"]
        assert "NaN" in record["dropped"][0]["reason"]


def test_a_central_merge_sees_copies_of_one_mean(tmp_path):
    """Whatever a method makes of its uploads, it is made of the noised mean: no upload is among them."""
    seen, uploads = [], []
    job = toy.build(toy.text(**UNIFORM, privacy=CENTRAL, faults={}))
    (train,) = job.method.exchanges

    def merge(server, those, now):
        seen.append(those)
        return train.merge(server, those, now)

    job = replace(job, method=replace(job.method, exchanges=(replace(train, merge=merge),)))
    toy.run_job(tmp_path / "run", job, partial(Eavesdropper, uploads=uploads))
    assert [len(those) for those in seen] == [3, 3, 3]
    for those in seen:
        first, *others = (each.tensors["model"] for each in those)
        assert all(first.equal(other) for other in others)
        assert not any(first.equal(upload.tensors["model"]) for upload in uploads)


def test_a_step_for_all_clients_is_not_hidden_by_the_draw_of_a_cohort():
    """One client is drawn, but each step asks all six: the guarantee is that of a cohort of all."""
    settings = {**CENTRAL, "secret_cohorts": True}
    drawn, whole = (toy.build(toy.text(**UNIFORM, cohort=size, privacy=settings)) for size in (1, None))
    steps = tuple(replace(each, to="all") for each in drawn.method.exchanges)
    everyone = replace(drawn, method=replace(drawn.method, exchanges=steps))
    assert privacy.guarantee(drawn) != privacy.guarantee(whole)
    assert privacy.guarantee(everyone) == privacy.guarantee(whole)


def test_a_central_round_without_uploads_has_noise_all_the_same(tmp_path):
    """Poisson cohorts may be empty: a model that did not change would show it."""
    privacy = {**CENTRAL, "secret_cohorts": True}
    job = toy.build(toy.text(**UNIFORM, cohort=1, privacy=privacy))
    job = replace(job, cohort=job.cohort.model_copy(update={"sampling": "poisson"}))
    empty = [n for n in range(1, 40) if not job.sample(job.round(n))]
    assert empty
    job = replace(job, rounds=empty[0])
    states = []
    with RunWriter(tmp_path / "run") as writer, InProcess(job, writer.states) as backend:
        writer.begin(encode(job.method.init_server(job.trainers.initial)), job.trainers.fingerprint)
        rounds = course_of(job, writer, backend, states)
        rounds.run()
    before, after = states[-2:]
    assert not before.equal(after)
    assert (after - before).norm() < 0.3 * 1.0 * 10
    assert RunReader(tmp_path / "run").rounds()[-1]["cohort"] == []


def course_of(job, writer, backend, states):
    from prefed.core import Callback
    from prefed.core.wire import decode_state
    from prefed.engines import ServerRounds

    class Watch(Callback):
        def on_round_end(self, record):
            states.append(decode_state(writer.server()).tensors["model"])

    states.append(job.method.init_server(job.trainers.initial).tensors["model"])
    return ServerRounds(job, writer, backend, Watch())


def test_poisson_draws_each_client_with_one_probability():
    """Of 4000 rounds with 2 of 6 each client is in 1333 ± 30: five deviations are 149. Sizes of cohorts vary,
    as their deviation √(6 · 1/3 · 2/3) says."""
    key, times, sizes = Key(1), [0] * 6, []
    for number in range(4000):
        drawn = draw_cohort(key.at("round", number), 6, 2, "poisson")
        sizes.append(float(len(drawn)))
        for index in drawn:
            times[index] += 1
    assert all(abs(count - 4000 / 3) < 149 for count in times)
    assert torch.tensor(sizes).std().item() == pytest.approx((4 / 3) ** 0.5, rel=0.06)


def test_releases_are_those_of_the_client_that_takes_part_most(tmp_path):
    """3 of 6 clients a round: by the cohorts of the log. Secret cohorts: each round counts for all."""
    toy.run(tmp_path / "known", **{**UNIFORM, "rounds": 6}, privacy=CENTRAL)
    records, counts = RunReader(tmp_path / "known").rounds(), {}
    for record in records:
        for client in record["cohort"]:
            counts[client] = counts.get(client, 0) + 1
        assert record["epsilon"] == max(counts.values())
    assert records[-1]["epsilon"] < 6
    toy.run(tmp_path / "secret", **{**UNIFORM, "rounds": 6}, privacy={**CENTRAL, "secret_cohorts": True})
    assert [r["epsilon"] for r in RunReader(tmp_path / "secret").rounds()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("draws", "most"), [("seed", 2), ("system", 3)])
def test_a_round_that_is_done_again_is_counted_again(draws, most, tmp_path):
    """Stopped in round 2 after two tasks of three, and resumed. Noise of the seed is the same the second
    time; other noise on the same numbers is one more release."""
    options = {**UNIFORM, "rounds": 2, "cohort": None, "every": 0, "privacy": {**LOCAL, "draws": draws}}
    with pytest.raises(KeyboardInterrupt):
        toy.run(tmp_path / "run", callback=toy.InterruptAt(6 + 2), **options)
    toy.run(tmp_path / "run", resume=True, **options)
    assert [record["epsilon"] for record in RunReader(tmp_path / "run").rounds()] == [1, most]
    assert (tmp_path / "run/checkpoint/starts.json").exists() == (draws == "system")


def test_system_noise_is_not_that_of_the_seed(tmp_path):
    """Two runs of one seed differ; with noise of the seed they are one."""
    for draws, same in (("seed", True), ("system", False)):
        options = {**UNIFORM, "rounds": 1, "privacy": {**LOCAL, "draws": draws}}
        one, other = (toy.run(tmp_path / f"{draws}{k}", **options) for k in (1, 2))
        assert one.tensors["model"].equal(other.tensors["model"]) == same


def test_a_damaged_count_is_an_error(tmp_path):
    path = tmp_path / "starts.json"
    started = RoundStarts(path)
    started.add(1), started.add(2), started.add(2)
    assert started.times() == {1: 1, 2: 2}
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(json.dumps({"starts": {"1": "often"}}))
    with pytest.raises(StoreError, match="10: 'often'; without it the"):
        started.times()
    path.rename(tmp_path / "begun.json")
    with pytest.raises(StoreError, match=r"begun\.json is of prefed 0\.1\.0"):
        started.times()


def test_peers_draw_from_the_system(experiment):
    assert of_peer(experiment(LOCAL)).privacy.draws == "system"
    assert of_peer(experiment(LOCAL)).privacy.clip == 0.3
    message = "all members of a federation know the seed and could remove the noise; remove draws"
    with pytest.raises(ValueError, match=message):
        of_peer(experiment({**LOCAL, "draws": "seed"}))


@pytest.fixture
def experiment():
    from prefed.config import Experiment

    def make(privacy):
        return Experiment(
            data={"train": "pairs.jsonl", "partition": {"by": "iid", "clients": 4}},
            model={"name": "some/model"},
            method={"name": "decdpo"},
            privacy=privacy,
        )

    return make
