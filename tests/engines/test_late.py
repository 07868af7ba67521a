"""Rounds in which uploads are late: drawn delays and buffered servers, on the toy federation."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import toy
from law_examples import examples
from prefed.core import Owner, State, Tensors
from prefed.engines import Job
from prefed.engines.cohorts import ScheduledRound, Visit
from prefed.engines.config import CohortConfig, FleetConfig
from prefed.engines.simulated_fleet import FleetError
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.store import RunReader
from prefed.testing import QuadraticTrainer
from toy import records

LATE = {*("feddpo", "fedsft", "fedprox", "fedpdpo", "fedper", "fedrep", "perfedavg", "feddpa")}
LATE |= {"ditto", "pfedme", "fedala", "fedbn", "fedbis", "lore", "pal"}
"""Methods whose merge is a mean of models. The others take no late uploads by default."""
BUFFERED = {"server": "buffered", "buffer": 2, "speeds": "lognormal", "spread": 0.8}
CLOCKED = ("time", "staleness", "visits", "lost")


def job(fleet=None, *, method="fedbn", merge=None, rounds=5, cohort=4, **chosen):
    """The toy's clients with a registered method; FedBN keeps its ``norm`` at each client."""
    options = toy.options(rounds=rounds)
    trainers, kind = toy.ToyTrainers(options), METHODS[method]
    settings = kind.Settings(**{"lr": 0.05, "local_steps": 2, "batch_size": 2, **chosen})
    layout = trainers.initial.layout
    made = kind.build(settings, layout, Aggregator(merge or MergeConfig(), layout, 2.0), rounds)
    return Job(
        trainers,
        made,
        7,
        rounds,
        CohortConfig(size=cohort),
        fleet=None if fleet is None else FleetConfig(**fleet),
    )


def left(path):
    """What a run leaves behind, without what a fleet adds to the round log."""
    content = toy.outcome(path)
    for record in content["rounds.jsonl"]:
        for name in CLOCKED:
            record.pop(name, None)
    return content


def replay(whole, late):
    """The plainest run of a job with a fleet: every model is kept, and no byte is written.

    Gives θ after each round, and the private states. The weights of uploads are n_i.
    """
    method, (exchange,) = whole.method, whole.method.exchanges
    servers, private = [method.init_server(whole.trainers.initial)], {}
    for plan in whole.schedule(0):
        number, total, values = plan.number, 0.0, []
        newest = servers[-1].tensors["model"]
        for visit in sorted(plan.visits, key=lambda v: (v.client, v.started_from)):
            now, start = whole.round(visit.started_from + 1), servers[visit.started_from]
            key = now.key.at("exchange", "train")
            key = key.at("merged", number) if now.number < number else key
            data = whole.trainers.data[visit.client]
            trainer = QuadraticTrainer(
                visit.client,
                data,
                now,
                key.at("client", visit.client),
                method.ownership,
                whole.trainers.initial,
            )
            before = private.get(visit.client) or method.init_client(whole.trainers.initial, visit.client)
            download = exchange.send(start, visit.client, now)
            upload, private[visit.client] = exchange.work(trainer, before, download)
            value = upload.tensors["model"]
            if late == "delta" and now.number < number:
                value = newest + (value - start.tensors["model"])
            values.append((data.size, value))
            total += data.size
        (first, value), *others = values
        mean = sum((v * (size / total) for size, v in others), value * (first / total))
        servers.append(servers[-1].update({"model": mean}))
    return servers, private


@pytest.mark.parametrize("merge", [{}, {"late": "delta", "staleness": {"name": "polynomial"}}])
def test_staleness_0_is_synchronous_to_the_bit(tmp_path, merge):
    """Law: with a fleet in which nobody is late, a run leaves what the run without a fleet leaves."""
    toy.run_job(tmp_path / "plain", job(merge=MergeConfig(**merge)))
    toy.run_job(tmp_path / "fleet", job({"speeds": "exponential"}, merge=MergeConfig(**merge)))
    assert left(tmp_path / "plain") == left(tmp_path / "fleet")
    assert [record["staleness"] for record in records(tmp_path / "fleet")] == [0] * 5


