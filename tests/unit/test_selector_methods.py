"""FedBis and FedBiscuit: settings, what they refuse, and single steps of the server."""

import logging

import pytest
import torch

from prefed.core import Key, Method, Round, State, Tensors, Upload
from prefed.merge import Aggregator, BadUpload, MergeConfig, TooFewUploads
from prefed.methods import METHODS
from prefed.testing import Quadratic, QuadraticTrainer, initial, simulate

START = initial()
NAMES = "abcd"


def at(number: int, clients: str = NAMES) -> Round:
    return Round(number, 9, Key(0), dict.fromkeys(clients, 2.0))


NOW = at(3)


def make(name: str, merge: MergeConfig | None = None, rounds: int = 9, **settings: object) -> Method:
    kind = METHODS[name]
    aggregator = Aggregator(merge or MergeConfig(), START.layout, 2.0)
    return kind.build(kind.Settings(**settings), START.layout, aggregator, rounds)


def biscuit(merge: MergeConfig | None = None, **settings: object) -> Method:
    return make("fedbiscuit", merge, **{"selectors": 2, "warmup_rounds": 1, "regroup_every": 3, **settings})


def sends(client: str, step: float, weight: float = 2.0, number: int = 3) -> Upload:
    """An upload that is ``step`` away from the start in every number."""
    moved = Tensors(START.layout, START.flat + step)
    return Upload(client, weight, {"model": moved}, {"loss": 1.0}, number)


def grouped(method: Method, **members: int):
    """The server's first state with these clusters, after the warm-up."""
    return method.init_server(START).update(values={"clusters": members})


@pytest.mark.parametrize(
    ("name", "merge", "settings", "message"),
    [
        ("fedbiscuit", {"rule": "median"}, {}, "cannot be combined with rule 'median' in .merge."),
        ("fedbiscuit", {"weights": "uniform"}, {}, "weights 'uniform' .* 'normalised'"),
        ("fedbis", {"rule": "krum"}, {"mean": "eq8"}, "mean = 'eq8' requires rule 'mean', weights 'samples'"),
        ("fedbis", {"weights": "mass"}, {"mean": "eq8"}, "mean = 'eq8' requires rule 'mean', weights"),
        ("fedbis", {"lora": "flexlora"}, {"mean": "eq8"}, "a lora other than 'fedex', 'flexlora'"),
    ],
)
def test_means_that_contradict_each_other_are_refused(name, merge, settings, message):
    with pytest.raises(ValueError, match=message):
        make(name, MergeConfig(**merge), **settings)


def test_a_run_that_is_all_warm_up_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "prefed"):
        make("fedbiscuit", rounds=151, warmup_rounds=50)
        assert not caplog.messages
        make("fedbiscuit", rounds=150, warmup_rounds=50)
    assert "warm-up takes 150 rounds of 150" in caplog.text
    assert "raise rounds above 150, or lower method.warmup_rounds to 49 or fewer" in caplog.text
    assert "never trained" not in caplog.text


def test_selectors_that_never_train_are_named(caplog):
    """Three of 50 rounds each: the second has one of 51 rounds, and none of 50."""
    for rounds, names in ((51, "selector-2"), (50, "selector-1, selector-2")):
        with caplog.at_level(logging.WARNING, "prefed"):
            make("fedbiscuit", rounds=rounds, warmup_rounds=50)
        assert caplog.messages[-1].endswith(f"never trained, yet with a vote: {names}")


@pytest.mark.parametrize(
    ("rounds", "selectors", "groupings"),
    [
        (10, 3, range(4, 11)),  # of 10 rounds at most 5 for 3 selectors: 1 each
        (20, 3, [10, 13, 16, 19]),  # at most 10 for 3: 3 each
        (500, 3, range(151, 501, 50)),
        (500, 5, range(251, 501, 50)),  # the paper's 50
    ],
)
def test_a_warm_up_that_nobody_names_fits_the_rounds(rounds, selectors, groupings, caplog):
    with caplog.at_level(logging.WARNING, "prefed"):
        method = make("fedbiscuit", rounds=rounds, selectors=selectors)
    due = [number for number in range(1, rounds + 1) if method.exchanges[0].due(number)]
    assert due == list(groupings)
    assert not caplog.messages


def test_a_round_that_merges_nothing_delays_no_warm_up():
    """Two selectors of one round each. Round 1 merges nothing: round 2 is selector 1's all the same, and
    its tensors alone move. Clients predict with the selector that was trained last."""
    method = biscuit()
    server, train = method.init_server(START), method.exchanges[1]
    assert method.publish(server, "a").scalars["cluster"] == 0
    assert train.send(server, "a", at(2)).scalars["cluster"] == 1
    after, _ = train.merge(server, [sends("a", 0.1, number=2)], at(2))
    assert after.values["trained"] == ["selector-1"]
    assert after.tensors["selector-0"] is server.tensors["selector-0"]
    assert method.publish(after, "a").scalars["cluster"] == 1


