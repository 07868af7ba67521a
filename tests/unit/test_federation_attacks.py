"""A hub and sites that do what they should not; without NVIDIA FLARE and without a model."""

import gc
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from federating import Within, experiment, site_config
from prefed.config import Experiment, to_toml
from prefed.core import Download, Entry, Layout, Tensors
from prefed.core.wire import decode_download, encode
from prefed.data import ClientSizes, FederatedDataset
from prefed.engines import Task, WorkerError
from prefed.networks.federation import site as site_module
from prefed.networks.federation.audit_log import SentLog, line_of
from prefed.networks.federation.experiment import own_experiment
from prefed.networks.federation.federate import check_clients, experiment_for_sites
from prefed.networks.federation.hub import FederationBackend, Sites
from prefed.networks.federation.messages import (
    FORMAT,
    VERSION,
    Joined,
    check_download,
    order_digest,
    read_answer,
)
from prefed.networks.federation.privacy_ledger import Releases, epsilon_of
from prefed.networks.federation.site import WITHHELD, Site
from prefed.networks.federation.transport import FederationError
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.networks.federation.vault import Vault
from prefed.networks.federation.versions import compare_versions

RUN = "a" * 16
MEMBERS = ["w0", "v1"]
WITHHOLD = -1
"""What has the stub withhold an upload; a number beyond that is the rank that the model must have."""
LOCAL = {"kind": "local", "clip": 0.1, "noise_multiplier": 1000.0, "delta": 1e-5}


def asked(place, rank=8, z=1000.0, method="feddpo", rounds=5, minimum_pairs=0, **changes):
    """What a hub sends about a run with local noise."""
    tables = experiment(place, method, rounds, **changes).tables()
    tables["model"]["lora"]["rank"] = rank
    privacy = {**LOCAL, "noise_multiplier": z, "minimum_pairs": minimum_pairs}
    made = type(experiment(place)).from_tables(
        {**tables, "merge": {"weights": "uniform"}, "privacy": privacy}, "the test"
    )
    return experiment_for_sites(made)


class Stub:
    """In the place of the process that trains: it does what the message says, and ends where ranks differ."""

    number = started = 0

    def build(self, factory, threads):
        Stub.started += 1
        self.rank = json.loads(factory.text)
        self.due = {"fingerprint": {"data": "d", "model": "m"}, "exchanges": ["train"], "metrics": []}

    def give(self, task, state, timeout):
        what = decode_download(task.message).scalars["do"]
        Stub.number += 1
        state = f"state {Stub.number}".encode() if task.kind == "visit" else None
        self.due = {"state": state, "message": b"{}", "withheld": "", "note": ""}
        if what == WITHHOLD:
            self.due = {"state": None, "message": b"", "withheld": "lora/0/A holds NaN", "note": ""}
        elif what != self.rank:
            self.due = None

    def receive(self):
        if self.due is None:
            raise WorkerError("shapes")
        return self.due

    def stop(self):
        self.due = None


@pytest.fixture
def opens(tmp_path, monkeypatch):
    """Open a site of one client with 10 pairs that train and 3 held out, and ask it as a hub does."""
    (tmp_path / "w0.jsonl").touch()
    (tmp_path / "model").mkdir()
    sizes = FederatedDataset.without_pairs({"w0": ClientSizes(10, 0, 3)})
    monkeypatch.setattr(site_module, "own_dataset", lambda asked, folder: replace(sizes, fingerprint="d"))
    monkeypatch.setattr(
        site_module,
        "site_factory",
        lambda asked, *_: SimpleNamespace(builder="", text=json.dumps(asked.model.lora.rank)),
    )
    monkeypatch.setattr(site_module, "Worker", Stub)
    monkeypatch.setattr(site_module, "contents", lambda kind, message: {})
    opened = []

    def make(text, **limits):
        got = []
        opened.append(Site(site_config(tmp_path, tmp_path, "w0", limits=limits), got.append))

        def say(kind, what=None, order=None, body=None, **header):
            body = body or (b"" if what is None else encode(Download({}, {"do": what})))
            if what is not None:
                task = {"client": "w0", "exchange": "train" if kind == "visit" else "", "asked": 0}
                order = order or order_digest(text, MEMBERS, [])
                header = {**task, "order": order, "receipt": None, **header}
            common = {"format": FORMAT, "prefed": VERSION, "federation": "wards", "run": RUN, "kind": kind}
            return unpack(opened[-1].answer(pack(body, **{**common, **header})))[0]

        assert "clients" in say("join", experiment=text)
        assert say("start", members=MEMBERS, unseen=[])["fingerprint"] == {"model": "m"}
        say.site, say.got = opened[-1], got
        return say

    yield make
    for site in opened:
        site.close()


