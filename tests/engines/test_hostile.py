"""Clients that send what they should not: a run names them and continues."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

import toy
from prefed.core import Download, Layout, State, Tensors
from prefed.core.wire import decode_upload, encode
from prefed.engines import InProcess, Job, RoundError
from prefed.engines.tasks import Task, run_task
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.store import RunReader
from toy import Warned

BAD = "Client 2/ü"


class Forging(InProcess):
    """Changes the uploads of one client, or several, after the client's own side has validated them."""

    def __init__(self, job, states, forge, client=BAD):
        super().__init__(job, states)
        self.forge, self.clients = forge, {client} if isinstance(client, str) else client

    def run(self, tasks):
        for result in super().run(tasks):
            if result.client in self.clients and result.message.find(b'"upload') + 1:
                result = replace(result, message=self.forge(result.message))
            yield result


def forging(forge, client=BAD, kind=Forging):
    """What makes the backend of a run in which ``client`` forges its uploads."""
    return lambda job, states: kind(job, states, forge, client)


def scaled(factor):
    """A forgery: the upload's tensors made so many times as large."""

    def forge(message):
        upload = decode_upload(message)
        return encode(replace(upload, tensors={n: t * factor for n, t in upload.tensors.items()}))

    return forge


def job(name="feddpo", merge=None, clients=5, rounds=2, untrained=(), **settings):
    """A real method on the toy's clients, all asked in every round."""
    trainers = toy.ToyTrainers(toy.options(clients=clients, untrained=list(untrained), method=name))
    aggregator = Aggregator(MergeConfig(**(merge or {})), toy.LAYOUT, 2.0)
    chosen = METHODS[name].Settings(lr=0.05, local_steps=2, batch_size=2, **settings)
    method = METHODS[name].build(chosen, toy.LAYOUT, aggregator, rounds)
    return Job(trainers, method, 7, rounds, feedback=chosen.feedback)


def play(path, job, backend=InProcess):
    """Run ``job``: the server's state, the rounds' records, and the warnings."""
    listener = Warned()
    server = toy.run_job(path, job, backend, listener)
    return server, RunReader(path).rounds(), listener.texts


def same(left: State, right: State) -> bool:
    return all(group.equal(right.tensors[name]) for name, group in left.tensors.items())


def test_a_finite_upload_that_merges_to_infinity_is_dropped(tmp_path):
    """1e200 is a finite float64 and its square, FedAdam's second moment, is not: each round merges what it
    would have merged without that client. (With ``max_ratio`` it would not come so far.)"""
    merge = {"optimizer": {"name": "fedadam"}, "max_ratio": 0}
    bad = job(merge=merge)
    server, rounds, _ = play(tmp_path / "bad", bad, forging(scaled(1e200)))
    for record in rounds:
        (drop,) = record["dropped"]
        assert drop["client"] == BAD
        assert "the server's 'second' is NaN or infinite after merging it" in drop["reason"]
    without, _, _ = play(tmp_path / "without", job(merge=merge, untrained=[BAD]))
    assert same(server, without)


def test_if_every_upload_merges_to_infinity_the_server_keeps_its_state(tmp_path):
    one = job(merge={"optimizer": {"name": "fedadam"}}, clients=1, rounds=1)
    only = "Client 0/ü"
    server, (record,), warnings = play(tmp_path / "run", one, forging(scaled(1e200), only))
    assert same(server, one.method.init_server(one.trainers.initial))
    assert [drop["client"] for drop in record["dropped"]] == [only]
    assert "the server keeps its state" in warnings[-1]


def test_an_upload_of_another_dtype_is_refused(tmp_path):
    """What is finite in a wider dtype need not be in the model's: here the model has float64."""

    def narrowed(message):
        upload = decode_upload(message)
        return encode(replace(upload, tensors={n: t.to(torch.float32) for n, t in upload.tensors.items()}))

    whole = job(rounds=1)
    _, (record,), _ = play(tmp_path / "run", whole, forging(narrowed))
    (drop,) = record["dropped"]
    assert drop["client"] == BAD
    assert "has dtype torch.float32, not torch.float64" in drop["reason"]


