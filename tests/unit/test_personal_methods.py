"""What the personalised methods ask of clients, send and keep: phases, rates, parts, settings."""

import math

import pytest
import torch
from pydantic import ValidationError

from prefed.core import Download, Key, Objective, Owner, Phase, Round, State, Tensors
from prefed.merge import Aggregator, MergeConfig, lora
from prefed.methods import METHODS
from prefed.testing import Quadratic, QuadraticTrainer, Run, crowd, initial, simulate
from prefed.train.losses import OBJECTIVES, PPO

BASELINES = ("feddpo", "perfedavg", "fedamp", "fedper", "fedrep")
LATER = Round(9, 9, Key(0), {})
"""For a move that asks nothing of its round."""
PERSONAL = tuple(
    n for n, kind in METHODS.items() if kind.personal and kind.reads == "policy" and n not in ("local", "icl")
)


def make(name: str, rule: str = "fedit", rounds: int = 5, blocks: int = 3, **settings: object):
    """A method and the start of the model that it needs."""
    kind = METHODS[name]
    chosen = kind.Settings(**settings)
    start = initial(kind.needs(chosen) | lora.needs(rule), blocks=blocks)
    return kind.build(
        chosen, start.layout, Aggregator(MergeConfig(lora=rule), start.layout, 2.0), rounds
    ), start


def run(name: str, rule: str = "fedit", rounds: int = 2, clients: int = 2, **settings: object) -> Run:
    method, start = make(name, rule, **settings)
    return simulate(method, crowd(clients, start.layout.size), start, rounds)


def kinds(names: object) -> set[str]:
    """The first words of tensor names: their parts."""
    return {name.split("/")[0] for name in names}


def refusal(name: str, **settings: object) -> str:
    with pytest.raises(ValidationError) as error:
        METHODS[name].Settings(**settings)
    return str(error.value)


# FedPDPO


def test_fedpdpo_trains_what_is_personal_and_then_what_is_shared():
    first, second = run("fedpdpo", rounds=1, clients=1).phases
    assert (first.name, kinds(first.train)) == ("personal", {"bottleneck", "head", "reward"})
    assert (second.name, kinds(second.train)) == ("train", {"lora"})
    assert (first.optimizer.lr, second.optimizer.lr) == (1e-4, 5e-5)
    for phase in (first, second):
        assert (phase.optimizer.weight_decay, phase.optimizer.clip) == (0.01, 1.0)
        assert (phase.batch_size, phase.accumulate, phase.epochs) == (8, 2, 1)


def test_fedpdpo_weighs_the_explicit_margin_as_its_loss_does():
    """w_r s: w_r(3) = 0.5 + 2/4 of five rounds, s as the client keeps it, 1 before its first visit."""
    method, _ = make("fedpdpo", rounds=5)
    assert method.reward_weight(State(values={"scale": 3.0}), 3) == 3.0
    assert method.reward_weight(State(), 5) == 1.5
    fixed, _ = make("fedpdpo", reward_schedule=False, reward_weight=0.25)
    assert fixed.reward_weight(State(values={"scale": 3.0}), 3) == 0.75


def test_fedpdpos_explicit_reward_gains_weight_over_the_rounds():
    """w_r(t) = 0.5 + (t − 1) / (T − 1) with T = 5; PDPO's settings all come from the method's."""
    bounds = {"scale_least": 0.0, "scale_most": 20.0}
    phases = run("fedpdpo", rounds=5, clients=1, beta=0.3, exclude_k=3.0, **bounds).phases[1::2]
    assert [phase.objective.settings["weight"] for phase in phases] == [0.5, 0.75, 1.0, 1.25, 1.5]
    constant = run("fedpdpo", rounds=2, clients=1, reward_schedule=False).phases
    assert {phase.objective.settings["weight"] for phase in constant} == {0.8}
    expected = {"beta": 0.3, "weight": 0.5, "exclude": 1.0, "k": 3.0, "most": 0.5, **bounds}
    assert phases[0].objective == Objective("pdpo", expected)
    assert OBJECTIVES["pdpo"].resolve(expected) == expected


def test_fedpdpo_carries_the_scale_from_phase_to_phase_and_visit_to_visit():
    """Here it grows by 1 with each step, from 1; three and two steps a visit."""
    outcome = run("fedpdpo", clients=1, personal_steps=3, local_steps=2)
    assert [phase.memory for phase in outcome.phases] == [{"scale": s} for s in (1.0, 4.0, 6.0, 9.0)]
    assert outcome.private["client-0"].values == {"scale": 11.0}
    assert all(set(upload.scalars) == {"loss"} for upload in outcome.uploads)