def folder(tmp_path):
    return tmp_path / "site-w0/runs" / RUN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda place: asked(place, rank=4, z=0.001), "model.lora.rank = 4, which was 8"),
        (lambda place: asked(place, z=0.001), "privacy.noise_multiplier = 0.001, which was 1000.0"),
    ],
)
def test_a_run_has_one_experiment(opens, tmp_path, text, message):
    """A hub whose run was agreed to with much noise starts another with little at the site, and continues
    to ask."""
    first = asked(tmp_path)
    say = opens(first, epsilon=1.0)
    assert message in say("join", experiment=text(tmp_path))["refused"]
    assert "receipt" in say("visit", 8, round=1)
    assert Releases(tmp_path / "site-w0").spent() == {"w0": 1000.0**-2}


def test_another_split_cannot_make_private_tensors_shared(opens, tmp_path):
    """FedPer keeps all layers but the first at the client; the same run with two shared would send them."""
    say = opens(asked(tmp_path, method="fedper", shared_layers=1))
    other = asked(tmp_path, method="fedper", shared_layers=2)
    assert "method.shared_layers = 2, which was 1" in say("join", experiment=other)["refused"]


def test_a_run_may_have_more_rounds_and_its_site_is_asked_again(opens, tmp_path):
    """What the site agreed to before does not count for the longer run: it must be started again, or a visit
    would be of another experiment than its digest says."""
    say, longer = opens(asked(tmp_path)), asked(tmp_path, rounds=9)
    assert "clients" in say("join", experiment=longer)
    assert say("visit", 8, round=1) == {"unknown": True}
    say("start", members=MEMBERS, unseen=[])
    assert "receipt" in say("visit", 8, round=9, order=order_digest(longer, MEMBERS, []))


def test_a_name_that_is_sent_often_is_one_client(opens, tmp_path):
    """The cohort must have two clients, and the hub names one of them many times."""
    say = opens(asked(tmp_path), minimum_cohort=2)
    refused = say("start", members=["w0"] * 50, unseen=[])["refused"]
    assert "a round has 1 client, at least 2 required" in refused


class Receipts:
    """Nothing is kept yet; what is staged must have the length of a receipt."""

    def read(self, client):
        return None

    def stage(self, client, state):
        assert len(state) < 1000


class Lies:
    """A site of another's making: what it answers is a function of the request's header."""

    def __init__(self, lie):
        self.lie = lie

    def answer(self, request):
        return self.lie(unpack(request)[0])


def nested(depth):
    text = b'{"failed":' + b"[" * depth + b"]" * depth + b"}"
    return len(text).to_bytes(8, "little") + text


def test_one_site_does_not_end_the_run(subtests):
    """Whatever it answers to a visit, to a second start message and to the start: the others continue."""
    for lie in (
        lambda header: pack(**({"unknown": True} if header["kind"] == "visit" else {})),
        lambda header: pack(**({"unknown": True} if header["kind"] == "visit" else {"fingerprint": 5})),
        lambda header: pack(**({"unknown": True} if header["kind"] == "visit" else {"fingerprint": {}})),
        lambda header: pack(b"m", receipt="x" * 15_000_000),
        lambda header: pack(b"m", receipt="\ud800"),
        lambda header: pack(b"m", receipt=7),
        lambda header: pack(withheld=["a"]),
        lambda header: pack(refused="\ud800" * 10**6),
        *((lambda header, depth=depth: nested(depth)) for depth in range(900, 1000, 9)),
    ):
        with subtests.test(lie=lie):
            sites = {"a": Lies(lambda header: pack(b"fine")), "b": Lies(lie)}
            asks = Sites(Within(sites), "f", RUN, 5.0)
            with FederationBackend(asks, Receipts(), {"w": "a", "v": "b"}, 5.0, lambda text: None) as backend:
                results = {r.client: r for r in backend.run(Task("visit", c, 1, "train", b"") for c in "wv")}
            assert results["w"].message == b"fine"
            assert (results["v"].message, bool(results["v"].withheld)) == (b"", True)
            assert len(results["v"].withheld) < 20_000
            results["v"].withheld.encode()


