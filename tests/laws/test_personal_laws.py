"""Laws of the personalised methods, on random small federations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from law_examples import examples
from prefed.core import Method, Tensors
from prefed.merge import Aggregator, MergeConfig, lora
from prefed.methods import METHODS
from prefed.testing import Run, crowd, initial, simulate

RULES = ("fedit", "ffa", "rolora", "fedsa", "fedex", "flexlora", "flora")
problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "size": st.integers(1, 5),
        "optimizer": st.sampled_from(("adamw", "sgd")),
        "schedule": st.sampled_from(("constant", "cosine", "plateau")),
        "local_steps": st.sampled_from((None, 1, 3)),
        "batch_size": st.integers(1, 4),
        "accumulate": st.sampled_from((1, 2)),
        "weight_decay": st.sampled_from((0.0, 0.1)),
        "lr": st.sampled_from((1e-3, 0.1)),
        "rule": st.sampled_from(RULES),
    }
)


def start(problem: dict) -> Tensors:
    return initial({"lora"} | lora.needs(problem["rule"]), seed=problem["seed"])


def common(problem: dict) -> dict:
    """The settings in a problem."""
    return {k: v for k, v in problem.items() if k not in ("seed", "size", "rule") and v is not None}


def make(name: str, problem: dict, merge: MergeConfig | None = None, **own: object) -> Method:
    layout = start(problem).layout
    aggregator = Aggregator(merge or MergeConfig(lora=problem["rule"]), layout, 2.0)
    return METHODS[name].build(METHODS[name].Settings(**{**common(problem), **own}), layout, aggregator, 3)


def run(method: Method, problem: dict, **more) -> Run:
    begin = start(problem)
    clients = crowd(problem["size"], begin.layout.size, problem["seed"])
    return simulate(method, clients, begin, 3, seed=problem["seed"], **more)


def models(method: Method, problem: dict, outcome: Run) -> dict[str, Tensors]:
    clients = crowd(problem["size"], start(problem).layout.size, problem["seed"])
    return outcome.models(method, clients, start(problem))


NOTHING_PERSONAL = {
    "fedper": {"shared_layers": 9, "personal_head": False},
    "fedpdpo": {"bottleneck": False, "personal_head": False, "reward_head": False},
    "fedsdg": {"personal": False, "alignment": "off"},
}


@pytest.mark.parametrize("name", NOTHING_PERSONAL)
@examples(15)
@given(problem=problems)
def test_with_nothing_personal_it_is_feddpo(name, problem):
    """Bit for bit, with every LoRA rule: the same batches, the same steps, the same merge."""
    kind = METHODS[name]
    chosen = kind.Settings(**NOTHING_PERSONAL[name])
    assert kind.needs(chosen) - {"outputs"} == {"lora"}
    ours, theirs = make(name, problem, **NOTHING_PERSONAL[name]), make("feddpo", problem)
    assert ours.personal == theirs.personal == (problem["rule"] == "fedsa")
    one, other = run(ours, problem), run(theirs, problem)
    assert one.server.tensors["model"].equal(other.server.tensors["model"])
    for client, model in models(theirs, problem, other).items():
        assert models(ours, problem, one)[client].equal(model)


@pytest.mark.parametrize(
    ("name", "own"), [("ditto", {}), ("fedala", {"weight_steps": 0, "first_weight_steps": 0})]
)
@examples(15)
@given(problem=problems)
def test_the_shared_model_is_feddpos_to_the_bit(name, own, problem):
    """Ditto's own models do not touch it; FedALA's weights stay at 1, the model as it was received.
    Ditto has no pull under FLoRA."""
    own = {"lam": 0.0} if (name, problem["rule"]) == ("ditto", "flora") else own
    one, other = run(make(name, problem, **own), problem), run(make("feddpo", problem), problem)
    assert one.server.tensors["model"].equal(other.server.tensors["model"])


@examples(10)
@given(problem=problems)
def test_ditto_without_a_pull_is_training_alone(problem):
    """With whole batches, so that the two phases' shuffles do not matter."""
    problem.update(rule="fedit", batch_size=64, schedule="constant")
    ditto = make("ditto", problem, lam=0.0, personal_lr=problem["lr"])
    alone = make("local", problem)
    ours = models(ditto, problem, run(ditto, problem))
    for client, theirs in models(alone, problem, run(alone, problem)).items():
        assert (ours[client] - theirs).norm() <= 1e-9 * (1 + theirs.norm())


