"""Clients that send what they should not: a run names them and goes on."""

import re
from dataclasses import replace

import pytest
import torch

import toy
from prefed.core import Download, Entry, Layout, State, Tensors
from prefed.engines import InProcess, Job, Local, Silent
from prefed.engines.visit import Task, attend
from prefed.merge import MergeConfig, Merger
from prefed.methods import METHODS
from prefed.store import Checkpoint, Store
from prefed.wire import decode_upload, encode

BAD = "Client 2/ü"


class Forging(InProcess):
    """Changes the uploads of one client on their way, past the client's own guard."""

    def __init__(self, job, forge, client=BAD):
        super().__init__(job)
        self.forge, self.client = forge, client

    def work(self, tasks):
        for answer in super().work(tasks):
            if answer.client == self.client and answer.message.find(b'"upload') + 1:
                answer = replace(answer, message=self.forge(answer.message))
            yield answer


class Ear(Silent):
    def __init__(self):
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)


def scaled(factor):
    """A forgery: the upload's tensors made so many times as large."""

    def forge(message):
        upload = decode_upload(message)
        return encode(replace(upload, tensors={n: t * factor for n, t in upload.tensors.items()}))

    return forge


def job(name="feddpo", merge=None, clients=5, rounds=2, untrained=(), **settings):
    """A real method on the toy's clients, all asked in every round."""
    place = toy.ToyWorkplace(toy.options(clients=clients, untrained=list(untrained)))
    merger = Merger(MergeConfig(**(merge or {})), toy.LAYOUT, 2.0)
    chosen = METHODS[name].Settings(lr=0.05, local_steps=2, batch_size=2, **settings)
    return Job(place, METHODS[name].build(chosen, toy.LAYOUT, merger, rounds), 7, rounds)


def play(path, job, crew=None):
    """Run ``job``: the server's state, the rounds' records, and what was warned of."""
    ear = Ear()
    with Store(path) as store, crew or InProcess(job) as hands:
        store.begin(encode(job.method.init_server(job.workplace.initial)), job.workplace.fingerprint)
        server = Local(job, store, hands, ear).run()
    return server, Checkpoint(path).rounds(), ear.warnings


def same(left: State, right: State) -> bool:
    return all(group.equal(right.tensors[name]) for name, group in left.tensors.items())


def test_a_finite_upload_that_merges_to_infinity_is_dropped(tmp_path):
    """1e200 is a finite float64 and its square, FedAdam's second moment, is not: each round merges what it
    would have merged without that client."""
    merge = {"optimizer": {"name": "fedadam"}}
    bad = job(merge=merge)
    server, rounds, _ = play(tmp_path / "bad", bad, Forging(bad, scaled(1e200)))
    for record in rounds:
        (drop,) = record["dropped"]
        assert drop["client"] == BAD
        assert "is NaN or infinite; its update is the largest" in drop["reason"]
    without, _, _ = play(tmp_path / "without", job(merge=merge, untrained=[BAD]))
    assert same(server, without)


def test_if_every_upload_merges_to_infinity_the_server_keeps_its_state(tmp_path):
    one = job(merge={"optimizer": {"name": "fedadam"}}, clients=1, rounds=1)
    only = "Client 0/ü"
    server, (record,), warnings = play(tmp_path / "run", one, Forging(one, scaled(1e200), only))
    assert same(server, one.method.init_server(one.workplace.initial))
    assert [drop["client"] for drop in record["dropped"]] == [only]
    assert "the server keeps its state" in warnings[-1]


def test_an_upload_of_another_dtype_is_refused(tmp_path):
    """What is finite in a wider dtype need not be in the model's: here the model has float64."""

    def narrowed(message):
        upload = decode_upload(message)
        return encode(replace(upload, tensors={n: t.to(torch.float32) for n, t in upload.tensors.items()}))

    whole = job(rounds=1)
    _, (record,), _ = play(tmp_path / "run", whole, Forging(whole, narrowed))
    (drop,) = record["dropped"]
    assert drop["client"] == BAD
    assert "holds torch.float32, not torch.float64" in drop["reason"]


@pytest.mark.parametrize(
    ("rule", "clients"), [("krum", 5), ("multi_krum", 5), ("median", 3), ("trimmed_mean", 3)]
)
def test_too_few_uploads_for_the_rule_keep_the_servers_state(tmp_path, rule, clients):
    """As many clients as the rule needs (2 f + 3, 2 f + 1, more than twice ⌈0.3 n⌉), and one sends NaN."""
    short = job(merge={"rule": rule, "liars": 1, "trim": 0.3}, clients=clients)
    server, rounds, warnings = play(tmp_path / "run", short, Forging(short, scaled(float("nan"))))
    assert same(server, short.method.init_server(short.workplace.initial))
    assert [record["loss"] for record in rounds] == [None, None]
    assert [[drop["client"] for drop in record["dropped"]] for record in rounds] == [[BAD], [BAD]]
    kept = [text for text in warnings if "the server keeps its state" in text]
    assert len(kept) == 2
    assert f"{clients - 1} uploads" in kept[0]