def test_what_a_site_claims_is_checked_and_bounded(subtests):
    for answer, message in (
        ({}, "clients"),
        ({"clients": 5}, "clients"),
        ({"clients": {"x": 5}}, "clients.x"),
        ({"clients": {"x": [1, 2]}}, "clients.x"),
        ({"clients": {"x": [True, 0, 1]}}, "clients.x"),
        ({"clients": {"x": [1.0, 0, 1]}}, "clients.x"),
        ({"clients": {"x": [1, -1, 1]}}, "clients.x"),
        ({"clients": {"x": [0, 0, 4]}}, "clients.x.*training pairs"),
        ({"clients": {"x": [10**300, 0, 0]}}, "'x' .*--most-pairs = 1,000"),
        ({"clients": {"": [1, 1, 1]}}, "clients"),
        ({"clients": {"\ud800": [1, 1, 1]}}, "clients"),
        ({"clients": {"a\n": [1, 1, 1]}}, "clients"),
        ({"clients": {"a" * 256: [1, 1, 1]}}, "clients"),
        ({"clients": {"x": [1, 0, 0]}, "versions": 5}, "versions"),
        ({"clients": {"x": [1, 0, 0]}, "versions": {"prefed": ["x"]}}, "versions.prefed"),
        ({"clients": {str(k): [1, 0, 0] for k in range(5)}}, "5 clients, more than --most-clients = 4"),
    ):
        with subtests.test(answer=answer, message=message):
            answer = {"versions": {}, **answer}
            known = {"sites": {"b": answer.get("clients")}}
            for before in (None, known):
                with pytest.raises(FederationError, match=f"site 'b' .*{message}") as caught:
                    check_clients(before, {"b": read_answer("b", answer, Joined)}, 4, 1000)
                assert len(str(caught.value).encode()) < 2000
            fair = {"../../ward 7": [1000, 0, 3]}
            joined = read_answer("b", {"clients": fair, "versions": {}}, Joined)
            assert check_clients(None, {"b": joined}, 4, 1000) == {"b": fair}


def test_a_site_that_reports_no_version_is_named():
    with pytest.raises(FederationError, match="site 'b'"):
        compare_versions("b", {}, lambda text: None)


def test_a_hub_that_names_no_state_deletes_none(opens, tmp_path):
    """After round 1, a visit of round 2 from the first state leaves the version of round 1 there, which the
    hub may have committed. A visit of round 3 from that of round 2 leaves these two and deletes round 1's."""
    say = opens(asked(tmp_path))
    one = say("visit", 8, round=1)["receipt"]
    two = say("visit", 8, round=2)["receipt"]
    vault = Vault(folder(tmp_path) / "clients", say.site._secret)
    assert vault.read("w0", one)
    assert "receipt" in say("visit", 8, round=2, receipt=one)
    three = say("visit", 8, round=3, receipt=two)["receipt"]
    assert vault.read("w0", two)
    assert vault.read("w0", three)
    assert not list((folder(tmp_path) / "clients").glob("w0@000001*"))


def test_a_hub_can_lose_a_clients_progress(opens, tmp_path):
    """Nothing stops it: which state counts is the hub's to say. A visit that names no state leaves all; the
    next one, from what that left, deletes those of the rounds before."""
    say = opens(asked(tmp_path))
    one = say("visit", 8, round=1)["receipt"]
    two = say("visit", 8, round=2, receipt=one)["receipt"]
    vault = Vault(folder(tmp_path) / "clients", say.site._secret)
    other = say("visit", 8, round=3)["receipt"]
    assert vault.read("w0", one)
    assert vault.read("w0", two)
    say("visit", 8, round=4, receipt=other)
    assert vault.read("w0", other)
    assert not list((folder(tmp_path) / "clients").glob("w0@00000[12]*"))
    assert "StoreError" in say("visit", 8, round=4, receipt=two)["failed"]