@pytest.mark.parametrize(
    ("off", "parts"),
    [
        ({"bottleneck": False}, {"head", "reward"}),
        ({"reward_head": False}, {"bottleneck", "head"}),
        ({"personal_head": False}, {"bottleneck", "reward"}),
    ],
)
def test_fedpdpos_ablations_leave_a_part_out(off, parts):
    assert METHODS["fedpdpo"].needs(METHODS["fedpdpo"].Settings(**off)) == {"lora", *parts}
    outcome = run("fedpdpo", rounds=1, clients=1, **off)
    assert kinds(outcome.phases[0].train) == parts
    objective = "pdpo" if "reward" in parts else "dpo"
    assert {phase.objective.name for phase in outcome.phases} == {objective}
    assert set(outcome.private["client-0"].values) == ({"scale"} if objective == "pdpo" else set())


@pytest.mark.parametrize("name", ["fedpdpo", "fedrep", "ditto"])
def test_how_long_the_personal_phase_is(name):
    def lengths(**settings: object) -> list[tuple[int | None, int | None]]:
        phases = run(name, rounds=1, clients=1, **settings).phases
        return [(p.steps, p.epochs) for p in phases if p.name == "personal"]

    assert lengths() == lengths(local_epochs=3) == [(None, 1)]
    assert lengths(local_steps=4) == [(4, None)]
    assert lengths(local_steps=4, personal_epochs=2) == [(None, 2)]
    assert lengths(local_epochs=3, personal_steps=5) == [(5, None)]
    assert "not both" in refusal(name, personal_steps=1, personal_epochs=1)


# FedPer, FedRep, FedBN


def test_fedrep_fits_the_head_first():
    first, second = run("fedrep", rounds=1, clients=1).phases
    assert (first.name, kinds(first.train), first.optimizer.lr) == ("personal", {"head"}, 1e-4)
    assert (second.name, kinds(second.train), second.optimizer.lr) == ("train", {"lora"}, 5e-5)


# Per-FedAvg, pFedMe: what a visit is made of


@pytest.mark.parametrize(
    ("name", "settings", "visits"),
    [
        # 100 pairs in batches of 2 × 2 are 25 steps a pass: 5 outer steps of 1 + 5, 13 local rounds of 4.
        ("perfedavg", {"batch_size": 2, "local_epochs": 1}, 5),
        ("perfedavg", {"batch_size": 64, "local_epochs": 1}, 1),
        ("perfedavg", {"local_steps": 3}, 3),
        ("pfedme", {"batch_size": 2, "local_epochs": 2, "inner_steps": 4}, 13),
        ("pfedme", {"local_steps": 3}, 3),
    ],
)
def test_a_visit_in_passes_counts_inner_steps_too(name, settings, visits):
    method, start = make(name, **settings)
    target = Quadratic.at([0.0] * start.layout.size, size=100)
    outcome = simulate(method, {"a": target}, start, 1)
    assert sum(phase.name.startswith("inner") for phase in outcome.phases) == visits


def test_perfedavg_adapts_to_predict_unless_there_is_nothing_to_adapt_to():
    method, start = make("perfedavg")
    published = Download({"model": start})
    now = Round(3, 5, Key(0), {"a": 4.0})
    empty = Quadratic(torch.zeros(0, start.layout.size, dtype=torch.float64))
    trainer = QuadraticTrainer("a", empty, now, Key(0), method.ownership, start)
    assert method.predict(trainer, State(), published).equal(start)
    data = Quadratic.at([5.0] * start.layout.size, size=4)
    trainer = QuadraticTrainer("a", data, now, Key(0), method.ownership, start)
    assert not method.predict(trainer, State(), published).equal(start)
    (phase,) = trainer.phases
    assert (phase.name, phase.steps, phase.optimizer.lr) == ("inner", 5, 0.01)


