"""What is private leaves no trace in any message: every private number is made one recognisable bit pattern.

Every upload of every method also passes validation, which lets only declared names, shapes and numbers out.

The mark stands for any value of a private tensor. The tests put it into every tensor that must stay, at the
start, and into all of a client's private state before each visit. Training leaves marked numbers as they are.
Then no encoded message of any exchange may hold the eight bytes of the mark, or its decimal digits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.laws.test_messages import REFUSED

from prefed.core import Download, Layout, Method, Owner, Ownership
from prefed.core.wire import encode
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS, to_neighbours
from prefed.testing import RULES, Problem, check_private_bytes, initial
from prefed.testing.laws import MARK, MARK_BYTES

PINNED = {
    *("feddpo", "fedsft", "fedprox", "scaffold", "centralized", "local"),
    *("fedpdpo", "fedper", "fedrep", "perfedavg", "fedamp", "fedsdg", "ditto", "pfedme", "fedala", "fedbn"),
    *("feddpa", "fedbis", "fedbiscuit", "decdpo", "lore", "pal"),
}
"""Methods whose private tensors are pinned here. Any other method is taken at its own ownership."""
PRIVATE = {"bottleneck", "head", "reward", "value", "personal_lora", "gate", "norm", "mixture"}
"""Parts that no method may send (unless it is asked to share a trained head)."""
SENT = {"fedala": ("own",), "fedamp": ("own",)}
"""Method → the groups of a client's private state that hold what it has sent before."""
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


def build(case: str, rule: str, change: Callable[[Method], Method] = lambda method: method) -> Problem:
    name, settings = CASES[case]
    config = MergeConfig(lora=rule)

    def alone(method: Method) -> Method:
        return to_neighbours(method, METHODS[name].Settings(**settings), config)

    return Problem(METHODS[name], settings, config, blocks=3, change=alone if "no server" in case else change)


def inspect(case: str, problem: Problem) -> tuple[str, ...]:
    name, settings = CASES[case]
    private = problem.build().ownership.names(Owner.PERSONAL)
    if name in PINNED:
        private = stays(name, settings, problem.merge.lora, problem.initial.layout)
    check_private_bytes(problem, private, SENT.get(name, ()))
    return private


@pytest.mark.sample
@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (case, rule)
        for case in CASES
        for rule in RULES
        if "mixing" not in case or rule not in ("fedex", "flexlora", "flora")
        if ("no server" not in case and case != "decdpo") or rule in ("fedit", "ffa", "fedsa")
        if (CASES[case][0], rule) not in REFUSED
    ],
)
def test_no_private_number_is_in_any_message(case, rule):
    problem = build(case, rule)
    private = inspect(case, problem)
    if CASES[case][0] != "centralized":
        assert set(problem.build().ownership.names(Owner.PERSONAL)) == set(private)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, name)
        for case in CASES
        for name in stays(*CASES[case], "fedsa", build(case, "fedsa").initial.layout)
        if CASES[case][0] in PINNED - {"local", "centralized"}
    ],
)
def test_any_one_tensor_declared_wrongly_is_found(case, name, monkeypatch):
    """The method is built with an ownership that calls one private tensor shared."""
    honest = Aggregator.ownership

    def careless(aggregator, owner=lambda entry: Owner.SHARED):
        return Ownership({**honest(aggregator, owner).owners, name: Owner.SHARED})

    monkeypatch.setattr(Aggregator, "ownership", careless)
    with pytest.raises(AssertionError, match="private bytes in a message"):
        inspect(case, build(case, "fedsa"))


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

    def leaky(method: Method) -> Method:
        (exchange,) = method.exchanges

        def work(trainer, private, download):
            upload, after = exchange.work(trainer, private, download)
            own = private.tensors.get(group)
            return (upload if own is None else replace(upload, tensors={"model": own})), after

        return replace(method, exchanges=(replace(exchange, work=work),))

    with pytest.raises(AssertionError, match="private bytes"):
        inspect(name, build(name, "fedit", leaky))


def test_a_private_number_among_the_scalars_is_found():
    """The gates' mean, say, sent along with the loss."""

    def chatty(method: Method) -> Method:
        (exchange,) = method.exchanges

        def work(trainer, private, download):
            upload, after = exchange.work(trainer, private, download)
            gate = float(after.tensors["personal"]["gate/0"].mean())
            return replace(upload, scalars={**upload.scalars, "gate": gate}), after

        return replace(method, exchanges=(replace(exchange, work=work),))

    with pytest.raises(AssertionError, match="private number"):
        inspect("fedsdg", build("fedsdg", "fedit", chatty))


def test_the_mark_is_an_ordinary_number():
    """So that nothing overflows on its way, and no message holds it by chance: 1.0772…, all bits used."""
    assert math.isclose(MARK, 1.0772, rel_tol=1e-3)
    assert MARK_BYTES not in encode(Download({"a": initial()}))