@pytest.mark.parametrize(("epsilon", "left"), [(None, 6), (3.5e-6, 3)], ids=["any", "three"])
def test_visits_of_one_round_pile_up_but_for_a_budget(opens, tmp_path, epsilon, left):
    """Six requests of round 1 that differ, none of which names a state: each leaves a private state and an
    answer. A key that no request has makes no difference. With a budget for three visits three do, and the
    rest are refused."""
    limits = {} if epsilon is None else {"epsilon": epsilon_of(epsilon, 1e-5)}
    say = opens(asked(tmp_path), **limits)
    bodies = [encode(Download({}, {"do": 8, "nonce": number})) for number in range(6)]
    answers = [say("visit", 8, round=1, body=body) for body in bodies]
    assert say("visit", 8, round=1, body=bodies[0], nonce=1) == answers[0]
    assert sum("receipt" in answer for answer in answers) == left
    assert all("[limits] epsilon" in answer["refused"] for answer in answers[left:])
    assert len(list((folder(tmp_path) / "clients").iterdir())) == left
    assert len(list((folder(tmp_path) / "answers").iterdir())) == left


def test_what_is_withheld_is_counted_and_says_nothing(opens, tmp_path):
    """That an upload is withheld, or that a visit fails, also says something of the pairs. Both are counted
    before the work: three visits of three kinds and one of them again, which has the answer that it had. A
    fourth would spend more than the client may. The reason is in the site's log alone."""
    say = opens(asked(tmp_path), epsilon=(epsilon_of(3e-6, 1e-5) + epsilon_of(4e-6, 1e-5)) / 2)
    answer = say("visit", WITHHOLD, round=1)
    assert answer["withheld"] == WITHHELD
    assert "NaN" not in json.dumps(answer)
    assert say("visit", WITHHOLD, round=1) == answer
    assert [entry["withheld"] for entry in say.site.log.entries() if "withheld" in entry] == [
        "lora/0/A holds NaN"
    ]
    assert "died or failed" in say("visit", 5, round=1)["failed"]
    assert "receipt" in say("visit", 8, round=1)
    assert Releases(tmp_path / "site-w0").spent() == {"w0": pytest.approx(3 * 1000.0**-2)}
    assert "[limits] epsilon" in say("visit", 8, round=2)["refused"]


@pytest.mark.parametrize("least", [3, 4])
def test_figures_over_few_pairs_do_not_leave_a_site(opens, tmp_path, least):
    """The client has 3 pairs to be judged on: metrics over them are reported where 3 are enough, not where
    4 are.
    How many these are follows from settings that the hub makes, so the run's own check is not enough."""
    say = opens(asked(tmp_path, minimum_pairs=least), minimum_pairs=least)
    answer = say("evaluate", 8, round=1)
    got = "minimum_pairs = 4: the client has only 3 held-out pairs" in answer.get("refused", "")
    assert got == (least == 4)
    assert "receipt" in say("visit", 8, round=1)


def test_a_site_does_not_print_what_a_hub_writes(opens, tmp_path):
    """An evaluation has no exchange, whose name could hold what a terminal obeys."""
    say = opens(asked(tmp_path))
    assert (
        "only a visit names an exchange" in say("evaluate", 8, round=1, exchange="\x1b[2J train")["refused"]
    )
    say.site._say("\x1b[2J")
    assert say.got[-1] == "\\x1b[2J"
    assert not any("\x1b" in text for text in say.got)


@pytest.mark.parametrize(
    "request_",
    [
        pack(kind="join", format=FORMAT, prefed=VERSION, federation="wards", run="\ud800"),
        pack(kind="\ud800", format=FORMAT, prefed=VERSION, federation="wards", run=RUN, client="\ud800\n"),
        pack(kind="foreign", asked="\ud800"),
    ],
    ids=["run", "kind", "caller"],
)
def test_every_refusal_is_answered_and_logged(opens, tmp_path, request_):
    """Half of a surrogate pair has no bytes in UTF-8."""
    say = opens(asked(tmp_path))
    before = len(list(say.site.log.entries()))
    assert "refused" in unpack(say.site.answer(request_))[0]
    *_, last = say.site.log.entries()
    assert len(list(say.site.log.entries())) == before + 1
    assert "refused" in last
    line_of(last).encode()


def test_a_refusal_of_a_request_that_is_nested_is_logged(opens, tmp_path):
    """Deep enough for JSON to be read, and too deep to be written again further down."""
    say = opens(asked(tmp_path))
    for depth in range(900, 1000, 9):
        head = b'{"format":1,"kind":"nothing","federation":"wards","run":"' + RUN.encode() + b'","round":'
        text = head + b"[" * depth + b"]" * depth + b"}"
        before = len(list(say.site.log.entries()))
        answer = unpack(say.site.answer(len(text).to_bytes(8, "little") + text))[0]
        assert answer.keys() & {"refused", "failed"}
        assert len(list(say.site.log.entries())) == before + 1