@pytest.mark.parametrize(
    ("rule", "clients"), [("krum", 5), ("multi_krum", 5), ("median", 3), ("trimmed_mean", 3)]
)
def test_too_few_uploads_for_the_rule_keep_the_servers_state(tmp_path, rule, clients):
    """As many clients as the rule needs (2 f + 3, 2 f + 1, more than twice ⌈0.3 n⌉), and one sends NaN."""
    short = job(merge={"rule": rule, "liars": 1, "trim": 0.3}, clients=clients)
    server, rounds, warnings = play(tmp_path / "run", short, forging(scaled(float("nan"))))
    assert same(server, short.method.init_server(short.trainers.initial))
    assert [record["loss"] for record in rounds] == [None, None]
    assert [[drop["client"] for drop in record["dropped"]] for record in rounds] == [[BAD], [BAD]]
    warned = [text for text in warnings if "the server keeps its state" in text]
    assert len(warned) == 2
    sent = clients - 1
    reason = f"1 of {sent} uploads at each end" if rule == "trimmed_mean" else f"liars = 1, got {sent};"
    assert reason in warned[0]


def test_a_number_of_400_digits_is_refused(tmp_path):
    """JSON allows it; no float holds it."""

    def long(message):
        upload = decode_upload(message)
        return encode(replace(upload, scalars={"loss": 10**400}))

    whole = job(rounds=1)
    _, (record,), _ = play(tmp_path / "run", whole, forging(long))
    assert [drop["client"] for drop in record["dropped"]] == [BAD]


def test_a_private_state_that_explodes_is_not_kept(tmp_path):
    """Plain SGD at a rate of 1e200 squares its way out of the floats: five steps of Ditto's own model give
    (1e200)^5. The visit is withheld, so that the client has the state it had, and the reason says why."""
    wild = job("ditto", clients=3, personal_lr=1e200, optimizer="sgd", clip=0, rounds=1)
    _, (record,), _ = play(tmp_path / "run", wild)
    assert len(record["dropped"]) == 3
    assert all(
        "its new private state is NaN or infinite in 'own' and was discarded" in drop["reason"]
        for drop in record["dropped"]
    )
    assert all(
        "lower the learning rate of its personal tensors" in drop["reason"] for drop in record["dropped"]
    )
    assert all(RunReader(tmp_path / "run").client(client) is None for client in wild.members)


def test_a_private_state_must_be_finite_as_it_is_kept():
    """70,000 overflows float16, which ends at 65,504."""
    one = job("ditto", clients=1, rounds=1)
    start = Tensors(toy.LAYOUT, torch.full((toy.LAYOUT.size,), 7e4, dtype=torch.float64))
    message = encode(Download({"model": start}))
    task = Task("visit", "Client 0/ü", 1, "train", message)
    for dtype, reason in (
        (torch.float16, "NaN or infinite in 'own' and was discarded"),
        (torch.bfloat16, ""),
    ):
        result = run_task(replace(one, state_dtype=dtype), task, toy.MemoryStates())
        assert reason in result.withheld
        assert bool(result.withheld) == bool(reason)


def test_a_client_left_out_of_the_merge_keeps_the_private_state_it_had(tmp_path):
    """SCAFFOLD's server has c = Σ p_i c_i over all clients; it would not, if the one whose upload merges to
    infinity had moved its c_i all the same. Its upload is made 1e200 times as large on its way."""
    bad = job("scaffold", rounds=1, merge={"optimizer": {"name": "fedadam"}})
    server, (record,), _ = play(tmp_path / "run", bad, forging(scaled(1e200)))
    assert [drop["client"] for drop in record["dropped"]] == [BAD]
    reader, total = RunReader(tmp_path / "run"), sum(bad.weights.values())
    assert reader.client(BAD) is None
    states = {client: reader.client(client) for client in bad.members if client != BAD}
    mean = sum(states[client].tensors["control"].flat * (bad.weights[client] / total) for client in states)
    assert torch.allclose(server.tensors["control"].flat, mean, rtol=0, atol=1e-12)