def test_after_a_grouping_that_came_to_nothing_all_are_placed_together():
    """No upload of the grouping was valid. Four clients go to two selectors in turn, by their ids, and the
    round's merge keeps that: each upload is in its own selector, and the next grouping shows who moved."""
    method = biscuit(cluster_mean="normalised")
    scores, train = method.exchanges
    server, _ = train.merge(method.init_server(START), [sends("a", 0.1)], at(2))
    expected = {"a": 0, "b": 1, "c": 0, "d": 1}
    assert {c: train.send(server, c, at(3)).scalars["cluster"] for c in NAMES} == expected
    after, _ = train.merge(server, [sends("a", 0.5), sends("d", 0.7)], at(3))
    for name, step in (("selector-0", 0.5), ("selector-1", 0.7)):
        torch.testing.assert_close(after.tensors[name].flat, START.flat + step)
    assert after.values["clusters"] == expected
    assert [method.publish(after, c).scalars["cluster"] for c in NAMES] == [0, 1, 0, 1]
    reports = [Upload(c, 2.0, {}, {"loss_0": 0.7, "loss_1": 0.5 + (c in "ab") / 2}, 6) for c in NAMES]
    assert scores.merge(after, reports, at(6))[1]["moved"] == ["b", "c"]


def test_a_cluster_with_too_few_uploads_keeps_its_selector():
    """The median of one liar needs three uploads: cluster 0 has them, cluster 1 has one."""
    method = biscuit(MergeConfig(rule="median"), cluster_mean="normalised")
    server = grouped(method, a=0, b=0, c=0, d=1)
    train = method.exchanges[1]
    uploads = [sends(c, s) for c, s in zip(NAMES, (0.1, 0.2, 0.4, 0.3), strict=True)]
    after, figures = train.merge(server, uploads, NOW)
    torch.testing.assert_close(after.tensors["selector-0"].flat, START.flat + 0.2)
    assert after.tensors["selector-1"] is server.tensors["selector-1"]
    assert list(figures["selectors"]) == ["selector-0"]
    assert "needs at least 3 uploads to tolerate liars = 1, got 1" in figures["too_few"]["selector-1"]
    assert "too_few" not in train.merge(after, [sends(c, 0.1) for c in "abc"], NOW)[1]
    with pytest.raises(TooFewUploads, match=r"selector-0: .*; selector-1: "):
        train.merge(server, [sends("a", 0.1), sends("d", 0.1)], NOW)


def test_an_upload_is_measured_against_its_own_selector_and_the_whole_cohort():
    """Selector 1 is far from selector 0. Steps of 0.1 from each are alike. One of 1e5 is out of proportion,
    though its cluster has no other upload. Where the rule could not do without it, the rule withstands it."""
    method = biscuit(cluster_mean="normalised")
    server = grouped(method, a=0, b=0, c=0, d=1)
    far = Tensors(START.layout, START.flat + 50)
    server = server.update({"selector-1": far})
    train = method.exchanges[1]

    def replies(step):
        near = [sends(client, 0.1) for client in "abc"]
        return [*near, Upload("d", 2.0, {"model": Tensors(START.layout, far.flat + step)}, {"loss": 1.0}, 3)]

    assert train.merge(server, replies(0.1), NOW)[0].values["trained"] == ["selector-0", "selector-1"]
    with pytest.raises(BadUpload, match=r"upload of client 'd'.*times the median of the round"):
        train.merge(server, replies(1e5), NOW)
    robust = biscuit(MergeConfig(rule="median"), cluster_mean="normalised")
    huge = [sends("a", 0.1), sends("b", 0.1), sends("c", 1e6)]
    after, _ = robust.exchanges[1].merge(grouped(robust, a=0, b=0, c=0, d=1), huge, NOW)
    torch.testing.assert_close(after.tensors["selector-0"].flat, START.flat + 0.1)


def test_an_oversized_upload_does_not_hide_behind_a_longer_one():
    """The median needs three uploads. Cluster 0 cannot do without c's, the longest, and withstands it;
    cluster 1 can do without g's."""
    method = biscuit(MergeConfig(rule="median"), cluster_mean="normalised")
    server, now = grouped(method, a=0, b=0, c=0, d=1, e=1, f=1, g=1), at(3, "abcdefg")
    steps = dict.fromkeys("abdef", 0.1) | {"c": 1e7, "g": 1e6}
    uploads = [sends(client, steps[client]) for client in sorted(steps)]
    with pytest.raises(BadUpload, match=r"client 'g'.*times the median of the round"):
        method.exchanges[1].merge(server, uploads, now)
    after, _ = method.exchanges[1].merge(server, uploads[:-1], now)
    for name in ("selector-0", "selector-1"):
        torch.testing.assert_close(after.tensors[name].flat, START.flat + 0.1)