@examples(10)
@given(problem=problems)
def test_pfedme_that_goes_all_the_way_is_fedprox(problem):
    """R = 1, ηλ = 1: w_i is where K steps under the pull end, as in FedProx with μ = λ and K local steps."""
    problem.update(batch_size=64, local_steps=1)
    ours = run(make("pfedme", problem, lam=0.5, outer_lr=2.0, inner_steps=4), problem)
    theirs = run(make("fedprox", problem, mu=0.5, local_steps=4), problem)
    one, other = ours.server.tensors["model"], theirs.server.tensors["model"]
    assert (one - other).norm() <= 1e-9 * (1 + other.norm())


@examples(10)
@given(problem=problems)
def test_fedamp_with_even_attention_is_the_uniform_mean(problem):
    """At an endless temperature every a_ij is 1/N, so that everybody receives FedDPO's uniform mean."""
    merge = MergeConfig(lora=problem["rule"], weights="uniform")
    ours = run(make("fedamp", problem, merge, temperature=1e15), problem)
    theirs = run(make("feddpo", problem, merge), problem)
    one, other = ours.server.tensors["model"], theirs.server.tensors["model"]
    assert (one - other).norm() <= 1e-6 * (1 + other.norm())


@examples(10)
@given(problem=problems)
def test_fedamp_among_strangers_is_training_alone(problem):
    """With σ far below all squared distances c_ij = 0, and without λ nothing else couples the clients."""
    problem["rule"] = "fedit"
    apart = make("fedamp", problem, attention="distance", sigma=1e-9, lam=0.0)
    alone = make("local", problem)
    ours = models(apart, problem, run(apart, problem))
    for client, theirs in models(alone, problem, run(alone, problem)).items():
        if problem["schedule"] == "plateau" or problem["size"] == 1:
            continue
        assert (ours[client] - theirs).norm() <= 1e-9 * (1 + theirs.norm())


@pytest.mark.parametrize(
    "name", ["fedper", "fedrep", "fedpdpo", "fedsdg", "fedbn", "ditto", "pfedme", "fedala"]
)
@examples(6)
@given(problem=problems)
def test_a_client_that_stays_away_keeps_its_first_state(name, problem):
    """And it predicts with what was published and its own parts as they started."""
    kind = METHODS[name]
    begin = initial(kind.needs(kind.Settings()), seed=problem["seed"])
    method = kind.build(
        kind.Settings(**common(problem)), begin.layout, Aggregator(MergeConfig(), begin.layout, 2.0), 3
    )
    clients = crowd(3, begin.layout.size, problem["seed"])
    outcome = simulate(method, clients, begin, 2, cohort=1, seed=problem["seed"])
    away = set(clients) - {upload.client for upload in outcome.uploads}
    published = begin.replace(outcome.server.tensors["model"])
    for client in away:
        assert outcome.private[client].tensors.keys() == method.init_client(begin, client).tensors.keys()
        model = outcome.models(method, clients, begin)[client]
        assert model.equal(published)


@examples(10)
@given(problem=problems)
def test_fedpdpo_without_bottleneck_and_reward_head_is_fedrep(problem):
    """What is left is a shared LoRA and a personal head, fitted in turn on DPO's loss: bit-identical."""
    begin = initial({"lora", "head"} | lora.needs(problem["rule"]), seed=problem["seed"])
    clients = crowd(problem["size"], begin.layout.size, problem["seed"])
    outcomes = []
    for name, own in (("fedpdpo", {"bottleneck": False, "reward_head": False}), ("fedrep", {})):
        kind, aggregator = METHODS[name], Aggregator(MergeConfig(lora=problem["rule"]), begin.layout, 2.0)
        method = kind.build(kind.Settings(**common(problem), **own), begin.layout, aggregator, 3)
        outcome = simulate(method, clients, begin, 3, seed=problem["seed"])
        outcomes.append((outcome.server.tensors["model"], outcome.models(method, clients, begin)))
    (shared, own), (theirs, each) = outcomes
    assert shared.equal(theirs)
    assert all(own[client].equal(each[client]) for client in clients)
