"""Laws that hold between methods, and for each of them, on random small federations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefed.core import Key, Method, Round, Tensors
from prefed.core.wire import decode_download, decode_state, decode_upload, encode, outline_upload
from prefed.engines.diagnostics import DIAGNOSE
from prefed.merge import Aggregator, MergeConfig, ServerOptimizer, lora
from prefed.methods import METHODS
from prefed.networks.federation.config import EXCHANGES
from quadratic import Run, crowd, initial, simulate

RULES = ("fedit", "ffa", "rolora", "fedsa", "fedex", "flexlora")
OPTIMIZERS = ("adamw", "adam", "sgd", "rmsprop")
OWN = {"fedbiscuit": {"selectors": 2, "warmup_rounds": 1, "regroup_every": 1}}
"""Settings with which three rounds have all that a method does."""
problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "size": st.integers(1, 5),
        "optimizer": st.sampled_from(OPTIMIZERS),
        "schedule": st.sampled_from(("constant", "cosine", "plateau")),
        "local_steps": st.sampled_from((None, 1, 3)),
        "batch_size": st.integers(1, 4),
        "lr": st.sampled_from((1e-3, 0.1, 0.5)),
    }
)


def make(name: str, problem: dict, merge: MergeConfig | None = None, **own: object) -> Method:
    kind = METHODS[name]
    common = {key: problem[key] for key in ("optimizer", "schedule", "local_steps", "batch_size", "lr")}
    common = {key: value for key, value in common.items() if value is not None}
    if name in ("scaffold", "perfedavg"):
        common["optimizer"] = "sgd"
    if kind.reads == "choice":
        common = {"local_epochs": None if "local_steps" in common else 1, **common}
        common["batch_size"] *= 2
    aggregator = Aggregator(merge or MergeConfig(), start(problem, merge, name).layout, 2.0)
    return kind.build(kind.Settings(**common, **OWN.get(name, {}), **own), aggregator.layout, aggregator, 3)


def start(problem: dict, merge: MergeConfig | None = None, name: str = "feddpo") -> Tensors:
    """The start of a model that has what the method and the merge rule need."""
    kind = METHODS[name]
    parts = kind.needs(kind.Settings()) | (lora.needs(merge.lora) if merge else frozenset())
    return initial(parts, seed=problem["seed"])


def run(method: Method, problem: dict, merge: MergeConfig | None = None, rounds: int = 3, **more) -> Run:
    begin = start(problem, merge, method.name)
    clients = crowd(problem["size"], begin.layout.size, problem["seed"])
    return simulate(method, clients, begin, rounds, seed=problem["seed"], **more)


@pytest.mark.parametrize("name", METHODS)
def test_a_site_may_allow_each_exchange_by_its_name(name):
    """What a site's file takes in ``[limits] exchanges`` has every name that a hub can ask for. No hub can
    ask for a diagnosis."""
    plain = {
        "optimizer": "sgd",
        "schedule": "constant",
        "local_steps": 1,
        "batch_size": 2,
        "lr": 0.1,
        "seed": 0,
    }
    assert {exchange.name for exchange in make(name, plain).exchanges} <= {*EXCHANGES}
    assert DIAGNOSE not in EXCHANGES


def same(one: Run, other: Run) -> bool:
    """The servers' shared tensors agree to the bit."""
    return one.server.tensors["model"].equal(other.server.tensors["model"])


@settings(max_examples=25, deadline=None)
@given(problems)
def test_fedprox_without_a_pull_is_feddpo(problem):
    assert same(run(make("fedprox", problem, mu=0.0), problem), run(make("feddpo", problem), problem))


@settings(max_examples=25, deadline=None)
@given(problems)
def test_one_client_is_centralised(problem):
    problem["size"] = 1
    assert same(run(make("feddpo", problem), problem), run(make("centralized", problem), problem))


@settings(max_examples=25, deadline=None)
@given(problems)
def test_one_client_alone_is_feddpo(problem):
    """Its personal tensors are what one client's federation shares."""
    problem["size"] = 1
    alone = run(make("local", problem), problem).private["client-0"].tensors["personal"]
    assert alone.equal(run(make("feddpo", problem), problem).server.tensors["model"])


