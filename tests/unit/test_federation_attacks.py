"""A hub and sites that do what they should not; without NVIDIA FLARE and without a model."""

import json
from types import SimpleNamespace

import pytest

from federating import experiment, site_config
from prefed.engines import WorkerError
from prefed.federation import site as site_module
from prefed.federation.federate import told_experiment
from prefed.federation.relay import pack, unpack
from prefed.federation.releases import Releases
from prefed.federation.site import FORMAT, Site, order_digest

RUN = "a" * 16
MEMBERS = ["w0", "v1"]
LOCAL = {"kind": "local", "clip": 0.1, "noise_multiplier": 1000.0, "delta": 1e-5}


def asked(place, rank=8, z=1000.0, method="feddpo", rounds=5, minimum_pairs=0, **changes):
    """What a hub tells of a run with local noise."""
    tables = experiment(place, method, rounds, **changes).tables()
    tables["model"]["lora"]["rank"] = rank
    privacy = {**LOCAL, "noise_multiplier": z, "minimum_pairs": minimum_pairs}
    made = type(experiment(place)).from_tables(
        {**tables, "merge": {"weights": "uniform"}, "privacy": privacy}, "the test"
    )
    return told_experiment(made)


class Stub:
    """In the place of the process that trains: it does what the message says, and ends where ranks differ."""

    number = 0

    def send(self, builder, text, threads):
        self.rank, self.due = json.loads(text), {"fingerprint": {"data": "d", "model": "m"}}

    def give(self, task, state, timeout):
        what = json.loads(task.message)
        Stub.number += 1
        state = f"state {Stub.number}".encode() if task.kind == "visit" else None
        self.due = {"state": state, "message": b"{}", "withheld": ""}
        if what == "withhold":
            self.due = {"state": None, "message": b"", "withheld": "lora/0/A holds NaN"}
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
    """Open a site of one client with 10 pairs that train and 3 held out, and a way to ask it as a hub does."""
    sizes = SimpleNamespace(fingerprint="d", sizes={"w0": (10, 0, 3)}, clients={"w0": None})
    monkeypatch.setattr(site_module, "own_dataset", lambda asked, folder: sizes)
    monkeypatch.setattr(
        site_module,
        "site_factory",
        lambda asked, *_: SimpleNamespace(builder="", text=json.dumps(asked.model.lora.rank)),
    )
    monkeypatch.setattr(site_module, "Worker", Stub)
    monkeypatch.setattr(site_module, "contents", lambda kind, message: {})
    opened = []

    def make(text, **limits):
        told = []
        opened.append(Site(site_config(tmp_path, tmp_path, "w0", limits=limits), told.append))

        def say(kind, what=None, order=order_digest(text, MEMBERS, []), **header):
            body = b"" if what is None else json.dumps(what).encode()
            if what is not None:
                task = {"client": "w0", "exchange": "train" if kind == "visit" else "", "asked": 0}
                header = {**task, "order": order, "receipt": None, **header}
            common = {"format": FORMAT, "federation": "wards", "run": RUN, "kind": kind}
            return unpack(opened[-1].answer(pack(body, **{**common, **header})))[0]

        assert "clients" in say("join", experiment=text)
        assert say("start", members=MEMBERS, unseen=[]) == {"fingerprint": {"model": "m"}}
        say.site, say.told = opened[-1], told
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
    """A hub whose run was agreed to with much noise tells the site of another with little, and asks on."""
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


def test_a_run_may_have_more_rounds_and_its_site_is_told_again(opens, tmp_path):
    """What the site was told before does not count for the longer run: it must be started again, or a visit
    would be of another experiment than its digest says."""
    say, longer = opens(asked(tmp_path)), asked(tmp_path, rounds=9)
    assert "clients" in say("join", experiment=longer)
    assert say("visit", 8, round=1) == {"unknown": True}
    say("start", members=MEMBERS, unseen=[])
    assert "receipt" in say("visit", 8, round=9, order=order_digest(longer, MEMBERS, []))
