"""What is private leaves no trace in any message: every private number is made one recognisable bit pattern.

Every upload of every method also passes validation, which lets only declared names, shapes and numbers out.

The mark stands for any value of a private tensor. The tests put it into every tensor that must stay, at the
start, and into all of a client's private state before each visit. Training leaves marked numbers as they are.
Then no encoded message of any exchange may hold the eight bytes of the mark, or its decimal digits.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from prefed.core import (
    Download,
    Key,
    Layout,
    Method,
    Owner,
    Ownership,
    Phase,
    PhaseResult,
    Round,
    State,
    Tensors,
)
from prefed.core.wire import encode
from prefed.engines.validation import validate_upload, withhold_scalars
from prefed.merge import Aggregator, MergeConfig, lora
from prefed.methods import METHODS, to_neighbours
from quadratic import QuadraticTrainer, crowd, initial

RULES = ("fedit", "ffa", "rolora", "fedsa", "fedex", "flexlora")
PINNED = {
    *("feddpo", "fedsft", "fedprox", "scaffold", "centralized", "local"),
    *("fedpdpo", "fedper", "fedrep", "perfedavg", "fedamp", "fedsdg", "ditto", "pfedme", "fedala", "fedbn"),
    *("fedbis", "fedbiscuit", "decdpo"),
}
"""Methods whose private tensors are pinned here. Any other method is taken at its own ownership."""
PRIVATE = {"bottleneck", "head", "reward", "value", "personal_lora", "gate", "norm"}
"""Parts that no method may send (unless it is asked to share a trained head)."""
SENT = {"fedala": "own", "fedamp": "own"}
"""Method → the group of a client's private state that holds what it has sent before."""
MARK_BYTES = bytes.fromhex("5ac36996a53cf13f")
MARK = struct.unpack("<d", MARK_BYTES)[0]
PPO = {"objective": "ppo"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS},
    "fedbiscuit": ("fedbiscuit", {"selectors": 2, "warmup_rounds": 1, "regroup_every": 1}),
    "fedper, one block": ("fedper", {"shared_layers": 1}),
    "fedamp by distance": ("fedamp", {"attention": "distance", "sigma": 1e4}),
    "perfedavg with hessians": ("perfedavg", {"variant": "hf"}),
    "fedala by element": ("fedala", {"grain": "element"}),
    "fedsdg, personal head": ("fedsdg", {"head": "personal", "branch": "factors"}),
    "pfedme, mixing": ("pfedme", {"server_mixing": 0.5}),
    "fedper, no server": ("fedper", {}),
    "fedpdpo, no server": ("fedpdpo", {}),
    **{
        f"{name}, ppo": (name, PPO)
        for name, kind in METHODS.items()
        if "ppo_epochs" in kind.Settings.model_fields
    },
}


def stays(name: str, settings: Mapping[str, Any], rule: str, layout: Layout) -> tuple[str, ...]:
    """The tensors that must never leave a client. For pinned methods they do not rest on the declarations."""
    names = {entry.name for entry in layout.entries if entry.part in PRIVATE}
    factors = [entry for entry in layout.entries if entry.part == "lora"]
    if name == "local":
        names |= {entry.name for entry in layout.entries if entry.part != "residual"}
    if name == "fedper":
        names |= {entry.name for entry in factors if entry.block >= settings.get("shared_layers", 2)}
    if rule == "fedsa" and name != "centralized":
        names |= {entry.name for entry in factors if entry.factor == "B"}
    return tuple(entry.name for entry in layout.entries if entry.name in names)


class MarkedTrainer(QuadraticTrainer):
    """Training that leaves marked numbers as they are."""

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        result = super().train(tensors, phase)
        flat = torch.where(tensors.flat == MARK, tensors.flat, result.tensors.flat)
        return replace(result, tensors=Tensors(tensors.layout, flat))


def marked(tensors: Tensors, names: tuple[str, ...] | None = None) -> Tensors:
    """``tensors`` with the mark in all elements of ``names``; of all of them unless given."""
    where = {n: torch.full_like(tensors[n], MARK) for n in (tensors if names is None else names)}
    return tensors.replace(where)


def build(case: str, rule: str) -> tuple[Method, Aggregator]:
    name, settings = CASES[case]
    kind = METHODS[name]
    chosen, config = kind.Settings(**settings), MergeConfig(lora=rule)
    parts = kind.needs(chosen) | lora.needs(config.lora)
    aggregator = Aggregator(config, initial(parts, blocks=3).layout, 2.0)
    method = kind.build(chosen, aggregator.layout, aggregator, 3)
    return to_neighbours(method, chosen, config) if "no server" in case else method, aggregator