def test_a_number_of_400_digits_is_refused(tmp_path):
    """JSON allows it; no float holds it."""

    def long(message):
        upload = decode_upload(message)
        return encode(replace(upload, scalars={"loss": 10**400}))

    whole = job(rounds=1)
    _, (record,), _ = play(tmp_path / "run", whole, Forging(whole, long))
    assert [drop["client"] for drop in record["dropped"]] == [BAD]


def test_a_private_state_that_explodes_is_not_kept(tmp_path):
    """Plain SGD at a rate of 1e200 squares its way out of the floats: five steps of Ditto's own model give
    (1e200)^5. The visit is withheld, so that the client has the state it had, and the reason says why."""
    wild = job("ditto", clients=3, personal_lr=1e200, optimizer="sgd", clip=0, rounds=1)
    _, (record,), _ = play(tmp_path / "run", wild)
    assert len(record["dropped"]) == 3
    assert all("NaN or infinity in 'own'" in drop["reason"] for drop in record["dropped"])
    assert all("lower the rate" in drop["reason"] for drop in record["dropped"])
    assert all(Checkpoint(tmp_path / "run").client(client) is None for client in wild.members)


def test_a_private_state_must_be_finite_as_it_is_kept():
    """70,000 is no float16, whose largest number is 65,504."""
    one = job("ditto", clients=1, rounds=1)
    start = Tensors(toy.LAYOUT, torch.full((toy.LAYOUT.size,), 7e4, dtype=torch.float64))
    message = encode(Download({"model": start}))
    for dtype, reason in ((torch.float16, "infinity in 'own'"), (torch.bfloat16, "")):
        answer = attend(replace(one, keep=dtype), Task("visit", "Client 0/ü", 1, "train", message, None))
        assert reason in answer.withheld
        assert bool(answer.withheld) == bool(reason)


def test_a_client_left_out_of_the_merge_keeps_the_private_state_it_had(tmp_path):
    """SCAFFOLD's server has c = Σ p_i c_i over all clients; it would not, if the one whose upload merges to
    infinity had moved its c_i all the same. Its upload is made 1e200 times as large on its way."""
    bad = job("scaffold", rounds=1, merge={"optimizer": {"name": "fedadam"}})
    server, (record,), _ = play(tmp_path / "run", bad, Forging(bad, scaled(1e200)))
    assert [drop["client"] for drop in record["dropped"]] == [BAD]
    left, total = Checkpoint(tmp_path / "run"), sum(bad.weights.values())
    assert left.client(BAD) is None
    kept = {client: left.client(client) for client in bad.members if client != BAD}
    mean = sum(kept[client].tensors["control"].flat * (bad.weights[client] / total) for client in kept)
    assert torch.allclose(server.tensors["control"].flat, mean, rtol=0, atol=1e-12)


RENAMED = Layout((Entry("lora/0/A", (2, 3), "Mr X", 0, "A"),))
SECRET = "Mr X of ward 7 takes 5 mg"
WIDE = Tensors(Layout((Entry("lora/0/A", (5,), "lora", 0, "A"),)), torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("leak", "reason"),
    [
        (lambda u: {"scalars": {"loss": [0.1, SECRET]}}, "under 'loss' a list, not a number"),
        (lambda u: {"scalars": {"loss": True}}, "under 'loss' a bool"),
        (lambda u: {"scalars": {SECRET: 1.0}}, f"does not declare: a text of {len(SECRET)} characters"),
        (lambda u: {"client": SECRET}, "calls itself somebody else"),
        (lambda u: {"tensors": {SECRET: u.tensors["model"]}}, "groups that the exchange does not declare"),
        (lambda u: {"weight": 3.14159}, "weighs 3.14159"),
        (lambda u: {"weight": SECRET}, "weighs a str"),
        (lambda u: {"sent_at": SECRET}, "started from round a str"),
        (lambda u: {"sent_at": 2}, "started from round 2"),
        (lambda u: {"tensors": {"model": WIDE}}, r"lora/0/A in group 'model' has shape \(5,\)"),
        (lambda u: {"tensors": {"model": u.tensors["model"].to(torch.float32)}}, "holds torch.float32"),
        (
            lambda u: {"tensors": {"model": Tensors(RENAMED, u.tensors["model"].select(RENAMED.names).flat)}},
            "laid out otherwise than the model",
        ),
    ],
)
def test_what_is_not_declared_never_becomes_bytes(leak, reason):
    """A method that puts a client's text, or numbers of its own choice, in any place an upload has: the
    client's side withholds it, and the reason, which goes to the round log, does not quote the text."""
    one = job(clients=3, rounds=1)
    (exchange,) = one.method.exchanges

    def work(visit, private, download):
        upload, after = exchange.work(visit, private, download)
        return replace(upload, **leak(upload)), after

    leaky = replace(one, method=replace(one.method, exchanges=(replace(exchange, work=work),)))
    message = encode(exchange.send(one.method.init_server(one.workplace.initial), BAD))
    answer = attend(leaky, Task("visit", BAD, 1, "train", message, None))
    assert answer.message == b""
    assert re.search(reason, answer.withheld)
    assert SECRET not in answer.withheld
