"""Settings, schedules and the registry of the methods, and what a client is asked to train."""

import math

import pytest
from pydantic import ValidationError

from prefed.core import Download, Key, Method, Round, State, Tensors, Upload
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS, LocalSettings
from prefed.methods.base import lr_schedule
from prefed.methods.base.fedavg import FedAvgBase
from prefed.testing import Quadratic, QuadraticTrainer, check_kind, crowd, initial, simulate
from prefed.train.losses import OBJECTIVES

SIZE = initial().layout.size
SPINE = ("feddpo", "fedsft", "fedprox", "scaffold", "centralized", "local")


def make(name: str, merge: MergeConfig | None = None, rounds: int = 10, **settings: object) -> Method:
    kind = METHODS[name]
    layout = initial(kind.needs(kind.Settings())).layout
    aggregator = Aggregator(merge or MergeConfig(), layout, 2.0)
    return kind.build(kind.Settings(**settings), layout, aggregator, rounds)


# Settings


def test_kinds_settings_and_methods_agree(subtests):
    for case, kind in METHODS.items():
        with subtests.test(case):
            check_kind(kind)
            assert kind.needs(kind.Settings()) & {"lora", "variational", "mixture", "examples"}
            assert make(kind.name).pooled == (kind.name == "centralized")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0}, "greater than 0"),
        ({"local_steps": 3, "local_epochs": 2}, "exactly one of local_steps and local_epochs"),
        ({"betas": (0.9, 1.0)}, r"betas.1\n  Input should be less than 1 "),
        ({"schedule": "cosine", "lr_min": 1e-3}, "lr_min 0.001 is above lr 0.0001"),
        ({"objective": "hing"}, "did you mean 'hinge'"),
        ({"objective_settings": {"label_smoothing": 0.1}}, "has no setting 'label_smoothing'"),
        ({"objective": "cdpo", "objective_settings": {"label_smoothing": 0.7}}, "label_smoothing"),
        ({"objective_settings": {"beta": 0.1}}, "set beta as a setting of the method"),
        ({"learning_rate": 1e-4}, "learning_rate"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        LocalSettings(**settings)


def test_scaffold_is_plain_sgd():
    for settings in ({"momentum": 0.9}, {"weight_decay": 0.01}, {"optimizer": "adamw"}):
        with pytest.raises(ValidationError, match=r"plain SGD|'sgd'"):
            METHODS["scaffold"].Settings(**settings)


def test_an_objective_brings_its_own_beta_unless_one_is_given():
    assert LocalSettings().goal().settings == {"beta": 0.1}
    assert LocalSettings(objective="simpo").goal().settings == {"beta": 2.0, "gamma": 1.0}
    chosen = LocalSettings(objective="simpo", beta=3.0, objective_settings={"gamma": 0.5})
    assert chosen.goal().settings == {"beta": 3.0, "gamma": 0.5}
    assert LocalSettings(objective="sft").goal().settings == {}


def test_every_objective_on_pairs_can_be_asked_for(subtests):
    for name in [name for name, loss in OBJECTIVES.items() if not loss.needs_reward]:
        with subtests.test(name=name):
            goal = LocalSettings(objective=name).goal()
            assert goal.name == name
            assert goal.settings == OBJECTIVES[name].defaults


# What a client is asked to train


def phases(method: Method, rounds: int = 2, clients: int = 2):
    start = initial()
    return simulate(method, crowd(clients, SIZE), start, rounds).phases


def test_settings_reach_the_phase():
    optimizer = {"lr": 0.3, "betas": (0.8, 0.9), "momentum": 0.5, "weight_decay": 0.2, "clip": 2.5}
    counts = {"batch_size": 3, "accumulate": 2}
    own = {"optimizer": "adam", "local_steps": 7, "objective": "ipo", "beta": 0.4}
    phase = phases(make("feddpo", **optimizer, **counts, **own))[0]
    assert {name: getattr(phase.optimizer, name) for name in optimizer} == optimizer
    assert {name: getattr(phase, name) for name in counts} == counts
    assert (phase.optimizer.name, phase.steps, phase.epochs) == ("adam", 7, None)
    assert (phase.objective.name, dict(phase.objective.settings)) == ("ipo", {"beta": 0.4})
    assert set(phase.train) == set(initial())


@pytest.mark.parametrize(
    ("name", "rule", "settings", "message"),
    [
        ("scaffold", "flora", {}, "so the control variates of earlier rounds would belong to other"),
        ("scaffold", "flexlora", {}, "'flexlora' in .merge. replaces the LoRA's A in every round"),
        ("feddpo", "flora", {"optimizer_state": "kept"}, "use another lora or optimizer_state 'new'"),
        ("fedrep", "flexlora", {"optimizer_state": "kept"}, "so the optimiser states of earlier rounds"),
        ("ditto", "flora", {}, "towards which Ditto would pull"),
    ],
)
def test_what_is_kept_between_rounds_needs_the_same_a(name, rule, settings, message):
    """Unless A stays: with FedEx-LoRA it is the mean of the clients'. Without a pull, Ditto keeps whole
    models, and local training has no A but its own."""
    with pytest.raises(ValueError, match=message):
        make(name, MergeConfig(lora=rule), **settings)
    make(name, MergeConfig(lora="fedex"), **settings)
    make("ditto", MergeConfig(lora=rule), lam=0)
    make("local", MergeConfig(lora=rule), optimizer_state="kept")


@pytest.mark.parametrize("name", ["centralized", "local"])
def test_where_nothing_is_merged_the_lora_rules_have_no_say(name):
    for rule in ("ffa", "rolora", "fedsa"):
        run = simulate(make(name, MergeConfig(lora=rule)), crowd(1, SIZE), initial(), 2)
        assert all(set(phase.train) == set(initial()) for phase in run.phases)


# The learning rate over the rounds


def test_cosine_falls_from_lr_towards_lr_min():
    """Round t of 10: 0.1 + ½ (1.1 − 0.1)(1 + cos(π (t − 1) / 10)), so 1.1, then 0.6 in round 6."""
    method = make("feddpo", lr=1.1, lr_min=0.1, schedule="cosine")
    rates = [phase.optimizer.lr for phase in phases(method, rounds=10, clients=1)]
    assert rates[0] == pytest.approx(1.1)
    assert rates[5] == pytest.approx(0.6)
    assert rates[9] == pytest.approx(0.1 + (1 + math.cos(0.9 * math.pi)) / 2)


def test_plateau_multiplies_by_four_fifths_when_the_mean_loss_rose():
    """Losses weighted by size: rounds report 2, 3 (rose), 2.5 (fell), 2.5 (equal), 2.75 (rose)."""
    state = State({}, lr_schedule.begin(LocalSettings(schedule="plateau")))
    factors = []
    for low, high in ((2.0, 2.0), (1.5, 3.5), (1.0, 3.0), (4.0, 2.0), (2.0, 3.0)):
        uploads = [Upload("a", 1, {}, {"loss": low}), Upload("b", 3, {}, {"loss": high})]
        state = lr_schedule.advance(state, uploads)
        factors.append(lr_schedule.announce(state)["rate"])
    assert factors == pytest.approx([1, 0.8, 0.8, 0.8, 0.64])
    assert lr_schedule.advance(state, []) is state


@pytest.mark.parametrize(("rule", "expected"), [("mean", 0.8**3), ("median", 1.0), ("norm_clip", 1.0)])
def test_one_client_cannot_lower_everybodys_rate_under_a_robust_rule(rule, expected):
    """Two losses stay at 1, the third grows tenfold a round: the mean rises three times, the median never."""
    method = make("feddpo", MergeConfig(rule=rule), schedule="plateau")
    (exchange,), start = method.exchanges, initial()
    state, weights = method.init_server(start), dict.fromkeys("abc", 1.0)
    for number in range(1, 5):
        losses = {"a": 1.0, "b": 1.0, "c": 10.0**number}
        uploads = [Upload(c, 1.0, {"model": start}, {"loss": loss}, number) for c, loss in losses.items()]
        state, _ = exchange.merge(state, uploads, Round(number, 10, Key(0), weights))
    assert state.values["rate"] == pytest.approx(expected)


def test_a_loss_without_a_decimal_point_is_a_loss_all_the_same():
    """JSON has whole numbers of their own. Under a robust rule as under the mean, 2 after 1 is a rise."""
    for robust in (False, True):
        state = State({}, lr_schedule.begin(LocalSettings(schedule="plateau")))
        for loss in (1, 2):
            state = lr_schedule.advance(state, [Upload("a", 1, {}, {"loss": loss})], robust=robust)
        assert lr_schedule.announce(state)["rate"] == pytest.approx(0.8)


def test_a_plateau_takes_the_losses_that_there_are():
    """A client that may not report its loss sends none. Means of the others: 2, 3 (rose); then nobody
    reports, and 3 stays what the next loss, 2.5, is compared with."""
    state = State({}, lr_schedule.begin(LocalSettings(schedule="plateau")))
    silent = Upload("b", 3)
    for scalars, factor in (({"loss": 2.0}, 1), ({"loss": 3.0}, 0.8), ({}, 0.8), ({"loss": 2.5}, 0.8)):
        state = lr_schedule.advance(state, [Upload("a", 1, {}, scalars), silent])
        assert lr_schedule.announce(state)["rate"] == pytest.approx(factor)
        assert state.values["last_loss"] == scalars.get("loss", 3.0)


@pytest.mark.parametrize("name", [name for name in SPINE if name != "centralized"])
def test_a_plateau_travels_to_the_clients(name):
    """A rate of 5 on a quadratic of curvature 1 multiplies the distance by −4 a step: the loss only rises."""
    settings = {"optimizer": "sgd", "clip": 0, "weight_decay": 0, "lr": 5.0, "local_steps": 1}
    clients = {"a": Quadratic.at([1.0] * SIZE)}
    start = initial()
    run = simulate(make(name, schedule="plateau", **settings), clients, start, 4)
    assert [phase.optimizer.lr for phase in run.phases] == pytest.approx([5, 5, 4, 3.2])
    assert [download.scalars["rate"] for download in run.downloads] == pytest.approx([1, 1, 0.8, 0.64])


def test_other_schedules_send_no_rate():
    assert phases(make("feddpo", lr=0.5), rounds=3)[-1].optimizer.lr == 0.5
    run = simulate(make("feddpo", schedule="cosine"), crowd(1, SIZE), initial(), 2)
    assert all(download.scalars == {} for download in run.downloads)


def test_rates_of_single_tensors_follow_the_schedule():
    """Half way through a cosine to 0.04 a rate r is (r + 0.04) / 2, and one below 0.04 stays what it is."""
    start = initial()
    fedavg = FedAvgBase.of(
        LocalSettings(lr=1.0, lr_min=0.04, schedule="cosine"),
        Aggregator(MergeConfig(), start.layout, 2.0),
        10,
    )
    now = Round(6, 10, Key(0), {"a": 1.0})
    trainer = QuadraticTrainer("a", Quadratic.at([0.0] * SIZE), now, Key(0), fedavg.ownership, start)
    rates = {"lora/0/q/A": 0.1, "lora/0/q/B": 0.01}
    phase = fedavg.phase(trainer, Download(), "inner", lr=0.4, rates=rates, steps=3)
    assert phase.optimizer.lr == pytest.approx(0.22)
    assert phase.rates == {"lora/0/q/A": pytest.approx(0.07), "lora/0/q/B": pytest.approx(0.01)}
    assert (phase.name, phase.steps, phase.epochs) == ("inner", 3, None)


# Owners


def test_fedex_hands_its_residual_to_clients_who_do_not_train_it():
    """φ after round 1: the clients' mean product is B̄ Ā plus what the residual holds, at scaling s = 2."""
    kind = METHODS["feddpo"]
    start = initial({"lora", "residual"})
    aggregator = Aggregator(MergeConfig(lora="fedex"), start.layout, 2.0)
    method = kind.build(kind.Settings(optimizer="sgd", lr=0.5, clip=0), start.layout, aggregator, 3)
    clients = crowd(2, start.layout.size)
    run = simulate(method, clients, start, 2)
    assert not any("residual" in name for phase in run.phases for name in phase.train)
    assert not any("residual" in name for upload in run.uploads for name in upload.tensors["model"])
    first = simulate(method, clients, start, 1)
    weights = [upload.weight for upload in first.uploads]
    products = [u.tensors["model"]["lora/1/q/B"] @ u.tensors["model"]["lora/1/q/A"] for u in first.uploads]
    mean = sum(w * p for w, p in zip(weights, products, strict=True)) / sum(weights)
    model: Tensors = first.server.tensors["model"]
    whole = 2.0 * model["lora/1/q/B"] @ model["lora/1/q/A"] + model["residual/1/q/W"]
    assert (whole - 2.0 * mean).abs().max() < 1e-12
    assert run.downloads[-1].tensors["model"]["residual/1/q/W"].equal(model["residual/1/q/W"])
