"""What a federation's hub and sites do when a part of it stops; without NVIDIA FLARE and without a model."""

import errno
from threading import Event

import pytest

from federating import Receipts, Within, experiment, site_config
from prefed.engines.tasks import Task
from prefed.networks.federation.audit_log import SentLog
from prefed.networks.federation.federate import Terms, federate
from prefed.networks.federation.hub import FederationBackend, SiteError, Sites
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import FederationError, UnreachableError
from prefed.networks.federation.unix_socket import pack, unpack
from waiting import WATCHDOG
from workers import CLIENTS

JOINED = {"clients": {}, "versions": {}}


class Forgetful:
    """A restarted site: it must receive the run again, and answers as the test says."""

    def __init__(self, join, model="m"):
        self.got, self.join, self.model = False, join, model

    def answer(self, message):
        header, body = unpack(message)
        if header["kind"] == "join":
            return pack(**self.join)
        if header["kind"] == "start":
            self.got = True
            return pack(fingerprint={"model": self.model})
        return pack(body, withheld="") if self.got else pack(unknown=True)


def test_a_site_that_comes_back_and_cannot_take_part_costs_its_own_visits_alone():
    """Site w0 comes back whole, w1 without its data, w2 with another base model. The run resumes with w0."""
    sites = {
        "site-w0": Forgetful(JOINED),
        "site-w1": Forgetful({"failed": "FileNotFoundError: see the site's log"}),
        "site-w2": Forgetful(JOINED, model="another"),
    }
    asked = Sites(Within(sites), "wards", "0" * 16, 1.0)
    with pytest.raises(SiteError, match="'site-w2' has a different base model or revision"):
        asked.start("site-w2", CLIENTS, [], "m")
    sites["site-w2"].got = False
    homes = {client: f"site-{client}" for client in CLIENTS}
    with FederationBackend(asked, Receipts(), homes, 1.0, lambda text: None) as backend:
        tasks = [Task("visit", client, 1, "train", client.encode()) for client in CLIENTS]
        results = {result.client: result for result in backend.run(tasks)}
    assert (results["w0"].message, results["w0"].withheld) == (b"w0", "")
    assert "cannot take part: FileNotFoundError" in results["w1"].withheld
    assert "a different base model or revision" in results["w2"].withheld
    assert backend.away == set()


def test_a_site_that_forgot_the_run_learns_of_it_before_it_gets_models():
    """A restarted one receives the run and its states. One that does not know the run even then is named,
    as is one that went; with a message for two clients and another for a third there are three requests."""

    class Never(Forgetful):
        got = property(lambda self: False, lambda self, value: None)

    asked, warned = [], []

    def notes(site, request):
        header, body = unpack(request)
        if header["kind"] == "published":
            asked.append((site, header["clients"], body))

    sites = {"forgot": Forgetful(JOINED), "never": Never(JOINED)}
    homes = {"a": "forgot", "b": "forgot", "c": "forgot", "d": "never", "e": "gone"}
    hub = Sites(Within(sites, notes), "wards", "0" * 16, 1.0)
    hub.start("forgot", [*homes], [], "m")
    sites["forgot"].got = False
    with FederationBackend(hub, Receipts(), homes, 1.0, warned.append) as backend:
        backend.away.add("gone")
        backend.publish(3, lambda client: b"ab" if client in "ab" else client.encode())
    first, second = ("forgot", {"a": None, "b": None}, b"ab"), ("forgot", {"c": None}, b"c")
    assert [each for each in asked if each[0] == "forgot"] == [first, first, second]
    assert sorted(text.partition(")")[0] for text in warned) == [
        "site 'gone' did not receive the models of its clients (it is away",
        "site 'never' did not receive the models of its clients (site 'never' does not know the run",
    ]


def has_left():
    raise UnreachableError("it has left")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: pack(failed="FileNotFoundError: the log says more"), "'broken' cannot take part: FileNot"),
        (has_left, "'broken' is away: it has left"),
    ],
)
def test_the_first_site_that_cannot_take_part_ends_the_beginning(tmp_path, answer, message):
    """The other site reads its data all the while: the hub does not wait for it."""
    over, read = Event(), []

    class Reads:
        def answer(self, request):
            read.append(over.wait(WATCHDOG))
            return pack(clients={}, versions={})

    class Broken:
        def answer(self, request):
            return answer()

    transport = Within({"slow": Reads(), "broken": Broken()})
    with pytest.raises(FederationError, match=message):
        federate(experiment(tmp_path), tmp_path / "run", transport, Terms("wards", ("slow", "broken")))
    assert not read
    over.set()


def test_a_line_that_a_full_disk_cut_off_costs_no_other(tmp_path):
    """The second of three lines is half there."""
    log = SentLog(tmp_path / "log")
    log.add("train", client="w0")
    (path,) = (tmp_path / "log").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    log.add("train", client="w2")
    assert [entry["client"] for entry in log.entries()] == ["w0", "w2"]


def test_a_site_whose_screen_is_a_full_disk_answers(tmp_path):
    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    site = Site(site_config(tmp_path, tmp_path, "w0"), full)
    header, _ = unpack(site.answer(b""))
    site.close()
    assert header.keys() & {"refused", "failed"}
