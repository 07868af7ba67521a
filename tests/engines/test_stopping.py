"""Runs that are judged by validation pairs: the best round is kept, and a run may stop before its last."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import toy
from prefed.config import ConfigError, Experiment
from prefed.core.wire import encode
from prefed.engines import BackendSettings, JobFactory, NeighbourRounds, WorkerProcesses
from prefed.engines.config import StopConfig
from prefed.engines.stopping import judge
from prefed.merge.config import GraphConfig
from prefed.methods import METHODS
from prefed.runs.start_or_resume import settings_digest
from prefed.store import RunReader, RunWriter
from toy import records

JUDGED = {"rounds": 5, "stop": {"metric": "preference_accuracy"}}
NEVER = {"rounds": 6, "stop": {"metric": "preference_accuracy", "delta": 1.0, "patience": 2}}
"""No share of pairs is better than another by more than 1, so the first evaluation stays the best."""


def states(path, *, best=False):
    """All that a run has after a round, as bytes."""
    reader = RunReader(path, best=best)
    clients = toy.build(toy.text()).members
    return [encode(reader.server()), *(encode(own) for own in map(reader.client, clients) if own)]


def test_without_the_table_nothing_changes(tmp_path):
    """But for the record of the figure, and the best in the commit, a judged run leaves the same bytes."""
    toy.run(tmp_path / "plain", rounds=5)
    toy.run(tmp_path / "judged", **JUDGED)
    plain, judged = (toy.outcome(tmp_path / name) for name in ("plain", "judged"))
    for record in judged["rounds.jsonl"]:
        assert 0 <= record.pop("validation") <= 1
    assert plain["rounds.jsonl"] == judged["rounds.jsonl"]
    assert judged["checkpoint/COMMIT.json"].pop("best")["last_round"] == 5
    for name in set(plain) - {"rounds.jsonl", "checkpoint/COMMIT.json"}:
        assert plain[name] == judged[name], name


def test_the_best_is_found_on_validation_pairs_and_not_on_test_pairs(tmp_path):
    """The toy's clients want the opposite on validation pairs. A pair that is right there is wrong among the
    test pairs, so the best round is the first that is the worst by test pairs."""
    toy.run(tmp_path / "run", **JUDGED)
    tests = [record["preference_accuracy"] for record in records(tmp_path / "run")]
    seen = [record["validation"] for record in records(tmp_path / "run")]
    assert seen == pytest.approx([1 - share for share in tests])
    assert len(set(seen)) > 1
    best = RunReader(tmp_path / "run").commit.best
    assert best["round"] == 1 + seen.index(max(seen)) == 1 + tests.index(min(tests))
    assert (best["value"], best["last"]) == (max(seen), seen[-1])


def test_the_best_is_the_run_that_ends_with_its_round(tmp_path):
    """Server and private states of the best round are those of a run of so many rounds."""
    toy.run(tmp_path / "run", **JUDGED)
    number = RunReader(tmp_path / "run", best=True).commit.round
    assert number < 5
    toy.run(tmp_path / "short", rounds=number)
    assert states(tmp_path / "run", best=True) == states(tmp_path / "short")
    assert states(tmp_path / "run") != states(tmp_path / "short")


@pytest.mark.parametrize(("every", "rounds"), [(1, 3), (2, 6)])
def test_a_run_that_gets_no_better_stops(tmp_path, every, rounds):
    """With patience for two evaluations it stops with the third; round `every` has the first."""
    toy.run(tmp_path / "run", every=every, **NEVER)
    assert [record["round"] for record in records(tmp_path / "run")] == list(range(1, rounds + 1))
    best = RunReader(tmp_path / "run").commit.best
    assert (best["round"], best["since"], best["stopped"]) == (every, 2, True)
    toy.run(tmp_path / "run", resume=True, every=every, **{**NEVER, "rounds": 9})
    assert len(records(tmp_path / "run")) == rounds


@pytest.mark.parametrize("options", [JUDGED, {**NEVER, "every": 2}], ids=["kept", "stops"])
def test_interrupted_anywhere_it_ends_the_same(tmp_path, options):
    """Between any two answers: while it trains, while test and validation pairs are evaluated."""
    toy.run(tmp_path / "whole", **options)
    expected = toy.outcome(tmp_path / "whole")
    for after in range(3, 36, 8):
        run = tmp_path / str(after)
        with pytest.raises(KeyboardInterrupt):
            toy.run(run, callback=toy.InterruptAt(after), **options)
        toy.run(run, resume=True, **options)
        assert toy.outcome(run) == expected


@pytest.mark.usefixtures("forked_workers")
def test_worker_processes_change_no_bit(tmp_path):
    toy.run(tmp_path / "here", **NEVER)
    factory, one = JobFactory("toy:build", toy.text(**NEVER)), BackendSettings(1)
    toy.run(tmp_path / "there", backend=lambda _, states: WorkerProcesses(factory, states, one), **NEVER)
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there")


def test_clients_without_a_server_have_a_best_round_too(tmp_path):
    """DecDPO on a ring, stopped after three rounds: the nodes of round 1 are those of a run of one round."""
    trainers, kind = toy.ToyTrainers(toy.options(**NEVER)), METHODS["decdpo"]
    chosen = kind.Settings(lr=0.05, local_steps=2, batch_size=2)
    layout = trainers.initial.layout
    method = kind.build(chosen, layout, toy.Aggregator(toy.MergeConfig(), layout, 2.0), 6)
    rule = StopConfig(**NEVER["stop"])
    whole = toy.Job(trainers, method, 7, 6, graph=GraphConfig(name="ring"), stop=rule)
    for name, job in (("run", whole), ("short", replace(whole, rounds=1, stop=None))):
        with RunWriter(tmp_path / name) as writer, toy.InProcess(job, writer.states) as backend:
            writer.begin(encode(method.init_server(trainers.initial)), trainers.fingerprint)
            NeighbourRounds(job, writer, backend, toy.Callback()).run()
    assert len(records(tmp_path / "run")) == 3
    best, short = RunReader(tmp_path / "run", best=True), RunReader(tmp_path / "short")
    for node in range(len(whole.members)):
        assert best.node(node).equal(short.node(node))
        assert not RunReader(tmp_path / "run").node(node).equal(short.node(node))


def test_a_run_without_validation_pairs_is_not_judged():
    with pytest.raises(ValueError, match=r"^stop .*validation"):
        replace(toy.build(toy.text()), stop=StopConfig())


@given(
    st.lists(st.floats(-2, 2, width=16) | st.just(float("nan")), min_size=1, max_size=12),
    st.sampled_from(["preference_accuracy", "dpo_loss"]),
    st.floats(0, 0.5, width=16),
    st.none() | st.integers(1, 4),
)
@example([0.5, 0.75, 0.75], "preference_accuracy", 0.25, None)
def test_the_rule_against_one_that_looks_at_all_values(values, metric, delta, patience):
    """Oracle: after each value, walk over all of them from the first. A NaN is not better
    than any other; of a loss less is better. The example improves by no more than the minimum."""
    chosen = "loss" if metric == "dpo_loss" else metric
    rule, standing = StopConfig(metric=chosen, over="worst", patience=patience, delta=delta), None
    for number, value in enumerate(values, 1):
        standing = vars(judge(rule, standing, number, {metric: {"worst": value}}))
        best = 0
        for place in range(1, number + 1):
            shown = [-v if metric == "dpo_loss" else v for v in (values[best - 1], values[place - 1])]
            if shown[1] == shown[1] and (not best or shown[1] - shown[0] > delta):
                best = place
        assert standing["round"] == best
        assert standing["value"] == (values[best - 1] if best else None)
        assert standing["since"] == number - best
        assert standing["stopped"] == (patience is not None and number - best >= patience)


def experiment(**changes):
    tree = {
        "data": {"train": "a.jsonl", "partition": {"by": "iid", "clients": 2}},
        "model": {"name": "m"},
        "method": "feddpo",
    }
    return Experiment.from_tables({**tree, **changes}, "file")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop": {}, "evaluate": {"every": 0}}, r"\[stop\] needs evaluations"),
        ({"stop": {"metric": "combined_accuracy"}}, "feddpo has no reward head with these settings; use"),
        ({"stop": {"metric": "majority_accuracy"}, "method": "fedbis"}, "no selectors that vote"),
        ({"engine": {"devices": ["cuda:0", "cuda:1"]}}, r"\['cuda:0', 'cuda:1'\] lists 2 devices for 1"),
        ({"engine": {"devices": ["cuda:0", "cuda:0"], "workers": 2}}, "lists a device twice: list each"),
        ({"engine": {"devices": ["cuda:0"], "name": "ray"}}, r"which assigns GPUs to its actors"),
        ({"engine": {"devices": ["cuda:0"]}, "model": {"name": "m", "device": "cpu"}}, r"\[engine\] devices"),
    ],
)
def test_what_cannot_work_is_refused_in_words(changes, words):
    with pytest.raises(ConfigError, match=words):
        experiment(**changes)


def test_the_settings_digest_leaves_out_what_a_resumed_run_may_change():
    tables = experiment().tables()
    saved = experiment(model={"name": "m", "checkpointing": True}, engine={"devices": ["cuda:0"]}).tables()
    assert saved["model"]["checkpointing"]
    assert settings_digest(saved) == settings_digest(tables)
    assert settings_digest(experiment(stop={}).tables()) != settings_digest(tables)