SECRET, UNSPACED = "Mr X of ward 7 takes 5 mg", "安娜每天服药五毫克"
FIRST, *REST = toy.LAYOUT.entries
RENAMED = Layout((replace(FIRST, part="Mr X"), *REST))
WIDE = Tensors(Layout((replace(FIRST, shape=(5,)), *REST)), torch.zeros(toy.LAYOUT.size - 1).double())


LEAKS = (
    (lambda u: {"scalars": {"loss": [0.1, SECRET]}}, "'loss' is a list, not a number"),
    (lambda u: {"scalars": {"loss": True}}, "'loss' is a bool, not a number"),
    (
        lambda u: {"scalars": {"loss": 1.0, SECRET: 1.0}},
        f"does not expect: a text of {len(SECRET)} characters",
    ),
    (lambda u: {"scalars": {"loss": 1.0, UNSPACED: 1.0}}, "does not expect: a text of 9 characters"),
    (lambda u: {"client": SECRET}, "is from a client other than"),
    (lambda u: {"tensors": {SECRET: u.tensors["model"]}}, "lacks groups that the exchange expects: model"),
    (lambda u: {"tensors": {"model": u.tensors["model"], SECRET: u.tensors["model"]}}, "does not expect: a"),
    (lambda u: {"tensors": {"model": Tensors.empty()}}, "lacks tensors that group 'model' expects: head"),
    (lambda u: {"scalars": {}}, "lacks numbers that the exchange expects: loss"),
    (lambda u: {"weight": 3.14159}, "has weight 3.14159"),
    (lambda u: {"weight": SECRET}, "has weight a str"),
    (lambda u: {"sent_at": SECRET}, "is of round a str, not round 1"),
    (lambda u: {"sent_at": 2}, "is of round 2, not round 1"),
    (lambda u: {"tensors": {"model": WIDE}}, r"lora/0/A in group 'model' has shape \(5,\)"),
    (lambda u: {"tensors": {"model": u.tensors["model"].to(torch.float32)}}, "has dtype torch.float32"),
    (lambda u: {"tensors": {"model": Tensors(RENAMED, u.tensors["model"].flat)}}, "has a different layout"),
)


def test_what_is_not_declared_never_becomes_bytes(subtests):
    """A method that puts a client's text, or numbers of its own choice, in any place an upload has: the
    client's side withholds it, and the reason, which goes to the round log, does not quote the text."""
    one = job(clients=3, rounds=1)
    (exchange,) = one.method.exchanges
    message = encode(exchange.send(one.method.init_server(one.trainers.initial), BAD, one.round(1)))

    def work(visit, private, download, leak):
        upload, after = exchange.work(visit, private, download)
        return replace(upload, **leak(upload)), after

    for leak, reason in LEAKS:
        with subtests.test(reason):
            leaky = (replace(exchange, work=partial(work, leak=leak)),)
            leaky = replace(one, method=replace(one.method, exchanges=leaky))
            result = run_task(leaky, Task("visit", BAD, 1, "train", message), toy.MemoryStates())
            assert result.message == b""
            assert re.search(reason, result.withheld)
            assert not any(secret in result.withheld for secret in (SECRET, UNSPACED))


# One upload among others

RULES = ("mean", "median", "trimmed_mean", "krum", "multi_krum", "norm_clip")
FIRST_OF_ALL = "Client 0/ü"


def altered(change):
    """A forgery: the upload with some of its fields changed."""
    return lambda message: encode(replace(upload := decode_upload(message), **change(upload)))


def header(edit):
    """A forgery: the JSON header of the message changed."""

    def forge(message):
        length = int.from_bytes(message[:8], "little")
        outer = json.loads(message[8 : 8 + length])
        inner = json.loads(outer["__metadata__"]["prefed"])
        edit(inner)
        outer["__metadata__"]["prefed"] = json.dumps(inner)
        forged = json.dumps(outer).encode()
        return len(forged).to_bytes(8, "little") + forged + message[8 + length :]

    return forge


def typed(dtype):
    def edit(inner):
        inner["groups"]["model"][0] = dtype

    return header(edit)


