"""What leaves a client, for all methods at once: declared numbers, shared tensors, nothing else."""

from dataclasses import replace

import pytest
import torch

from prefed.core import Key, Method, Owner, Ownership, Round
from prefed.core.wire import encode
from prefed.engines.validation import validate_upload, withhold_scalars
from prefed.merge import Aggregator, MergeConfig, lora
from prefed.methods import METHODS
from prefed.methods.base import FedAvgBase
from quadratic import crowd, initial, simulate

RULES = ("fedit", "ffa", "rolora", "fedsa", "fedex", "flexlora")
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


def make(name: str, rule: str) -> tuple[Method, Aggregator]:
    kind = METHODS[name]
    config = MergeConfig(lora=rule)
    chosen = kind.Settings(**OWN.get(name, {}))
    parts = kind.needs(chosen) | lora.needs(rule)
    aggregator = Aggregator(config, initial(parts).layout, 2.0)
    return kind.build(chosen, aggregator.layout, aggregator, 3), aggregator


def inspect(method: Method, aggregator: Aggregator, stays: frozenset[str]) -> None:
    """Run three rounds and look at every message of every exchange.

    1. An upload holds shared tensors and declared numbers, and a download shared tensors.
    2. No part in ``PERSONAL`` and no factor in ``stays`` is in any message.
    3. The bytes of a personal tensor that has been trained are in no encoded message.
    4. Every upload is exactly what its exchange says it is, so that a server lets it in.
    """
    parts = {entry.part for entry in aggregator.layout.entries}
    start = initial(parts)
    clients = crowd(3, start.layout.size)
    shared, personal = set(method.ownership.names(Owner.SHARED)), method.ownership.names(Owner.PERSONAL)
    numbers = frozenset().union(*(exchange.scalars for exchange in method.exchanges))
    secrets: list[bytes] = []
    run = None
    for rounds in (1, 2, 3):
        run = simulate(method, clients, start, rounds, run=run)
        for state in run.private.values():
            for group in state.tensors.values():
                secrets += [
                    group[name].contiguous().numpy().tobytes()
                    for name in personal
                    if name in group and not torch.equal(group[name], start[name])
                ]
    for message in (*run.uploads, *run.downloads):
        # Peers are clients' posteriors, row by row.
        names = {name for group, tensors in message.tensors.items() if group != "peers" for name in tensors}
        assert names <= shared, f"{method.name}: {sorted(names - shared)} left a client"
        sent = [aggregator.layout[name] for name in names]
        private = {e.name for e in sent if e.part in PERSONAL or (e.part == "lora" and e.factor in stays)}
        assert not private, f"{method.name}: {sorted(private)} must stay"
        data = encode(message)
        assert not any(secret in data for secret in secrets), f"{method.name}: a personal tensor's bytes left"
    for upload in run.uploads:
        assert set(upload.scalars) <= numbers, f"{method.name}: undeclared numbers {set(upload.scalars)}"
    weights = {upload.client: upload.weight for upload in run.uploads}
    for upload in run.uploads:
        now = Round(upload.sent_at, 3, Key(0), weights)
        fits = []
        for exchange in method.exchanges:
            sent = withhold_scalars(upload, upload.client, exchange, now)
            fits.append(not validate_upload(sent, upload.client, exchange, method.ownership, start, now))
        assert fits.count(True) == 1
    assert bool(secrets) == bool(personal)


def stays(name: str, rule: str) -> frozenset[str]:
    return STAYS.get(name, frozenset() if name in MERGES_NOTHING else STAYS_BY_RULE.get(rule, frozenset()))


@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, rule) for name in METHODS for rule in RULES if name != "decdpo" or rule in ALONE],
)
def test_only_what_is_declared_leaves_a_client(name, rule):
    inspect(*make(name, rule), stays(name, rule))


def test_a_part_declared_personal_but_sent_is_found():
    """FedDPO whose declaration says B is personal, while its work goes on sending it."""
    method, aggregator = make("feddpo", "fedit")
    owners = {
        name: Owner.PERSONAL if aggregator.layout[name].factor == "B" else owner
        for name, owner in method.ownership.owners.items()
    }
    with pytest.raises(AssertionError, match=r"lora/0/q/B.*left a client"):
        inspect(replace(method, ownership=Ownership(owners)), aggregator, frozenset())


def test_a_part_declared_shared_that_must_stay_is_found(monkeypatch):
    """The merge rule under FedSA-LoRA says that B is shared."""
    monkeypatch.setattr("prefed.merge.lora.owner", lambda rule, entry: Owner.SHARED)
    with pytest.raises(AssertionError, match=r"lora/0/q/B.*must stay"):
        inspect(*make("feddpo", "fedsa"), stays("feddpo", "fedsa"))


def test_a_head_declared_shared_is_found(monkeypatch):
    """FedRep whose declaration shares what its clients should keep: its work then sends the head."""
    honest = FedAvgBase.of

    def generous(settings, aggregator, rounds, personal=None):
        return honest(settings, aggregator, rounds)

    monkeypatch.setattr(FedAvgBase, "of", generous)
    with pytest.raises(AssertionError, match=r"head/weight.*must stay"):
        inspect(*make("fedrep", "fedit"), frozenset())


def test_personal_values_under_a_shared_name_are_found(monkeypatch):
    """An upload that carries B's values in the place of A's, as a careless flattening would."""
    honest = FedAvgBase.upload

    def careless(fedavg, trainer, tensors, loss):
        upload = honest(fedavg, trainer, tensors, loss)
        model = upload.tensors["model"]
        hidden = torch.cat([tensors["lora/0/q/B"].reshape(-1), torch.zeros(2, dtype=torch.float64)])
        return replace(upload, tensors={"model": model.replace({"lora/0/q/A": hidden.view(2, 3)})})

    monkeypatch.setattr(FedAvgBase, "upload", careless)
    with pytest.raises(AssertionError, match="bytes left"):
        inspect(*make("feddpo", "fedsa"), frozenset())


def test_an_undeclared_number_is_found():
    method, aggregator = make("feddpo", "fedit")
    (exchange,) = method.exchanges

    def chatty(trainer, private, download):
        upload, state = exchange.work(trainer, private, download)
        return replace(upload, scalars={**upload.scalars, "longest_prompt": 17.0}), state

    with pytest.raises(AssertionError, match="undeclared numbers"):
        inspect(replace(method, exchanges=(replace(exchange, work=chatty),)), aggregator, frozenset())
