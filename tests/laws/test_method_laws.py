"""Laws that hold between methods, and for each of them, on random small federations."""

from contextlib import suppress
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import Field
from tests.laws.test_messages import REFUSED

from law_examples import examples
from prefed.core import Method, Round
from prefed.engines.config import DIAGNOSE
from prefed.merge import MergeConfig, ServerOptimizer
from prefed.methods import METHODS, feddpo
from prefed.networks.federation.config import EXCHANGES
from prefed.testing import (
    RULES,
    Problem,
    Run,
    check_few_pairs,
    check_kind,
    check_models,
    check_order,
    check_resume,
    quadratics,
)

OPTIMIZERS = ("adamw", "adam", "sgd", "rmsprop")
OWN = {"fedbiscuit": {"selectors": 2, "warmup_rounds": 1, "regroup_every": 1}}
"""Settings with which three rounds have all that a method does."""
PLAIN = {
    "optimizer": "sgd",
    "schedule": "constant",
    "local_steps": 1,
    "batch_size": 2,
    "lr": 0.1,
    "size": 3,
    "seed": 0,
}
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


def on(name: str, drawn: dict, merge: MergeConfig | None = None, **own: object) -> Problem:
    """The method of that name, with settings of its own, on a problem that was drawn."""
    common = {key: drawn[key] for key in ("optimizer", "schedule", "local_steps", "batch_size", "lr")}
    common = {key: value for key, value in common.items() if value is not None}
    if name in ("scaffold", "perfedavg"):
        common["optimizer"] = "sgd"
    if METHODS[name].reads == "choice":
        common = {"local_epochs": None if "local_steps" in common else 1, **common}
        common["batch_size"] *= 2
    settings = {**common, **OWN.get(name, {}), **own}
    return Problem(METHODS[name], settings, merge or MergeConfig(), drawn["size"], seed=drawn["seed"])


def test_a_site_may_allow_each_exchange_by_its_name(subtests):
    """What a site's file takes in ``[limits] exchanges`` has every name that a hub can ask for. No hub can
    ask for a diagnosis."""
    for name in METHODS:
        with subtests.test(name=name):
            assert {exchange.name for exchange in on(name, PLAIN).build().exchanges} <= {*EXCHANGES}
    assert DIAGNOSE not in EXCHANGES


def same(one: Run, other: Run) -> bool:
    """The servers' shared tensors agree bit for bit."""
    return one.server.tensors["model"].equal(other.server.tensors["model"])


@examples(25)
@given(problems)
def test_fedprox_without_a_pull_is_feddpo(problem):
    assert same(on("fedprox", problem, mu=0.0).run(), on("feddpo", problem).run())


@examples(25)
@given(problems)
def test_one_client_is_centralised(problem):
    problem["size"] = 1
    assert same(on("feddpo", problem).run(), on("centralized", problem).run())


@examples(25)
@given(problems)
def test_one_client_alone_is_feddpo(problem):
    """Its personal tensors are what one client's federation shares."""
    problem["size"] = 1
    alone = on("local", problem).run().private["client-0"].tensors["personal"]
    assert alone.equal(on("feddpo", problem).run().server.tensors["model"])


@examples(15)
@given(problems)
def test_supervised_and_preference_training_differ_in_the_loss_alone(problem):
    """A quadratic is blind to the objective's name, so here they agree bit for bit."""
    assert same(on("fedsft", problem).run(), on("feddpo", problem).run())


@examples(15)
@given(problems, st.sampled_from(["feddpo", "fedprox", "fedsft", "scaffold"]))
def test_server_momentum_of_zero_at_rate_one_is_the_mean(problem, name):
    still = MergeConfig(optimizer=ServerOptimizer(name="fedavgm", momentum=0.0, lr=1.0))
    assert same(on(name, problem, still).run(), on(name, problem).run())


@examples(15)
@given(problems)
def test_scaffold_of_one_client_is_plain_sgd(problem):
    """c and c_1 are equal, so the correction is zero: FedDPO with SGD, up to rounding."""
    problem.update(size=1, optimizer="sgd")
    plain = on("feddpo", problem, weight_decay=0, clip=0).run().server.tensors["model"]
    scaffold = on("scaffold", problem).run().server.tensors["model"]
    assert (scaffold - plain).norm() <= 1e-12 * (1 + plain.norm())


@examples(10)
@given(problems, st.sampled_from(["samples", "uniform"]))
def test_scaffolds_server_variate_is_the_mean_of_the_clients(problem, weights):
    """c = Σ p_i c_i after every round, whoever took part; p_i = n_i / Σ n or 1/N."""
    scaffold = on("scaffold", problem, MergeConfig(weights=weights))
    run_ = scaffold.run(cohort=max(1, problem["size"] - 1))
    sizes = {client: data.size if weights == "samples" else 1 for client, data in scaffold.clients.items()}
    variates = {client: run_.private[client].tensors["control"].flat for client in sizes}
    mean = sum(variates[client] * (size / sum(sizes.values())) for client, size in sizes.items())
    control = run_.server.tensors["control"].flat
    assert (control - mean).abs().max() <= 1e-9 * (1 + mean.abs().max())


