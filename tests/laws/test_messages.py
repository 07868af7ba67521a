"""What leaves a client, for all methods at once: declared numbers, shared tensors, nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from prefed.core import Method, Owner, Ownership
from prefed.merge import MergeConfig
from prefed.methods import METHODS
from prefed.methods.base import FedAvgBase
from prefed.testing import RULES, Problem, check_messages

PERSONAL = frozenset({"bottleneck", "gate", "head", "norm", "personal_lora", "reward", "value"})
"""Parts that must never travel in any method. This list does not rest on the methods' own declarations."""
STAYS = {"local": frozenset({"A", "B"})}
"""Method → LoRA factors that must never travel."""
STAYS_BY_RULE = {"fedsa": frozenset({"B"}), "ffa": frozenset({"A"})}
OWN = {"fedbiscuit": {"selectors": 2, "warmup_rounds": 1, "regroup_every": 1}}
"""Settings with which three rounds have all that a method does."""
ALONE = ("fedit", "ffa", "fedsa")
"""LoRA rules that need no server."""
MERGES_NOTHING = ("local", "centralized")
REFUSED = {("scaffold", "flexlora"), ("scaffold", "flora"), ("ditto", "flora")}
"""Methods that keep something of a LoRA's factors between rounds, and rules that replace them."""


def problem(name: str, rule: str, change: Callable[[Method], Method] = lambda method: method) -> Problem:
    return Problem(METHODS[name], OWN.get(name, {}), MergeConfig(lora=rule), change=change)


def inspect(one: Problem, stays: frozenset[str] = frozenset()) -> None:
    """No part in ``PERSONAL`` and no factor in ``stays`` is in any message, whatever the method declares."""
    check_messages(one, lambda e: e.part in PERSONAL or (e.part == "lora" and e.factor in stays))


def stays(name: str, rule: str) -> frozenset[str]:
    return STAYS.get(name, frozenset() if name in MERGES_NOTHING else STAYS_BY_RULE.get(rule, frozenset()))


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (name, rule)
        for name in METHODS
        for rule in RULES
        if (name != "decdpo" or rule in ALONE) and (name, rule) not in REFUSED
    ],
)
def test_only_what_is_declared_leaves_a_client(name, rule):
    inspect(problem(name, rule), stays(name, rule))


def test_a_part_declared_personal_but_sent_is_found():
    """FedDPO whose declaration says B is personal, while its work continues sending it."""

    def declared(method: Method) -> Method:
        owners = {
            name: Owner.PERSONAL if name.endswith("/B") else owner
            for name, owner in method.ownership.owners.items()
        }
        return replace(method, ownership=Ownership(owners))

    with pytest.raises(AssertionError, match=r"lora/0/q/B.*left a client"):
        inspect(problem("feddpo", "fedit", declared))


def test_a_part_declared_shared_that_must_stay_is_found(monkeypatch):
    """The merge rule under FedSA-LoRA says that B is shared."""
    monkeypatch.setattr("prefed.merge.lora.owner", lambda rule, entry: Owner.SHARED)
    with pytest.raises(AssertionError, match=r"lora/0/q/B.*must stay"):
        inspect(problem("feddpo", "fedsa"), stays("feddpo", "fedsa"))


def test_a_head_declared_shared_is_found(monkeypatch):
    """FedRep whose declaration shares what its clients should keep: its work then sends the head."""
    honest = FedAvgBase.of

    def generous(settings, aggregator, rounds, personal=None):
        return honest(settings, aggregator, rounds)

    monkeypatch.setattr(FedAvgBase, "of", generous)
    with pytest.raises(AssertionError, match=r"head/weight.*must stay"):
        inspect(problem("fedrep", "fedit"))


def test_personal_values_under_a_shared_name_are_found(monkeypatch):
    """An upload that carries B's values in place of A's, as a careless flattening would."""
    honest = FedAvgBase.upload

    def careless(fedavg, trainer, tensors, loss):
        upload = honest(fedavg, trainer, tensors, loss)
        model = upload.tensors["model"]
        hidden = torch.cat([tensors["lora/0/q/B"].reshape(-1), torch.zeros(2, dtype=torch.float64)])
        return replace(upload, tensors={"model": model.replace({"lora/0/q/A": hidden.view(2, 3)})})

    monkeypatch.setattr(FedAvgBase, "upload", careless)
    with pytest.raises(AssertionError, match="bytes left"):
        inspect(problem("feddpo", "fedsa"))


def test_an_undeclared_number_is_found():
    def chatty(method: Method) -> Method:
        (exchange,) = method.exchanges

        def work(trainer, private, download):
            upload, state = exchange.work(trainer, private, download)
            return replace(upload, scalars={**upload.scalars, "longest_prompt": 17.0}), state

        return replace(method, exchanges=(replace(exchange, work=work),))

    with pytest.raises(AssertionError, match="undeclared numbers"):
        inspect(problem("feddpo", "fedit", chatty))
