"""A site that says hello and leaves every other request without an answer: how many rounds wait for it."""

from types import SimpleNamespace

import pytest

from federating import Here, Within, experiment, open_sites
from prefed.engines.tasks import Task
from prefed.networks.federation import silent_sites
from prefed.networks.federation import site as site_module
from prefed.networks.federation.federate import Terms, federate
from prefed.networks.federation.hub import FederationBackend, Sites
from prefed.networks.federation.transport import UnreachableError
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.store import RunReader
from workers import CLIENTS, make_place

SITES = tuple(f"site-{client}" for client in CLIENTS)
WORK = ("visit", "evaluate")


class Slow(Within):
    """Notes each round in which a request waits for site w1 in vain.

    Args:
        answers: whether w1 answers a request of this round.
        greets: whether it says hello in any.
    """

    def __init__(self, sites, answers, greets=True):
        super().__init__(sites)
        self.answers, self.greets, self.waited = answers, greets, []

    def call(self, site, request, timeout, most):
        header, _ = unpack(request)
        if site == "site-w1" and header["kind"] == "hello" and not self.greets:
            raise UnreachableError("it has not joined the session within 120 seconds")
        if site == "site-w1" and header["kind"] in WORK and not self.answers(header["round"]):
            self.waited.append(header["round"])
            raise UnreachableError(f"no answer within {timeout:g} seconds")
        return super().call(site, request, timeout, most)


class Echo:
    def answer(self, message):
        return pack(unpack(message)[1], withheld="")


def play(answers, rounds, greets=True):
    """Rounds of a visit and an evaluation of each client: which rounds waited, and in which w1 answered."""
    transport, warned, answered = Slow(dict.fromkeys(SITES, Echo()), answers, greets), [], []
    receipts = SimpleNamespace(read=lambda client: None)
    homes = {client: f"site-{client}" for client in CLIENTS}
    asked = Sites(transport, "wards", "0" * 16, 1.0)
    with FederationBackend(asked, receipts, homes, 1.0, warned.append) as backend:
        for number in range(1, rounds + 1):
            for kind in WORK:
                tasks = [Task(kind, client, number, "", b"") for client in CLIENTS]
                came = {result.client for result in backend.run(tasks)}
                assert came >= {"w0", "w2"}
                answered += [number] if "w1" in came else []
                for greeting in backend._returning.values():
                    greeting.result(10)
        return transport.waited, sorted({*answered}), warned, backend


def test_a_silent_site_costs_three_rounds_of_any_number():
    """The first silence leaves it out of one round, the second of three, and the third sets it aside."""
    waited, answered, warned, backend = play(lambda number: False, 40)
    assert (waited, answered) == ([1, 3, 7], [])
    assert backend.set_aside() == {"w1"}
    got = [text for text in warned if "no answer within 1 seconds" in text]
    assert [("set aside" in text, "--resume" in text) for text in got] == [(False, False)] * 2 + [
        (True, True)
    ]
    assert ["can rejoin from round 3" in got[0], "can rejoin from round 7" in got[1]] == [True, True]


def test_a_site_that_is_connected_and_does_not_join_is_silent_each_time():
    """It is asked only in round 1, and greeted for rounds 3 and 7. Its third silence sets it aside."""
    waited, answered, warned, backend = play(lambda number: False, 40, greets=False)
    assert (waited, answered) == ([1], [])
    assert backend.set_aside() == {"w1"}
    assert [text.partition("; ")[2][:22] for text in warned] == [
        "it can rejoin from rou",
        "it can rejoin from rou",
        "it is set aside after ",
    ]
    assert all("'site-w1' is away: " in text for text in warned)
    assert ["not joined the session" in text for text in warned] == [False, True, True]


def test_such_a_site_would_stall_rounds_for_ever(monkeypatch):
    """The positive control: one that is asked again as soon as it says hello is waited for in every round."""
    monkeypatch.setattr(silent_sites.Silence, "note", lambda self, number, why: None)
    waited, *_ = play(lambda number: False, 10)
    assert len(waited) >= 5


def test_a_site_that_was_silent_once_is_back_and_makes_up_for_it():
    """Silent in round 2 and out of round 3, it answers from round 4 on. After ten such rounds a silence in
    round 20 is its first again, and without them its second."""
    waited, answered, _, backend = play(lambda number: number not in (2, 20), 30)
    assert (waited, answered) == ([2, 20], [n for n in range(1, 31) if n not in (2, 3, 20, 21)])
    assert not backend.set_aside()
    waited, answered, _, backend = play(lambda number: number not in (2, 10), 30)
    assert (waited, answered) == ([2, 10], [n for n in range(1, 31) if n not in (2, 3, 10, 11, 12, 13)])


def test_one_silence_in_three_rounds_ends_with_the_third():
    """Answers in between do not make up for that many."""
    waited, *_, backend = play(lambda number: number % 3 != 1, 60)
    assert waited == [1, 4, 10]
    assert backend.set_aside() == {"w1"}


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.setattr(site_module, "Worker", Here)
    place = make_place(tmp_path)
    made = open_sites(place, tmp_path)
    yield made
    for site in made.values():
        site.close()


def test_a_run_says_who_is_set_aside_and_a_resumed_one_asks_again(sites, tmp_path):
    """Twelve rounds of FedDPO. Once a client's site is set aside, the client is in no cohort. Resumed for two
    rounds more it is asked, and answers."""
    asked = experiment(tmp_path, "feddpo", 12, local_steps=1)
    asked = type(asked).from_tables({**asked.tables(), "evaluate": {"every": 0}}, "the test")
    terms = Terms("wards", SITES, visit=5.0)
    silent = Slow(sites, lambda number: False)
    out = tmp_path / "run"
    federate(asked, out, silent, terms)
    rounds = RunReader(out).rounds()
    got = [record.get("silent_sites", {}).get("site-w1", {}) for record in rounds]
    assert silent.waited == [1, 3, 7]
    assert [each.get("silences") for each in got] == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert [each["asked_again"] for each in got] == [3, 3, 7, 7, 7, 7, *[None] * 6]
    assert {each["why"] for each in got} == {"no answer within 5 seconds"}
    assert ["w1" in record["cohort"] for record in rounds] == [True] * 7 + [False] * 5
    assert [len(record["dropped"]) for record in rounds] == [1] * 7 + [0] * 5
    assert "site-w1' is away: no answer within 5 seconds" in (out / "run.log").read_text()
    longer = type(asked).from_tables({**asked.tables(), "rounds": 14}, "the test")
    federate(longer, out, Slow(sites, lambda number: True), terms, resume=True)
    last = RunReader(out).rounds()[-2:]
    assert [sorted(record["cohort"]) for record in last] == [[*CLIENTS]] * 2
    assert [record["dropped"] for record in last] == [[], []]
    assert not any("silent_sites" in record for record in last)