def test_settings_that_are_refused(subtests):
    for name, settings, message in (
        ("perfedavg", {"optimizer": "adam"}, "'sgd' or 'adamw'"),
        ("perfedavg", {"optimizer": "adamw", "variant": "hf"}, "variant 'hf' requires optimizer 'sgd'"),
        ("perfedavg", {"momentum": 0.9}, "optimizer 'sgd' requires momentum = 0 and weight_decay = 0"),
        ("perfedavg", {"weight_decay": 0.1}, "optimizer 'sgd' requires momentum = 0 and weight_decay = 0"),
        ("perfedavg", {"objective": "ppo", "variant": "hf"}, "variant 'hf' does not support objective 'ppo'"),
        ("pfedme", {"lam": 4.0, "outer_lr": 0.5}, "at most 1"),
        ("fedpdpo", {"scale_most": 0.05}, "scale_most 0.05 is below scale_least 0.1; raise it"),
        ("fedper", {"shared_layers": 0}, "greater than or equal to 1"),
        ("fedsdg", {"branch": "product"}, "'products' or 'factors'"),
        ("feddpo", {"ppo_minibatch": 5}, "ppo_minibatch\n  Input should be a multiple of 2 "),
        ("feddpo", {"objective": "pdpo"}, "objective 'pdpo' requires the reward head of method 'fedpdpo'"),
        ("feddpo", {"objective": "ppo", "objective_settings": {"klx": 1}}, "did you mean 'kl'"),
    ):
        with subtests.test(name=name, settings=settings):
            assert message in refusal(name, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "merge", "message"),
    [
        ("fedamp", {}, {"rule": "krum"}, "rule 'mean'"),
        ("fedamp", {}, {"optimizer": {"name": "fedadam"}}, "optimizer 'none'"),
        ("pfedme", {"server_mixing": 0.5}, {"lora": "flexlora"}, "lora 'flexlora' cannot be combined"),
        ("fedsdg", {}, {"rule": "median"}, "rule 'median'"),
        ("fedsdg", {}, {"weights": "mass"}, "set alignment to 'off'"),
    ],
)
def test_merge_rules_that_do_not_go_with_a_method(name, settings, merge, message):
    kind = METHODS[name]
    chosen = kind.Settings(**settings)
    layout = initial(kind.needs(chosen)).layout
    with pytest.raises(ValueError, match=message):
        kind.build(chosen, layout, Aggregator(MergeConfig(**merge), layout, 2.0), 3)


# FedAMP


def test_fedamp_sends_each_client_its_own_and_a_new_one_the_mean():
    method, start = make("fedamp")
    clients = crowd(4, start.layout.size)
    outcome = simulate(method, clients, start, 3, cohort=2)
    senders = {upload.client for upload in outcome.uploads}
    stored = {name.removeprefix("client/") for name in outcome.server.tensors if name.startswith("client/")}
    assert stored == senders
    sent = {
        client: method.exchanges[0].send(outcome.server, client, LATER).tensors["model"] for client in clients
    }
    mean = outcome.server.tensors["model"]
    for client, model in sent.items():
        assert model.equal(mean) == (client not in senders)
    rows = outcome.server.values["attention"]
    assert all(math.isclose(sum(row.values()), 1) for row in rows.values())
    assert min(weight for row in rows.values() for weight in row.values()) >= 0.05 / (1 + 0.05 * len(senders))
    assert outcome.report["own_weight"] == pytest.approx(
        sum(rows[client][client] for client in rows) / len(rows)
    )


@pytest.mark.parametrize("rule", ["fedex", "flexlora", "flora"])
def test_fedamps_mixtures_are_of_products_under_the_rules_that_mean_products(rule):
    """s B A + R of what i receives is Σ_j a_ij (s B_j A_j + R_j); flexlora's rank 2 is full, and R is 0."""
    method, start = make("fedamp", rule, lr=0.3, optimizer="sgd", clip=0)
    outcome = simulate(method, crowd(3, start.layout.size), start, 3)

    def product(model: Tensors) -> torch.Tensor:
        whole = 2.0 * model["lora/1/q/B"] @ model["lora/1/q/A"]
        return whole + model["residual/1/q/W"] if rule != "flexlora" else whole

    models = {c: outcome.server.tensors[f"client/{c}"] for c in outcome.private}
    for receiver, row in outcome.server.values["attention"].items():
        mixed = product(method.exchanges[0].send(outcome.server, receiver, LATER).tensors["model"])
        expected = sum(weight * product(models[sender]) for sender, weight in row.items())
        assert (mixed - expected).abs().max() < 1e-12


def test_fedamp_keeps_what_rested_as_the_client_was_sent_it():
    """Under rolora the second round trains A: of B the server keeps the mixture that the client had."""
    method, start = make("fedamp", "rolora", lr=0.3, optimizer="sgd", clip=0)
    clients = crowd(3, start.layout.size)
    outcome = simulate(method, clients, start, 1)
    sent = {
        c: method.exchanges[0].send(outcome.server, c, LATER).tensors["model"]["lora/0/q/B"] for c in clients
    }
    outcome = simulate(method, clients, start, 2, run=outcome)
    for client in clients:
        assert outcome.server.tensors[f"client/{client}"]["lora/0/q/B"].equal(sent[client])
    assert not sent["client-0"].equal(sent["client-1"])


# FedSDG


# Ditto, pFedMe, FedALA


# PPO on the baselines