@pytest.mark.parametrize("late", ["model", "delta"])
@pytest.mark.parametrize("fleet", [{"max_delay": 2}, BUFFERED])
def test_a_late_run_agrees_with_the_plain_one(tmp_path, fleet, late):
    """Oracle: :func:`replay`. Server and private states agree to rounding, and somebody was late."""
    whole = job(fleet, merge=MergeConfig(late=late), rounds=6)
    server = toy.run_job(tmp_path / "run", whole)
    servers, private = replay(whole, late)
    assert (server.tensors["model"] - servers[-1].tensors["model"]).norm() < 1e-12
    reader = RunReader(tmp_path / "run")
    for client, state in private.items():
        assert (reader.client(client).tensors["personal"] - state.tensors["personal"]).norm() < 1e-12
    assert sum(record["staleness"] for record in records(tmp_path / "run")) > 0


@examples(6)
@given(
    st.sampled_from([{"max_delay": 3}, BUFFERED, {**BUFFERED, "speeds": "equal", "spread": None}]),
    st.sampled_from(["model", "delta"]),
    st.lists(st.integers(1, 5), unique=True, max_size=4).map(sorted),
)
def test_stopped_and_resumed_to_the_bit(tmp_path_factory, fleet, late, stops):
    """Law: a late run in any number of sittings is the run in one."""
    folder, whole = tmp_path_factory.mktemp("late"), job(fleet, merge=MergeConfig(late=late), rounds=6)
    toy.run_job(folder / "whole", whole)
    for number in [*stops, 6]:
        toy.run_job(folder / "parts", replace(whole, rounds=number), resume=(folder / "parts").exists())
    assert toy.outcome(folder / "whole") == toy.outcome(folder / "parts")


def test_a_round_that_was_left_is_done_anew(tmp_path):
    """Interrupted after any answer and resumed, a buffered run ends as one that was not."""
    whole = job(BUFFERED, rounds=3)
    toy.run_job(tmp_path / "whole", whole)

    for number in (1, 10, 18):
        path = tmp_path / str(number)
        with pytest.raises(KeyboardInterrupt):
            toy.run_job(path, whole, callback=toy.InterruptAt(number))
        toy.run_job(path, whole, resume=True)
        assert toy.outcome(path) == toy.outcome(tmp_path / "whole")


def test_models_are_kept_as_long_as_an_upload_starts_from_them(tmp_path):
    """With delays of up to 2 rounds, uploads of round 6 start from the models of rounds 3, 4 and 5."""
    whole = job({"max_delay": 2}, rounds=5)
    toy.run_job(tmp_path / "run", whole)
    names = sorted(path.name for path in (tmp_path / "run/checkpoint").glob("server@*"))
    assert names == [f"server@00000{number}.safetensors" for number in (3, 4, 5)]
    (tmp_path / "run/checkpoint/server@000004.safetensors").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"server@000004.* is damaged"):
        toy.run_job(tmp_path / "run", replace(whole, rounds=9), resume=True)
    (tmp_path / "run/checkpoint/server@000004.safetensors").unlink()
    with pytest.raises(RuntimeError, match=r"server's state of round 4 is missing"):
        toy.run_job(tmp_path / "run", replace(whole, rounds=9), resume=True)


def test_the_log_of_a_late_run_is_its_schedule(tmp_path):
    """Client, delay and virtual times of every upload, and of every visit that came to nothing."""
    whole = job({**BUFFERED, "dropout": 0.3}, rounds=6)
    toy.run_job(tmp_path / "run", whole)
    lost = 0
    for record, plan in zip(records(tmp_path / "run"), whole.schedule(0), strict=True):
        assert record["time"] == plan.at
        assert record["staleness"] == plan.staleness
        got = [(v["client"], v["late"], v["asked"], v["at"]) for v in record["visits"]]
        assert got == [(v.client, plan.late(v), v.asked, v.at) for v in plan.visits]
        assert record["cohort"] == sorted({v.client for v in plan.visits})
        lost += len(record["lost"])
    assert lost > 0


class Twice(Job):
    """Client 0 trains from the models 0 and 1, and the server takes both uploads in round 2."""

    def schedule(self, after):
        def visits(*pairs):
            return tuple(Visit(f"Client {number}/ü", model, 0.0, 1.0) for number, model in pairs)

        plans = [visits((1, 0), (2, 0)), visits((0, 0), (0, 1), (3, 1))]
        rounds = (ScheduledRound(number, 0.0, plan, (), 0) for number, plan in enumerate(plans, 1))
        return (plan for plan in rounds if plan.number > after)