def dropped_alone(path, forge, name="feddpo", client=BAD, merge=None, clients=6, **settings):
    """Run with one forging client and without it, and find them equal: the reasons that it was dropped for.

    Not under SCAFFOLD, whose p_i are shares of all clients' pairs.
    """
    bad = job(name, merge, clients, **settings)
    server, rounds, warnings = play(path / "bad", bad, forging(forge, client))
    without, _, _ = play(path / "without", job(name, merge, clients, untrained=[client], **settings))
    assert [[drop["client"] for drop in record["dropped"]] for record in rounds] == [[client]] * len(rounds)
    assert same(server, without) or name == "scaffold"
    reasons = [record["dropped"][0]["reason"] for record in rounds]
    for text in (*reasons, *warnings):
        assert text.isprintable()
        assert len(text) < 400
    return reasons


@pytest.mark.parametrize(("rule", "names"), [*((rule, ()) for rule in RULES), ("mean", ("lora/0/A",))])
def test_a_client_that_sends_less_evicts_itself_alone(tmp_path, rule, names):
    """It is the first by name: were the others compared with it, they would be dropped."""
    less = altered(lambda u: {"tensors": {"model": u.tensors["model"].select(names)}})
    for reason in dropped_alone(tmp_path, less, client=FIRST_OF_ALL, merge={"rule": rule, "liars": 1}):
        assert "lacks tensors that group 'model' expects: head" in reason


@pytest.mark.parametrize(
    ("name", "settings", "change", "reason_pattern"),
    [
        ("feddpo", {"schedule": "plateau"}, lambda u: {"scalars": {}}, "lacks numbers.*: loss"),
        ("local", {"schedule": "plateau"}, lambda u: {"scalars": {}}, "lacks numbers.*: loss"),
        ("feddpo", {}, lambda u: {"scalars": {"loss": 2.9e307}}, "2.9e.307, outside the range of float32"),
        ("scaffold", {}, lambda u: {"tensors": {"model": u.tensors["model"]}}, "lacks groups.*: control"),
        ("scaffold", {}, lambda u: {"tensors": {"control": u.tensors["control"]}}, "lacks groups.*: model"),
        ("fedamp", {}, lambda u: {"tensors": {}}, "lacks groups.*: model"),
    ],
)
def test_what_is_missing_or_beyond_measure_ends_no_run(tmp_path, name, settings, change, reason_pattern):
    for reason in dropped_alone(tmp_path, altered(change), name, **settings):
        assert re.search(reason_pattern, reason)


@pytest.mark.parametrize(
    ("forge", "reason_pattern"),
    [
        (typed("\ud800"), r"unexpected dtype \\ud800"),
        (typed("\x1b[31m\u202e"), r"unexpected dtype \\x1b\[31m\\u202e"),
        (typed("x" * 500), "x{200}.*…$"),
        (header(lambda inner: inner.update(kind="\x1b" * 70)), r"the message is of kind '(\\x1b)+.*…$"),
        (header(lambda inner: inner.update(kind="k" * 10**6)), "bytes; expected at most [0-9,]+"),
    ],
)
def test_reasons_neither_steer_a_terminal_nor_fill_the_log(tmp_path, forge, reason_pattern):
    """They are printable, and shorter than 400 characters with all that is said around them."""
    for reason in dropped_alone(tmp_path, forge):
        assert re.search(reason_pattern, reason)


@pytest.mark.parametrize("late", ["refused", "model", "delta"])
def test_an_upload_of_an_earlier_round_is_refused(tmp_path, late):
    """Round 2 is sent round 1's upload again. Where uploads may be late, the schedule says which are, and
    nobody else chooses which model its upload is compared with."""
    messages = []

    def replay(message):
        messages.append(message)
        return messages[0]

    whole = job()
    exchanges = tuple(replace(exchange, late=late) for exchange in whole.method.exchanges)
    whole = replace(whole, method=replace(whole.method, exchanges=exchanges))
    _, (first, second), _ = play(tmp_path / "run", whole, forging(replay))
    assert first["dropped"] == []
    (drop,) = second["dropped"]
    assert (drop["client"], drop["reason"]) == (BAD, "is of round 1, not round 2")