@pytest.mark.parametrize("name", BASELINES)
def test_the_critic_is_needed_and_never_leaves(name):
    kind = METHODS[name]
    usual, ppo = kind.needs(kind.Settings()), kind.needs(kind.Settings(objective="ppo"))
    assert ppo == usual | {"value"}
    method, start = make(name, objective="ppo")
    assert method.ownership.owners["value/weight"] is Owner.PERSONAL
    assert method.personal == METHODS[name].personal
    outcome = simulate(method, crowd(2, start.layout.size), start, 2)
    assert all(phase.objective == Objective("ppo", PPO.defaults) for phase in outcome.phases)
    assert all("value/weight" in phase.train for phase in outcome.phases)
    assert not any("value/weight" in upload.tensors["model"] for upload in outcome.uploads)
    for state in outcome.private.values():
        assert not torch.equal(state.tensors["personal"]["value/weight"], start["value/weight"])


@pytest.mark.parametrize(
    ("settings", "steps", "epochs", "pairs"),
    [
        ({}, None, 4, 2),
        ({"local_epochs": 2, "ppo_epochs": 3, "ppo_minibatch": 8}, None, 6, 4),
        ({"local_steps": 7}, 7, None, 2),
    ],
)
def test_ppos_minibatches_and_passes(settings, steps, epochs, pairs):
    (phase,) = run("feddpo", rounds=1, clients=1, objective="ppo", **settings).phases
    assert (phase.steps, phase.epochs, phase.batch_size, phase.accumulate) == (steps, epochs, pairs, 1)


def test_ppo_is_for_the_baselines_alone(subtests):
    for name in METHODS:
        with subtests.test(name=name):
            if name in BASELINES:
                assert METHODS[name].Settings(objective="ppo").reward_model.startswith("OpenAssistant/")
            else:
                message = refusal(name, objective="ppo")
                assert "feddpo, perfedavg, fedamp, fedper or fedrep" in message or "objective" in message


# All of them


@pytest.mark.parametrize("name", PERSONAL)
def test_a_plateau_reaches_every_phase_but_inner_steps(name):
    """A step too long makes the loss rise in each round, so that the third has 0.8 of the first's rates."""
    settings = {"optimizer": "sgd", "clip": 0, "weight_decay": 0, "lr": 5.0, "local_steps": 1}
    if name == "perfedavg":
        settings["inner_lr"] = 1e-9
    if name == "pfedme":
        settings.update(inner_steps=1, outer_lr=1.0)
    method, start = make(name, schedule="plateau", **settings)
    target = {"a": Quadratic.at([1.0] * start.layout.size)}
    outcome = simulate(method, target, start, 3)
    each = len(outcome.phases) // 3
    steady = name == "perfedavg"

    def rates(phases: list[Phase]) -> list[float]:
        return [p.optimizer.lr for p in phases if not (steady and p.name.startswith("inner"))]

    assert rates(outcome.phases[2 * each :]) == pytest.approx(
        [0.8 * lr for lr in rates(outcome.phases[:each])]
    )


@pytest.mark.sample
@pytest.mark.parametrize(
    ("rule", "trained", "sent"),
    [
        ("fedit", ["AB", "AB"], ["AB", "AB"]),
        ("ffa", ["B", "B"], ["B", "B"]),
        ("rolora", ["B", "A"], ["B", "A"]),
        ("fedsa", ["AB", "AB"], ["A", "A"]),
        ("fedex", ["AB", "AB"], ["AB", "AB"]),
        ("flexlora", ["AB", "AB"], ["AB", "AB"]),
    ],
)
@pytest.mark.parametrize("name", [*PERSONAL, "feddpo", "fedsft", "fedprox", "scaffold"])
def test_lora_rules_decide_which_shared_factors_train_and_are_sent(name, rule, trained, sent):
    """Of the first block, which all methods share, by round: FFA never moves A, RoLoRA alternates, FedSA
    keeps B. SCAFFOLD needs the same A in all rounds."""
    if (name, rule) == ("scaffold", "flexlora"):
        return
    outcome = run(name, rule, clients=1, local_steps=1)

    def factors(names: object) -> str:
        return "".join(sorted({n[-1] for n in names if n.startswith("lora/0/")}))

    shared = [p for p in outcome.phases if "lora/0/q/A" in p.train or "lora/0/q/B" in p.train]
    shared = [p for p in shared if p.name != "personal"]
    each = len(shared) // 2
    assert [factors(shared[0].train), factors(shared[each].train)] == trained
    assert [factors(upload.tensors["model"]) for upload in outcome.uploads] == sent
    assert not any("residual" in n for p in outcome.phases for n in p.train)