def test_two_uploads_of_one_client_in_a_round(tmp_path):
    """Oracle: :func:`replay`, which visits one after the other: the second visit continues from the private
    state that the first one left, and both uploads count."""
    plain = job({"max_delay": 1}, rounds=2, optimizer_state="kept")
    whole = Twice(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    server = toy.run_job(tmp_path / "run", whole)
    servers, private = replay(whole, "model")
    assert (server.tensors["model"] - servers[-1].tensors["model"]).norm() < 1e-12
    mine = RunReader(tmp_path / "run").client("Client 0/ü")
    assert mine.values["optimizer.train"] == private["Client 0/ü"].values["optimizer.train"] == 4
    assert mine.tensors["personal"].equal(private["Client 0/ü"].tensors["personal"])
    second = records(tmp_path / "run")[1]
    assert [(visit["client"], visit["late"]) for visit in second["visits"]] == [
        ("Client 0/ü", 1),
        ("Client 0/ü", 0),
        ("Client 3/ü", 0),
    ]
    assert second["cohort"] == ["Client 0/ü", "Client 3/ü"]


def test_a_discount_shortens_the_steps_of_fedbuff():
    """θ + (1/K) Σ s(q)(θ_i − θ^start): all replies late by q move θ by s(q) of their mean step, where a
    normalised mean of late models does not see a discount that they share."""
    whole = job(merge=MergeConfig(late="delta", weights="uniform"))
    merge = {"weights": "uniform", "late": "delta", "staleness": {"name": "polynomial", "exponent": 1.0}}
    layout = whole.method.init_server(whole.trainers.initial).tensors["model"].layout
    aggregator = Aggregator(MergeConfig(**merge), layout, 2.0)
    server = State({"model": Tensors.zeros(layout)})
    trainer = whole.trainer("Client 0/ü", 1, "exchange")
    uploads = [
        replace(trainer.upload({"model": Tensors.zeros(layout) + step}), client=client)
        for client, step in (("a", 1.0), ("b", 3.0))
    ]
    moved = aggregator.merge(server, uploads, whole.round(4))[0].tensors["model"]
    assert moved.flat.tolist() == [0.5] * layout.size  # s(3) = 1/4 of the mean step 2


def late_exchanges(name, **merge):
    """What each exchange of a method makes of late uploads."""
    kind, config = METHODS[name], MergeConfig(**merge)
    method = kind.build(kind.Settings(), toy.LAYOUT, Aggregator(config, toy.LAYOUT, 2.0), 3)
    return {exchange.late for exchange in method.exchanges if exchange.to != "all"}


def test_which_methods_take_late_uploads(subtests):
    """Methods whose merge is a mean of models do. Control variates, attention, alignment, clusters and
    training alone do not, nor neighbours. Nor does any method under the LoRA rules that tie a model to its
    round."""
    for name in METHODS:
        with subtests.test(name):
            assert late_exchanges(name) == ({"model"} if name in LATE else {"refused"})
            assert late_exchanges(name, late="delta") == ({"delta"} if name in LATE else {"refused"})
            if name == "decdpo":
                with pytest.raises(ValueError, match="needs a server, and neighbours have none"):
                    late_exchanges(name, lora="rolora")
            elif name != "fedbiscuit":
                assert late_exchanges(name, lora="rolora") == {"refused"}


def test_a_fleet_that_cannot_serve_is_refused():
    with pytest.raises(ValueError, match=r"^fleet .*fedamp.*'train'"):
        job({"max_delay": 1}, method="fedamp")
    job({"speeds": "exponential"}, method="fedamp")
    message = r"^\[fleet\] buffer = 7: only 6 clients train, and each replies once per model: lower it$"
    with pytest.raises(FleetError, match=message):
        job({"server": "buffered", "buffer": 7})


def test_a_late_client_trains_tensors_that_the_method_shares():
    """The groups that are rebased are the server's own."""
    whole = job({"max_delay": 1})
    server = whole.method.init_server(whole.trainers.initial)
    shared = whole.method.ownership.names(Owner.SHARED)
    assert server.tensors["model"].layout.names == shared