def test_norm_clip_bounds_a_client_that_is_alone_in_its_cluster():
    """Lengths are in steps of 1 in every number: 0.1, 0.2, 0.3 and 9. Their median, the lower of the middle
    ones, is 0.2, also for client d, whose own cluster has no other upload."""
    method = biscuit(MergeConfig(rule="norm_clip"), cluster_mean="normalised")
    server = grouped(method, a=0, b=0, c=0, d=1)
    uploads = [sends(client, step) for client, step in zip(NAMES, (0.1, 0.2, 0.3, 9.0), strict=True)]
    after, _ = method.exchanges[1].merge(server, uploads, NOW)
    torch.testing.assert_close(after.tensors["selector-1"].flat, START.flat + 0.2)
    torch.testing.assert_close(after.tensors["selector-0"].flat, START.flat + 0.5 / 3)


def test_each_selector_has_its_own_memory_of_the_server_optimizer():
    """FedAvgM, momentum 0.5 at rate 1, twice an upload of start + 1. The first step is 1. Then all is done,
    and the momentum's 0.5 is the second. The other selector and its memory do not move."""
    merge = MergeConfig(optimizer={"name": "fedavgm", "momentum": 0.5})
    method = biscuit(merge, cluster_mean="normalised")
    train, server = method.exchanges[1], grouped(method, a=0, b=1)
    for _ in range(2):
        server, _ = train.merge(server, [sends("a", 1.0)], NOW)
    torch.testing.assert_close(server.tensors["selector-0"].flat, START.flat + 1.5)
    fresh = method.init_server(START)
    others = [name for name in fresh.tensors if name.startswith("selector-1")]
    assert len(others) == 2
    assert all(server.tensors[name].equal(fresh.tensors[name]) for name in others)


def test_a_client_outside_the_map_has_the_selector_with_fewest_members():
    method = biscuit(selectors=3)
    server = grouped(method, a=0, b=0, c=2)
    assert method.exchanges[1].send(server, "x", at(4, "abcx")).scalars["cluster"] == 1
    assert method.publish(server, "x").scalars["cluster"] == 1
    assert method.publish(server, "c").scalars["cluster"] == 2


def test_the_shared_models_are_all_selectors_and_one_download_is_one_of_them():
    method = biscuit(selectors=3)
    server = method.init_server(START)
    server = server.update({f"selector-{u}": Tensors(START.layout, START.flat + u) for u in range(3)})
    models = method.shared_models(START, method.publish(server, "a"))
    assert list(models) == ["selector-0", "selector-1", "selector-2"]
    assert all(model.equal(server.tensors[name]) for name, model in models.items())


def test_losses_are_means_over_the_validation_pairs():
    """A client with 9 training and 2 validation pairs has too few for a minimum of 4."""
    (scores, _) = biscuit().exchanges
    now = Round(3, 9, Key(0), {"a": 9.0}, held_out={"a": 2.0})
    private = Round(3, 9, Key(0), {"a": 9.0}, type(now.privacy)(minimum_pairs=4), {"a": 2.0})
    assert scores.numbers("a", now) == {"loss_0", "loss_1"}
    assert scores.numbers("a", private) == frozenset()
    assert scores.groups("a", now) == {}


def test_clients_are_grouped_by_validation_pairs_and_newcomers_placed_by_training_pairs():
    """Selectors at φ and φ + 1, training targets at φ, validation targets at φ + 1: of d numbers each, the
    reported losses are d / 2 and 0, while a newcomer, who has no other use for its pairs, gets the first."""
    method, size = biscuit(), START.layout.size
    server = method.init_server(START)
    server = server.update({f"selector-{u}": Tensors(START.layout, START.flat + u) for u in range(2)})
    data = Quadratic(START.flat[None], validation=START.flat[None] + 1)
    trainer = QuadraticTrainer("a", data, NOW, Key(0), method.ownership, START)
    upload, _ = method.exchanges[0].work(trainer, State(), method.exchanges[0].send(server, "a", NOW))
    assert upload.scalars == pytest.approx({"loss_0": size / 2, "loss_1": 0.0})
    assert method.newcomer(trainer, method.publish(server, "a")).equal(server.tensors["selector-0"])


def test_kept_optimisers_go_on_across_clusters():
    """``optimizer_state = "kept"`` works as in other methods, and only training has such a state."""
    from prefed.testing import crowd

    method = biscuit(optimizer_state="kept", local_steps=2, batch_size=2, lr=0.1)
    run = simulate(method, crowd(3, START.layout.size), START, 4)
    assert {state.values["optimizer.train"] for state in run.private.values()} == {8}
