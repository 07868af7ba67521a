"""Laws of FedBis and FedBiscuit, on random small federations."""

import dataclasses
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from law_examples import examples
from prefed.core import Key, Method, Round, Upload
from prefed.core.wire import encode
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.testing import crowd, initial, simulate

START = initial()
problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "size": st.integers(1, 7),
        "lr": st.sampled_from((1e-3, 0.1)),
        "local_steps": st.sampled_from((1, 3)),
        "schedule": st.sampled_from(("constant", "cosine", "plateau")),
        "lora": st.sampled_from(("fedit", "rolora", "ffa", "flexlora")),
        "optimizer": st.sampled_from(("none", "fedavgm", "fedadam")),
        "more": st.data(),
    }
).map(lambda p: p if p["lora"] != "flexlora" else {**p, "optimizer": "none"})


def make(name: str, problem: dict, rounds: int = 6, **own: object) -> Method:
    common = {key: problem[key] for key in ("lr", "local_steps", "schedule")}
    merge = MergeConfig(lora=problem["lora"], optimizer={"name": problem["optimizer"]})
    chosen = METHODS[name].Settings(batch_size=4, **common, **own)
    return METHODS[name].build(chosen, START.layout, Aggregator(merge, START.layout, 2.0), rounds)


def run(method: Method, problem: dict, rounds: int = 6, cohort: int | None = None, backwards: bool = False):
    clients = crowd(problem["size"], START.layout.size, problem["seed"])
    if backwards:
        clients = dict(reversed(clients.items()))
    return simulate(method, clients, START, rounds, cohort=cohort, seed=problem["seed"])


def cohorts(problem: dict) -> int:
    return problem["more"].draw(st.integers(1, problem["size"]))


@examples(20)
@given(problems, st.integers(0, 4))
def test_one_selector_with_the_normalised_mean_is_fedbis(problem, warm):
    """Bit for bit, whatever the warm-up and the groupings."""
    size = cohorts(problem)
    own = {"selectors": 1, "warmup_rounds": warm, "regroup_every": 2, "cluster_mean": "normalised"}
    one = run(make("fedbiscuit", problem, **own), problem, cohort=size)
    bis = run(make("fedbis", problem), problem, cohort=size)
    assert one.server.tensors["selector-0"].equal(bis.server.tensors["model"])


@examples(15)
@given(problems, st.integers(0, 3))
def test_one_selector_with_equation_6_and_everybody_is_fedbis(problem, warm):
    """The shares are 1 in sum, so the selector keeps nothing."""
    problem["optimizer"] = "none"
    own = {"selectors": 1, "warmup_rounds": warm, "regroup_every": 2}
    one = run(make("fedbiscuit", problem, **own), problem)
    bis = run(make("fedbis", problem), problem)
    difference = one.server.tensors["selector-0"] - bis.server.tensors["model"]
    assert difference.norm() <= 1e-6 * (1 + bis.server.tensors["model"].norm())


@examples(15)
@given(problems, st.integers(1, 4), st.sampled_from(("greedy", "exact")))
def test_the_order_of_clients_and_of_replies_changes_no_bit(problem, count, balance):
    """The known mistake: members decided by the order of a shuffle. Both exchanges of a round are also merged
    from shuffled replies."""
    size = cohorts(problem)
    own = {"selectors": count, "warmup_rounds": 1, "regroup_every": 1, "balance": balance}
    method = make("fedbiscuit", problem, **own)
    there = run(method, problem, rounds=count, cohort=size)
    back = run(method, problem, rounds=count, cohort=size, backwards=True)
    assert encode(there.server) == encode(back.server)
    number, server, weights = count + 1, there.server, {}
    again = run(method, problem, rounds=number, cohort=size)
    replies = [upload for upload in again.uploads if upload.sent_at == number]
    weights = {
        c: float(q.size) for c, q in crowd(problem["size"], START.layout.size, problem["seed"]).items()
    }
    now = Round(number, 6, Key(problem["seed"]).at("round", number), weights)
    for exchange in method.exchanges:
        own_replies = [u for u in replies if bool(u.tensors) == (exchange.name == "train")]
        server, _ = exchange.merge(server, problem["more"].draw(st.permutations(own_replies)), now)
    assert encode(server) == encode(again.server)


