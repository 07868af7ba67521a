"""Clients with LoRA ranks of their own, against models of these ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.small_models import Pairs, backbone

from prefed.core import Entry, Key, Layout, Method, Round, State, Tensors, Upload
from prefed.engines.aggregation import aggregate
from prefed.engines.validation import validate_upload
from prefed.merge import Aggregator, MergeConfig, from_newest
from prefed.methods import METHODS
from prefed.methods.base import with_ranks
from prefed.models import Backbone
from prefed.testing import Problem
from prefed.train import ClientPairTrainer, PairTrainer

PAIRS, SIZES = Pairs(4), {"low": 3.0, "high": 1.0}
ROWS = {"low": np.arange(3), "high": np.arange(3, 4)}
SETTINGS = {"lr": 0.01, "batch_size": 6, "local_steps": 1}


def build(model: Backbone, name: str = "feddpo", rule: str = "fedit", **settings: object) -> Method:
    aggregator = Aggregator(MergeConfig(lora=rule, ranks={"low": 1}), model.layout, 2.0)
    return METHODS[name].build(METHODS[name].Settings(**SETTINGS, **settings), model.layout, aggregator, 2)


def visit(
    trainer: PairTrainer, method: Method, client: str, private: State, server: State, number: int
) -> tuple[Upload, State]:
    now = Round(number, 2, Key(0), SIZES)
    rows = ROWS[client]
    at = ClientPairTrainer(rows, Key(number), method.ownership, trainer, client, rows[:0], now)
    (exchange,) = method.exchanges
    upload, after = exchange.work(at, private, exchange.send(server, client, now))
    assert validate_upload(upload, client, exchange, method.ownership, trainer.backbone.initial, now) == ""
    return upload, after


@pytest.mark.parametrize("name", ["feddpo", "ditto"])
def test_a_client_of_rank_1_trains_as_a_model_of_rank_1(name):
    """The same visits on a backbone of rank 1 (s = 2 in both), whose A is the first row: AdamW's steps are
    the same. The server's mean has zeros for the rest: B = (3 [b, 0, 0] + B_high) / 4."""
    full, narrow = backbone(rank=3), backbone(rank=1)
    method, lone = build(full, name), build(narrow, name)
    low = with_ranks(method, {"low": 1}, full.layout)
    trainer, twin = PairTrainer(full, PAIRS), PairTrainer(narrow, PAIRS)
    server = low.init_server(full.initial)
    private = {client: low.init_client(full.initial, client) for client in ROWS}
    own = lone.init_client(narrow.initial, "low")
    for number in (1, 2):
        first = {
            entry.name: server.tensors["model"][entry.name][tuple(map(slice, entry.shape))]
            for entry in narrow.layout.entries
        }
        received = State({"model": Tensors.gather(narrow.layout, first)})
        sent, own = visit(twin, lone, "low", own, received, number)
        uploads = {}
        for client in ROWS:
            uploads[client], private[client] = visit(trainer, low, client, private[client], server, number)
        for entry in narrow.layout.entries:
            ours = uploads["low"].tensors["model"][entry.name]
            assert ours.shape == entry.shape
            torch.testing.assert_close(ours, sent.tensors["model"][entry.name], rtol=1e-4, atol=1e-6)
        now = Round(number, 2, Key(0), SIZES)
        merged = aggregate(server, [*uploads.values()], low.exchanges[0], now)
        assert not merged.dropped
        server = merged.server
        for entry in full.layout.entries:
            padded = torch.zeros(entry.shape)
            part = sent.tensors["model"][entry.name]
            padded[tuple(map(slice, part.shape))] = part
            expected = (3 * padded + uploads["high"].tensors["model"][entry.name]) / 4
            torch.testing.assert_close(server.tensors["model"][entry.name], expected, rtol=1e-4, atol=1e-6)
    now = Round(2, 2, Key(0), SIZES)
    at = ClientPairTrainer(ROWS["low"], Key(2), low.ownership, trainer, "low", ROWS["low"][:0], now)
    model = low.predict(at, private["low"], low.publish(server, "low"))
    for name, value in model.items():
        rest = value[1:] if full.layout[name].factor == "A" else value[:, 1:]
        assert not rest.any()
    high = low.predict(replace(at, client="high"), private["high"], low.publish(server, "high"))
    assert any(high[name][:, 1:].any() for name in high if name.endswith("/B"))