@settings(max_examples=15, deadline=None)
@given(problems)
def test_supervised_and_preference_training_differ_in_the_loss_alone(problem):
    """A quadratic is blind to the objective's name, so here they agree to the bit."""
    assert same(run(make("fedsft", problem), problem), run(make("feddpo", problem), problem))


@settings(max_examples=15, deadline=None)
@given(problems, st.sampled_from(["feddpo", "fedprox", "fedsft", "scaffold"]))
def test_server_momentum_of_zero_at_rate_one_is_the_mean(problem, name):
    still = MergeConfig(optimizer=ServerOptimizer(name="fedavgm", momentum=0.0, lr=1.0))
    assert same(run(make(name, problem, still), problem), run(make(name, problem), problem))


@settings(max_examples=15, deadline=None)
@given(problems)
def test_scaffold_of_one_client_is_plain_sgd(problem):
    """c and c_1 are equal, so the correction is zero: FedDPO with SGD, up to rounding."""
    problem.update(size=1, optimizer="sgd")
    plain = run(make("feddpo", problem, weight_decay=0, clip=0), problem).server.tensors["model"]
    scaffold = run(make("scaffold", problem), problem).server.tensors["model"]
    assert (scaffold - plain).norm() <= 1e-12 * (1 + plain.norm())


@settings(max_examples=10, deadline=None)
@given(problems, st.sampled_from(["samples", "uniform"]))
def test_scaffolds_server_variate_is_the_mean_of_the_clients(problem, weights):
    """c = Σ p_i c_i after every round, whoever took part; p_i = n_i / Σ n or 1/N."""
    method = make("scaffold", problem, MergeConfig(weights=weights))
    run_ = run(method, problem, cohort=max(1, problem["size"] - 1))
    clients = crowd(problem["size"], start(problem).layout.size, problem["seed"])
    sizes = {client: data.size if weights == "samples" else 1 for client, data in clients.items()}
    variates = {client: run_.private[client].tensors["control"].flat for client in clients}
    mean = sum(variates[client] * (size / sum(sizes.values())) for client, size in sizes.items())
    control = run_.server.tensors["control"].flat
    assert (control - mean).abs().max() <= 1e-9 * (1 + mean.abs().max())


@pytest.mark.parametrize("name", [name for name in METHODS if name != "decdpo"])
@settings(max_examples=8, deadline=None)
@given(rule=st.sampled_from(RULES), problem=problems)
def test_stopped_and_resumed_is_uninterrupted(name, rule, problem):
    """All states go through bytes between the rounds, and all messages are equal after a trip."""
    merge = MergeConfig(lora=rule)
    method = make(name, problem, merge)
    whole = run(method, problem, merge)
    parts = run(method, problem, merge, rounds=1)
    for rounds in (2, 3):
        parts.server = decode_state(encode(parts.server))
        parts.private = {client: decode_state(encode(state)) for client, state in parts.private.items()}
        parts = run(method, problem, merge, rounds=rounds, run=parts)
    assert encode(parts.server) == encode(whole.server)
    assert {c: encode(s) for c, s in parts.private.items()} == {
        c: encode(s) for c, s in whole.private.items()
    }
    for upload in whole.uploads:
        assert encode(decode_upload(encode(upload))) == encode(upload)
        sizes = {name: tensors.flat.numel() for name, tensors in upload.tensors.items()}
        assert outline_upload(encode(upload)) == (sizes, upload.weight, upload.scalars)
    for download in whole.downloads:
        assert encode(decode_download(encode(download))) == encode(download)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("centralized", "decdpo")])
@settings(max_examples=8, deadline=None)
@given(problem=problems, data=st.data())
def test_the_order_of_replies_changes_no_bit(name, problem, data):
    method, begin = make(name, problem), start(problem, name=name)
    weights = {
        c: float(q.size) for c, q in crowd(problem["size"], begin.layout.size, problem["seed"]).items()
    }
    now = Round(1, 3, Key(problem["seed"]).at("round", 1), weights)
    once = run(method, problem, rounds=1)
    replies = {upload.client: upload for upload in once.uploads}
    (exchange,) = (exchange for exchange in method.exchanges if exchange.due(1))
    shuffled = [replies[client] for client in data.draw(st.permutations(sorted(replies)))]
    server = method.init_server(begin)
    assert encode(exchange.merge(server, shuffled, now)) == encode(once.server)