def messages(method: Method, layout: Layout, private: tuple[str, ...]) -> Iterator[bytes]:
    """Every message of three rounds, in both directions, and what is published."""
    start = marked(initial({entry.part for entry in layout.entries}, blocks=3), private)
    clients = crowd(1 if method.pooled else 3, layout.size)
    weights = {client: float(data.size) for client, data in clients.items()}
    server = method.init_server(start)
    states = {client: method.init_client(start, client) for client in clients}
    for number in (1, 2, 3):
        now = Round(number, 3, Key(1).at("round", number), weights)
        for exchange in method.exchanges:
            if not exchange.due(number):
                continue
            uploads = []
            for client, data in clients.items():
                download = exchange.send(server, client, now)
                yield encode(download)
                key = now.key.at("client", client)
                trainer = MarkedTrainer(client, data, now, key, method.ownership, start)
                upload, states[client] = exchange.work(trainer, secret(method.name, states[client]), download)
                upload = withhold_scalars(upload, client, exchange, now)
                yield encode(upload)
                assert not validate_upload(upload, client, exchange, method.ownership, start, now)
                uploads.append(upload)
            server = exchange.merge(server, uploads, now)
        for client in clients:
            yield encode(method.publish(server, client))


def secret(name: str, state: State) -> State:
    """A client's private state with the mark in all tensors and numbers."""
    values = {key: MARK if isinstance(value, float) else value for key, value in state.values.items()}
    groups = {key: group if SENT.get(name) == key else marked(group) for key, group in state.tensors.items()}
    return State(groups, values)


def inspect(case: str, rule: str, method: Method, layout: Layout) -> tuple[str, ...]:
    name, settings = CASES[case]
    private = method.ownership.names(Owner.PERSONAL)
    if name in PINNED:
        private = stays(name, settings, rule, layout)
    for message in messages(method, layout, private):
        assert MARK_BYTES not in message, f"{case} under {rule}: private bytes in a message"
        assert repr(MARK).encode() not in message, f"{case} under {rule}: a private number in a message"
    return private


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (case, rule)
        for case in CASES
        for rule in RULES
        if "mixing" not in case or rule not in ("fedex", "flexlora")
        if ("no server" not in case and case != "decdpo") or rule in ("fedit", "ffa", "fedsa")
    ],
)
def test_no_private_number_is_in_any_message(case, rule):
    method, aggregator = build(case, rule)
    private = inspect(case, rule, method, aggregator.layout)
    if CASES[case][0] != "centralized":
        assert set(method.ownership.names(Owner.PERSONAL)) == set(private)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, name)
        for case in CASES
        for name in stays(*CASES[case], "fedsa", build(case, "fedsa")[1].layout)
        if CASES[case][0] in PINNED - {"local", "centralized"}
    ],
)
def test_any_one_tensor_declared_wrongly_is_found(case, name, monkeypatch):
    """The method is built with an ownership that calls one private tensor shared."""
    honest = Aggregator.ownership

    def careless(aggregator, owner=lambda entry: Owner.SHARED):
        return Ownership({**honest(aggregator, owner).owners, name: Owner.SHARED})

    monkeypatch.setattr(Aggregator, "ownership", careless)
    method, aggregator = build(case, "fedsa")
    with pytest.raises(AssertionError, match="private bytes in a message"):
        inspect(case, "fedsa", method, aggregator.layout)


def test_a_method_that_is_not_pinned_is_taken_at_its_ownership(monkeypatch):
    """So the tests above hold for a new method as soon as it is in the registry."""
    monkeypatch.setattr(f"{__name__}.METHODS", {**METHODS, "new": METHODS["fedper"]})
    monkeypatch.setitem(CASES, "new", ("new", {}))
    test_no_private_number_is_in_any_message("new", "fedit")


@pytest.mark.parametrize(
    ("name", "group"), [("ditto", "own"), ("fedala", "weights"), ("scaffold", "control")]
)
def test_private_state_under_a_shared_name_is_found(name, group):
    """A visit that sends what the client keeps, not what it trained: the names are all shared ones."""
    method, aggregator = build(name, "fedit")
    (exchange,) = method.exchanges

    def leaky(trainer, private, download):
        upload, after = exchange.work(trainer, private, download)
        own = private.tensors.get(group)
        return (upload if own is None else replace(upload, tensors={"model": own})), after

    leaking = replace(method, exchanges=(replace(exchange, work=leaky),))
    with pytest.raises(AssertionError, match="private bytes"):
        inspect(name, "fedit", leaking, aggregator.layout)


def test_a_private_number_among_the_scalars_is_found():
    """The gates' mean, say, sent along with the loss."""
    method, aggregator = build("fedsdg", "fedit")
    (exchange,) = method.exchanges

    def chatty(trainer, private, download):
        upload, after = exchange.work(trainer, private, download)
        gate = float(after.tensors["personal"]["gate/0"].mean())
        return replace(upload, scalars={**upload.scalars, "gate": gate}), after

    with pytest.raises(AssertionError, match="private number"):
        inspect(
            "fedsdg", "fedit", replace(method, exchanges=(replace(exchange, work=chatty),)), aggregator.layout
        )


def test_the_mark_is_an_ordinary_number():
    """So that nothing overflows on its way, and no message holds it by chance: 1.0772…, all bits used."""
    assert math.isclose(MARK, 1.0772, rel_tol=1e-3)
    assert MARK_BYTES not in encode(Download({"a": initial()}))