def test_the_log_keeps_letters(tmp_path):
    log = SentLog(tmp_path / "log")
    log.add("train", client="Zoë \ud800")
    assert [entry["client"] for entry in log.entries()] == ["Zoë \ud800"]
    (path,) = (tmp_path / "log").iterdir()
    assert "Zoë" in path.read_text("utf-8")


def test_the_revision_of_a_model_is_the_sites(tmp_path):
    """For a hub name too, where the experiment's would choose what a site loads."""
    hub = experiment(tmp_path).tables()
    text = to_toml(Experiment.from_tables({**hub, "model": {**hub["model"], "revision": "refs/pr/7"}}, "t"))
    for own in (None, "v1"):
        model = {"name": "org/model", **({"revision": own} if own else {})}
        config = site_config(tmp_path, tmp_path, "w0", model=model)
        assert own_experiment(text, config).model.revision == own


def test_a_visit_is_asked_for_in_no_later_round(opens, tmp_path):
    say = opens(asked(tmp_path))
    assert "a visit cannot be requested in round 1000000" in say("visit", 8, round=1, asked=10**6)["refused"]
    assert "a visit cannot be requested in round -1 and end" in say("visit", 8, round=1, asked=-1)["refused"]


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("visit", {"round": 6}, "round 6 does not exist: the run has 5 rounds"),
        ("visit", {"exchange": "score"}, "feddpo has no exchange 'score'"),
        ("visit", {"exchange": "diagnose"}, "feddpo has no exchange 'diagnose'"),
        ("visit", {"client": "v1"}, "the client is not at this site"),
        ("visit", {"receipt": "000001-" + "a" * 32}, "StoreError"),
        ("visit", {"body": b"no download"}, "the task's download cannot be read"),
        ("evaluate", {}, "evaluate = false"),
        ("start", {"run": "b" * 16}, "does not know"),
    ],
)
def test_what_cannot_be_served_starts_no_process(opens, tmp_path, kind, changes, reason):
    """After `leave` the site has no process that trains. A request that it can serve starts one."""
    say = opens(asked(tmp_path), evaluate=False)
    started = Stub.started
    say("leave")
    about = {"members": MEMBERS, "unseen": []} if kind == "start" else {"what": 8, "round": 1}
    answer = say(kind, **{**about, **changes})
    assert reason in (answer.get("refused") or answer["failed"])
    assert Stub.started == started
    assert "receipt" in say("visit", 8, round=1)
    assert Stub.started == started + 1


@pytest.mark.parametrize("pairs", [(0, 0, 3), (10, 0, 0)])
def test_a_client_without_a_pair_for_it_is_not_visited_or_evaluated(opens, tmp_path, monkeypatch, pairs):
    sizes = FederatedDataset.without_pairs({"w0": ClientSizes(*pairs)})
    monkeypatch.setattr(site_module, "own_dataset", lambda asked, folder: replace(sizes, fingerprint="d"))
    say = opens(asked(tmp_path))
    answers = {kind: say(kind, 8, round=1) for kind in ("visit", "evaluate")}
    none, some = ("visit", "evaluate") if pairs[0] == 0 else ("evaluate", "visit")
    assert "has no pair" in answers[none]["refused"]
    assert "refused" not in answers[some]


def test_without_its_model_a_site_starts_no_process(opens, tmp_path):
    """It joined with it. Where the model is looked for stays in the site's log."""
    say = opens(asked(tmp_path))
    say("leave")
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    started = Stub.started
    answer = say("visit", 8, round=1)
    assert str(tmp_path) not in answer["failed"]
    assert "model.name" in [*say.site.log.entries()][-1]["failed"]
    assert Stub.started == started


def test_downloads_of_a_hub_leave_nothing_behind():
    """Each names 500 tensors without numbers, so a site that kept their layouts would fill its memory."""

    def entries():
        gc.collect()
        return sum(isinstance(each, Entry) for each in gc.get_objects())

    before = entries()
    for k in range(3):
        layout = Layout(tuple(Entry(f"{k}/{i}", (0,), "x") for i in range(500)))
        body = encode(Download({"model": Tensors(layout, torch.zeros(0))}))
        del layout
        check_download(body, "the model")
    assert entries() < before + 500