def test_full_ranks_change_nothing_and_personal_factors_are_low_too():
    """Bit for bit with ranks of 2, which the model has. With rank 1 only the first row of FedPer's personal A
    and column of its B is not 0, and messages have half the LoRA."""
    problem = Problem(METHODS["fedper"], {"shared_layers": 1, "personal_head": False})
    layout = problem.initial.layout
    same = replace(problem, change=lambda method: with_ranks(method, {"client-0": 2}, layout))
    plain, run = problem.run(), same.run()
    assert run.server.tensors["model"].equal(plain.server.tensors["model"])
    for client, state in run.private.items():
        assert state.tensors["personal"].equal(plain.private[client].tensors["personal"])
    low = replace(problem, change=lambda method: with_ranks(method, {"client-0": 1}, layout))
    own = low.build().init_client(problem.initial, "client-0").tensors["personal"]
    assert own["lora/1/q/A"][0].any()
    assert not own["lora/1/q/A"][1].any()
    sizes = {upload.client: upload.tensors["model"].flat.numel() for upload in low.run().uploads}
    assert sizes == {"client-0": 5, "client-1": 10, "client-2": 10}


@pytest.mark.parametrize("rule", ["fedit", "flexlora"])
def test_rows_that_no_upload_has_survive(rule):
    """The only upload of a round is of rank 1. It moves the first column of B; with flexlora, whose factors
    are sorted, the part of rank 1 is the upload's product, as the other rows of the server still have B = 0.
    Rows 2 and 3 of A keep their values bit for bit: as zeros they would have no gradient in later rounds."""
    full = backbone(rank=3)
    method = with_ranks(build(full, rule=rule), {"low": 1}, full.layout)
    trainer, server = PairTrainer(full, PAIRS), method.init_server(full.initial)
    upload, _ = visit(trainer, method, "low", method.init_client(full.initial, "low"), server, 1)
    after = aggregate(server, [upload], method.exchanges[0], Round(1, 2, Key(0), SIZES)).server
    before, model = server.tensors["model"], after.tensors["model"]
    for name, sent in upload.tensors["model"].items():
        if name.endswith("/B"):
            a = name[:-1] + "A"
            product = sent @ upload.tensors["model"][a]
            torch.testing.assert_close(model[name] @ model[a], product, rtol=1e-4, atol=1e-6)
            if rule == "fedit":
                assert torch.equal(model[a][1:], before[a][1:])
    if rule == "fedit":
        high, _ = visit(trainer, method, "high", method.init_client(full.initial, "high"), after, 2)
        assert all(value[:, 1:].any() for n, value in high.tensors["model"].items() if n.endswith("/B"))


def test_rows_up_to_the_highest_rank_of_a_round_are_merged():
    """Ranks 1 and 2 of 3, padded: rows 1 and 2 have means (1 + 5) / 2 and (0 + 7) / 2, row 3 is kept."""

    def column(*rows: float) -> Tensors:
        layout = Layout((Entry("lora/0/q/A", (len(rows), 1), "lora", 0, "A"),))
        return Tensors(layout, torch.tensor(rows))

    whole = column(9.0, 9.0, 9.0)
    aggregator = Aggregator(MergeConfig(ranks={"a": 1, "b": 2}, weights="uniform"), whole.layout, 2.0)
    sent = {"a": column(1.0, 0.0, 0.0), "b": column(5.0, 7.0, 0.0)}
    uploads = [Upload(client, 1.0, {"model": group}, {}, 1) for client, group in sent.items()]
    after, _ = aggregator.merge(aggregator.init(whole), uploads, Round(1, 2, Key(0), {"a": 1.0, "b": 1.0}))
    assert after.tensors["model"].flat.tolist() == [3.0, 3.5, 9.0]


def test_a_late_upload_of_low_rank_moves_the_newest_model():
    """θ + (θ_i − θ^start) of the first row: 10 + (5 − 2) = 13, and 20 + (5 − 3) = 22."""
    whole = Layout((Entry("lora/0/q/A", (2, 2), "lora", 0, "A"),))
    row = Layout((Entry("lora/0/q/A", (1, 2), "lora", 0, "A"),))
    start, newest = (
        State({"model": Tensors(whole, torch.tensor(x))})
        for x in ([2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0])
    )
    late = Upload("low", 1, {"model": Tensors(row, torch.tensor([5.0, 5.0]))})
    assert from_newest(late, start, newest).tensors["model"].flat.tolist() == [13.0, 22.0]


def test_a_wild_upload_of_low_rank_is_found():
    """Among uploads of other shapes, the one that makes the mean infinite is dropped."""
    full = backbone(rank=3)
    method = with_ranks(build(full), {"low": 1}, full.layout)
    server, now = method.init_server(full.initial), Round(1, 2, Key(0), SIZES | {"other": 1.0})
    (exchange,) = method.exchanges
    sent = {client: exchange.send(server, client, now).tensors for client in now.weights}
    sent["low"] = {"model": sent["low"]["model"] * 1e30 * 1e30}
    uploads = [Upload(client, now.weights[client], sent[client], {"loss": 1.0}, 1) for client in sent]
    merged = aggregate(server, uploads, exchange, now)
    assert [client for client, _ in merged.dropped] == ["low"]