@examples(15)
@given(problems, st.integers(1, 4))
def test_clusters_hold_everybody_once_and_sizes_differ_by_at_most_one(problem, count):
    method = make("fedbiscuit", problem, selectors=count, warmup_rounds=1, regroup_every=2)
    server = run(method, problem, rounds=count + 3).server
    members = server.values["clusters"]
    sizes = Counter(members.values())
    assert set(members) == set(crowd(problem["size"], START.layout.size, problem["seed"]))
    assert max(sizes.values()) - min(sizes[u] for u in range(count)) <= 1
    own = [Upload(c, 1.0, {}, {f"loss_{u}": 0.5 for u in range(count)}, 1) for c in members]
    after, report = method.exchanges[0].merge(server, own, Round(1, 6, Key(0), dict.fromkeys(members, 1.0)))
    lists, members = report["clusters"], after.values["clusters"]
    assert sorted(client for one in lists for client in one) == sorted(members)
    assert all(members[client] == u for u, one in enumerate(lists) for client in one)


@examples(15)
@given(problems, st.integers(2, 4), st.sampled_from(("eq6", "normalised")))
def test_a_selector_that_nobody_trained_keeps_its_tensors(problem, count, mean):
    """With a cohort of one, all selectors but its client's; in warm-up all but the one that warms up."""
    method = make("fedbiscuit", problem, selectors=count, warmup_rounds=1, regroup_every=1, cluster_mean=mean)
    before = method.init_server(START)
    for number in range(1, count + 3):
        after = run(method, problem, rounds=number, cohort=1)
        names = [name for name in after.server.tensors if name.startswith("selector-") and "." not in name]
        moved = [name for name in names if not after.server.tensors[name].equal(before.tensors[name])]
        assert moved in ([], after.server.values["trained"])
        if number <= count:
            assert after.server.values["trained"] == [f"selector-{number - 1}"]
        before = after.server


@examples(10)
@given(problems, st.integers(1, 3))
def test_losses_are_all_that_a_grouping_asks_for(problem, count):
    """U numbers and no tensor, for everybody; a client trains on the selector of its cluster and no other."""
    method = make("fedbiscuit", problem, selectors=count, warmup_rounds=1, regroup_every=1)
    run_ = run(method, problem, rounds=count + 1, cohort=cohorts(problem))
    scores = [upload for upload in run_.uploads if not upload.tensors]
    assert len(scores) == problem["size"]
    assert all(set(upload.scalars) == {f"loss_{u}" for u in range(count)} for upload in scores)
    assert {name for download in run_.downloads for name in download.tensors} == {
        "model",
        *(f"selector-{u}" for u in range(count)),
    }
    assert all(len(d.tensors) == (1 if "model" in d.tensors else count) for d in run_.downloads)


def test_a_client_that_claims_another_cluster_changes_nothing():
    """An upload has no place for a cluster. One that names it in a group or a number is not let in; one that
    names it in its number of the round or its weight neither. What merges is decided by the server's map."""
    problem = {"seed": 3, "size": 4, "lr": 0.1, "local_steps": 1, "schedule": "constant"}
    problem |= {"lora": "fedit", "optimizer": "none"}
    method = make("fedbiscuit", problem, selectors=2, warmup_rounds=1, regroup_every=10)
    server = run(method, problem, rounds=3).server
    weights = {c: float(q.size) for c, q in crowd(4, START.layout.size, 3).items()}
    now = Round(4, 6, Key(0), weights)
    client = "client-0"
    own = server.values["clusters"][client]
    honest = Upload(client, weights[client], {"model": START * 0.5}, {"loss": 1.0}, 4)
    claiming = dataclasses.replace(honest, scalars={"loss": 1.0, "cluster": 1 - own})
    train = method.exchanges[1]
    after, _ = train.merge(server, [claiming], now)
    assert encode(after) == encode(train.merge(server, [honest], now)[0])
    assert not after.tensors[f"selector-{own}"].equal(server.tensors[f"selector-{own}"])
    assert after.tensors[f"selector-{1 - own}"].equal(server.tensors[f"selector-{1 - own}"])