@pytest.mark.parametrize(("rule", "factor"), [*((rule, 1e6) for rule in RULES), ("mean", 1e30)])
def test_an_update_out_of_all_proportion_is_dropped_under_every_rule(tmp_path, rule, factor):
    merge = {"rule": rule, "liars": 1}
    for reason in dropped_alone(tmp_path, scaled(factor), merge=merge):
        assert re.search(
            r"length \S+, \S+ times the median of the round, \S+, but \[merge\] max_ratio = 10000", reason
        )


@pytest.mark.parametrize("count", [1, 2])
def test_whatever_a_merge_raises_is_the_doing_of_uploads(tmp_path, count):
    """A merge that cannot bear a loss above 50: those who sent one are found among the others and dropped,
    and what is merged is what would have been merged without them."""
    bad = [f"Client {number}/ü" for number in (1, 3)[:count]]

    def delicate(whole):
        (exchange,) = whole.method.exchanges

        def merge(server, uploads, now):
            if max(upload.scalars["loss"] for upload in uploads) > 50:
                raise ZeroDivisionError("no such luck")
            return exchange.merge(server, uploads, now)

        method = replace(whole.method, exchanges=(replace(exchange, merge=merge),))
        return replace(whole, method=method)

    whole = delicate(job(clients=6))
    backend = forging(altered(lambda u: {"scalars": {"loss": 60.0}}), set(bad))
    server, rounds, _ = play(tmp_path / "bad", whole, backend)
    for record in rounds:
        assert [drop["client"] for drop in record["dropped"]] == bad
        assert all("the merge fails with ZeroDivisionError" in drop["reason"] for drop in record["dropped"])
    without, _, _ = play(tmp_path / "without", job(clients=6, untrained=bad))
    assert same(server, without)


@pytest.mark.parametrize(
    ("merge", "problem"),
    [
        (lambda merged: merged[0], "'train' returns State, not the server's next state with entries"),
        (lambda merged: merged.update({}), "each upload alone, .* AttributeError: 'tuple' .* 'update'"),
    ],
)
def test_a_merge_of_the_old_interface_is_the_methods_fault(tmp_path, merge, problem):
    (exchange,) = (whole := job()).method.exchanges
    old = replace(exchange, merge=lambda *arguments: merge(exchange.merge(*arguments)))
    with pytest.raises(RoundError, match=problem):
        play(tmp_path, replace(whole, method=replace(whole.method, exchanges=(old,))))


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum", "norm_clip"])
def test_scaffolds_variate_goes_through_the_rule(tmp_path, rule):
    """One of seven sends Δc 1000 times as large. c starts at 0 and takes Σ p_i = 1 times what the rule makes
    of the Δc_i: at most the longest honest one, or the middle of each number. Their weighted sum would be far
    longer."""
    changes = {}

    def forge(message):
        upload = decode_upload(message)
        return encode(replace(upload, tensors={**upload.tensors, "control": upload.tensors["control"] * 1e3}))

    class Heard(Forging):
        def run(self, tasks):
            for result in super().run(tasks):
                if b"control" in result.message and result.client != BAD:
                    changes[result.client] = decode_upload(result.message).tensors["control"]
                yield result

    whole = job("scaffold", {"rule": rule, "liars": 1, "trim": 0.2}, clients=7, rounds=1)
    server, (record,), _ = play(tmp_path / "run", whole, forging(forge, kind=Heard))
    assert record["dropped"] == []
    control, honest = server.tensors["control"].flat, torch.stack([c.flat for c in changes.values()])
    assert float(control.norm()) > 0
    if rule in ("median", "trimmed_mean"):
        assert bool(((honest.amin(0) <= control) & (control <= honest.amax(0))).all())
    assert float(control.norm()) <= float(honest.norm(dim=1).max())


def test_one_of_two_cannot_move_the_model_beyond_measure(tmp_path):
    """Two updates have no median: the server's own model is the measure. Once 1e30 times as much were merged,
    no honest upload would ever be finite again."""
    for reason in dropped_alone(tmp_path, scaled(1e30), client=FIRST_OF_ALL, clients=2, rounds=3):
        assert re.search(
            r"times the length of the server's model and of half of the updates, \S+, but \[merge\]", reason
        )
