"""A site that sends what it should not, at a hub whose clients are the toy's: no model, no NVIDIA FLARE."""

from dataclasses import replace

import pytest

import toy
from federating import Within
from prefed.core import Callback
from prefed.core.wire import encode
from prefed.engines import InProcess
from prefed.engines.config import CohortConfig
from prefed.engines.tasks import MemoryStates, Task, run_task
from prefed.engines.validation import longest_answer
from prefed.networks.federation.hub import FederationBackend, Sites
from prefed.networks.federation.transport import TooLongError
from prefed.networks.federation.unix_socket import HEADER, pack, unpack
from prefed.store import RunReader

BAD = "Client 2/ü"


class ToySite:
    """One client of the toy, whose owner may change each answer: a function of the round and the answer."""

    def __init__(self, job, forge):
        self.job, self.forge, self.kept = job, forge, {}

    def answer(self, request):
        header, body = unpack(request)
        fields = {name: header[name] for name in ("kind", "client", "round", "exchange", "asked")}
        kept, client = self.kept.get(header["receipt"]), header["client"]
        states = MemoryStates({} if kept is None else {client: kept})
        result = run_task(self.job, Task(message=body, **fields), states)
        receipt = header["receipt"]
        if client in states.staged:
            receipt = f"{header['round']:06d}-{len(self.kept):032x}"
            self.kept[receipt] = states.staged[client]
        got = {"withheld": result.withheld, "asked": result.asked}
        answer = pack(result.message, client=result.client, receipt=receipt, **got)
        return self.forge(header["round"], answer) if header["exchange"] == "train" else answer


def over_sites(forge, before=lambda site, request: None):
    """What makes the backend of a run whose clients have a site each, and one of them a forger's."""

    def make(job, states):
        forges = {
            client: forge if client == BAD else (lambda number, answer: answer) for client in job.members
        }
        transport = Within({client: ToySite(job, forges[client]) for client in job.members}, before)
        sites = Sites(transport, "wards", "0" * 16, 1.0)
        sites.most = lambda client, exchange, number: longest_answer(job, client, exchange, number)
        return FederationBackend(sites, states, {c: c for c in job.members}, 1.0, lambda text: None)

    return make


class Silent(InProcess):
    """One client does not answer its visits after round 1."""

    def run(self, tasks):
        return super().run(t for t in tasks if t.client != BAD or t.round == 1 or t.exchange != "train")


def job(rounds=7, offences=4):
    made = toy.build(toy.text(cohort=None, rounds=rounds, every=0))
    return replace(made, cohort=CohortConfig(offences=offences))


def test_what_a_site_must_not_send_is_dropped_and_its_client_set_aside(tmp_path):
    """Its upload of round 1 again, bytes that are no message, more than an upload may have, and much more.
    After the fourth it is asked no more. The model is that of the run in which this client says nothing from
    round 2 on, bit for bit."""
    first = []

    def forge(number, answer):
        first.extend([answer] if number == 1 else [])
        forged = {2: first[0], 3: b"\xff" * 40, 4: answer + bytes(5000), 5: bytes(2 * HEADER)}
        return forged.get(number, answer) if first else answer

    server = toy.run_job(tmp_path / "run", job(), over_sites(forge), Callback())
    rounds = RunReader(tmp_path / "run").rounds()
    drops = {record["round"]: drop["reason"] for record in rounds for drop in record["dropped"]}
    assert {drop["client"] for record in rounds for drop in record["dropped"]} == {BAD}
    assert drops[2] == "is of round 1, not round 2"
    assert drops[3] == "its site reports: its answer is not a message"
    assert "bytes; expected at most" in drops[4]
    assert drops[5].startswith(f"its site reports: its answer has {2 * HEADER:,} bytes, at most ")
    assert set(drops) == {2, 3, 4, 5}
    assert [record["set_aside"] for record in rounds] == [[]] * 4 + [[BAD]] * 3
    silent = toy.run_job(tmp_path / "silent", job(offences=None), Silent, Callback())
    assert server.tensors["model"].equal(silent.tensors["model"])


def test_a_site_that_cannot_take_a_message_in_misses_the_visit(tmp_path):
    """A site that sends nothing commits no offence."""

    def before(site, request):
        if site == BAD and unpack(request)[0]["exchange"] == "train":
            raise TooLongError("a message of 9 bytes is longer than [limits] message_mb allows")

    toy.run_job(tmp_path / "run", job(2, 1), over_sites(lambda number, answer: answer, before), Callback())
    rounds = RunReader(tmp_path / "run").rounds()
    assert [len(record["dropped"]) for record in rounds] == [1, 1]
    assert "[limits] message_mb" in rounds[0]["dropped"][0]["reason"]
    assert [record["offences"] for record in rounds] == [{}, {}]


@pytest.mark.parametrize("exchange", ["train", "score", ""])
def test_the_longest_answer_is_just_long_enough(exchange):
    """What honest clients answer fits; the upload of an exchange with tensors has few bytes to spare."""
    whole = job()
    server = whole.method.init_server(whole.trainers.initial)
    download = (
        encode(whole.exchange(exchange).send(server, BAD, whole.round(2)))
        if exchange
        else encode(whole.method.publish(server, BAD))
    )
    task = Task("visit" if exchange else "evaluate", BAD, 2, exchange, download)
    length = len(run_task(whole, task, MemoryStates()).message)
    most = longest_answer(whole, BAD, exchange, 2)
    assert length <= most <= length + 4096


def test_a_header_beyond_all_bounds_is_not_read():
    """The payload is not JSON, so parsing it would raise an error."""
    for size, reason in ((HEADER, "cannot be read as JSON"), (HEADER + 1, f"{HEADER + 9:,} bytes of header")):
        with pytest.raises(ValueError, match=reason):
            unpack(size.to_bytes(8, "little") + bytes(size))