@pytest.mark.parametrize("name", [name for name in METHODS if name != "decdpo"])
@examples(8)
@given(rule=st.sampled_from(RULES), problem=problems)
def test_stopped_and_resumed_is_uninterrupted(name, rule, problem):
    """All states go through bytes between the rounds, and all messages are equal after a trip."""
    assume((name, rule) not in REFUSED)
    check_resume(on(name, problem, MergeConfig(lora=rule)))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("centralized", "decdpo")])
@examples(8)
@given(problem=problems, data=st.data())
def test_the_order_of_replies_changes_no_bit(name, problem, data):
    """In any exchange of two rounds."""
    check_order(on(name, problem), lambda uploads: data.draw(st.permutations(uploads)))


class Watched(dict):
    """Weights of all clients, and whether more than one at a time was read."""

    read = False

    def _everyone(name):
        def read(self, *given):
            self.read = True
            return getattr(dict, name)(self, *given)

        return read

    __iter__, __len__, keys, values, items = map(
        _everyone, ("__iter__", "__len__", "keys", "values", "items")
    )


@pytest.mark.parametrize("weights", get_args(MergeConfig.model_fields["weights"].annotation))
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("centralized", "decdpo")])
def test_rounds_that_count_all_clients_are_declared(name, weights, monkeypatch):
    """Otherwise, forgetting a client would keep rounds before its first visit that depend on it."""
    rounds = []

    def watched(number, of, key, everyone, *rest):
        rounds.append(Round(number, of, key, Watched(everyone), *rest))
        return rounds[-1]

    monkeypatch.setattr(quadratics, "Round", watched)
    merge = MergeConfig(weights=weights)
    with suppress(ValueError):  # refused together
        on(name, PLAIN, merge).run(cohort=2)
    declared = merge.counts_clients or METHODS[name].reason("COUNTS_CLIENTS")
    assert declared or not any(now.weights.read for now in rounds)
    assert name != "feddpo" or merge.counts_clients == any(now.weights.read for now in rounds)


@pytest.mark.parametrize("name", METHODS)
def test_every_client_has_a_model_and_may_keep_its_numbers(name):
    """Also under the schedule that asks for the clients' losses; decdpo has no server to send them to."""
    check_models(on(name, PLAIN))
    if name != "decdpo":
        check_few_pairs(on(name, PLAIN | {"schedule": "plateau"}))


# A broken method breaks a law, each its own.


def broken(**moves) -> Problem:
    """FedDPO in which moves of its exchange are replaced, by functions of the whole ones."""

    def change(method: Method) -> Method:
        (exchange,) = method.exchanges
        changed = {name: move(getattr(exchange, name)) for name, move in moves.items()}
        return replace(method, exchanges=(replace(exchange, **changed),))

    return Problem(METHODS["feddpo"], {"local_steps": 1}, change=change)


def forgetful(work):
    """Every visit of a method's lifetime moves its upload further, by a count that is in no state."""
    visits = []

    def counting(trainer, private, download):
        visits.append(trainer.client)
        upload, state = work(trainer, private, download)
        return replace(upload, tensors={"model": upload.tensors["model"] + len(visits)}), state

    return counting


def test_memory_outside_the_states_is_found():
    with pytest.raises(AssertionError, match="another server state; whatever a method remembers must"):
        check_resume(broken(work=forgetful))


def test_a_merge_of_the_first_upload_is_found():
    first = broken(merge=lambda merge: lambda server, uploads, now: merge(server, uploads[:1], now))
    with pytest.raises(AssertionError, match=r"the merge depends on the order of uploads"):
        check_order(first)


def test_an_error_names_the_lora_rule_under_which_it_occurs():
    """FedSA's rule makes B personal, so it is not among the uploaded tensors."""

    def reading(merge):
        def sums(server, uploads, now):
            uploads[0].tensors["model"].select(["lora/0/q/B"])
            return merge(server, uploads, now)

        return sums

    with pytest.raises(KeyError, match="lora/0/q/B") as caught:
        check_order(replace(broken(merge=reading), merge=MergeConfig(lora="fedsa")))
    assert caught.value.__notes__ == ["(feddpo under [merge] lora = 'fedsa' with local_steps = 1)"]


def test_a_merge_that_needs_every_loss_is_found():
    def weighing(merge):
        return lambda server, uploads, now: merge(server, [u for u in uploads if u.scalars["loss"] > 0], now)

    with pytest.raises(AssertionError, match=r"minimum_pairs = \d+, uploads without numbers end .*'loss'"):
        check_few_pairs(broken(merge=weighing))


def test_a_model_without_all_tensors_is_found():
    def half(method: Method) -> Method:
        return replace(method, predict=lambda *a: method.predict(*a).select(["lora/0/q/A"]))

    with pytest.raises(AssertionError, match="the model of client-0 does not have all tensors of the model"):
        check_models(replace(broken(), change=half))


def test_a_kind_that_declares_something_else_is_found():
    text = r"feddpo: personal is True in MethodKind .*, but False in the method; pass it to fedavg\.method if"
    with pytest.raises(AssertionError, match=text):
        check_kind(replace(METHODS["feddpo"], personal=True))


def test_defaults_that_are_none_are_found(monkeypatch):
    class Settings(feddpo.Settings):
        mix: float = Field(description="a setting without a default")

    monkeypatch.setattr(feddpo, "Settings", Settings)
    with pytest.raises(AssertionError, match=r"feddpo: settings need valid defaults: mix \(Field required\)"):
        check_kind(METHODS["feddpo"])
