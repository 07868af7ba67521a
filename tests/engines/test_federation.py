"""Whole federations: a site with one worker and a site with two, compared with the same run in one
process."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest

import toy
from federating import Here, Within, closed, experiment, site_config
from prefed import Experiment, run
from prefed.config import ConfigError
from prefed.core.wire import decode_state, decode_upload, encode
from prefed.engines.backends.processes import Worker
from prefed.networks.federation import site as site_module
from prefed.networks.federation.experiment import own_dataset, own_experiment
from prefed.networks.federation.federate import Terms, experiment_for_sites, federate
from prefed.networks.federation.messages import VERSION
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import FederationError, UnreachableError
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.runs.finished_run import RunError
from prefed.runs.loaded_run import load_run
from prefed.store import RunReader
from toy import Warned, outcome
from workers import place as place

TERMS = Terms("wards", ("one", "two"), wait=0.0)


@pytest.fixture(scope="module")
def sites(place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    made = {
        name: Site(site_config(place, folder, data, name=name, limits={"rounds": 5}))
        for name, data in (("one", "w0"), ("two", "w1w2"))
    }
    yield made
    closed(made)


@pytest.fixture
def no_processes(monkeypatch):
    """Sites train in this process; the first test has processes."""
    monkeypatch.setattr(site_module, "Worker", Here)


def without_places(out):
    """What a run leaves, apart from what only one machine has: tokens, private states, who is where."""
    left = {name: content for name, content in outcome(out).items() if not name.startswith(("cache/", "fed"))}
    left = {name: content for name, content in left.items() if not name.startswith("checkpoint/clients/")}
    for name in ("checkpoint/COMMIT.json", "summary.json"):
        left[name].pop("sites", None)
        left[name].pop("data", None)
        left[name].get("fingerprint", {}).pop("data", None)
        left[name].get("digests", {}).pop("clients", None)
        left[name].pop("peak_memory_mb", None)
    return left


@pytest.mark.usefixtures("forked_workers")
def test_a_federation_is_the_run_in_one_process(place, sites, tmp_path, monkeypatch):
    """FedPDPO, whose clients have personal parts. Bit for bit, although the hub dies in round 2 after two of
    three answers and continues, and a process that trains is killed in round 3, during a visit. Then
    what the sites keep of the run: their logs, and what they refuse.
    """
    asked = experiment(place)
    run(asked, tmp_path / "alone")
    transport = Within(sites)
    with pytest.raises(KeyboardInterrupt):
        federate(asked, tmp_path / "over", transport, TERMS, callbacks=[toy.InterruptAt(3 + 3 + 2)])
    assert len((tmp_path / "over" / "rounds.jsonl").read_text().splitlines()) == 1
    with pytest.raises(RunError, match=r"after round 1; resume it: prefed federate .* --hub HUB"):
        load_run(tmp_path / "over")
    killed = []
    give = Worker.give

    def kills(worker, task, state, timeout):
        give(worker, task, state, timeout)
        if task.round == 3 and not killed:
            killed.append(task.client)
            os.kill(worker._process.pid, signal.SIGKILL)

    monkeypatch.setattr(Worker, "give", kills)
    summary = federate(asked, tmp_path / "over", transport, TERMS, resume=True)
    assert killed
    assert without_places(tmp_path / "over") == without_places(tmp_path / "alone")
    assert summary["sites"] == {"one": ["w0"], "two": ["w1", "w2"]}
    assert summary["origin"]["hardware"]["cores"] >= 1
    assert "data" not in summary
    check_run_log(tmp_path / "over")
    # A private state is where its client is, as the run in one process has it, and nowhere else.
    for client, site in (("w0", "one"), ("w1", "two"), ("w2", "two")):
        alone = (tmp_path / "alone/checkpoint/clients" / f"{client}@000003.safetensors").read_bytes()
        here = decode_state(
            (tmp_path / "over/checkpoint/clients" / f"{client}@000003.safetensors").read_bytes()
        )
        assert not here.tensors
        (kept,) = (sites[site]._state / "runs").rglob(f"{client}@{here.values['receipt']}.safetensors")
        assert kept.read_bytes() == alone
    check_log(sites)
    check_replay(sites)
    check_other_data(place, sites, tmp_path)
    with pytest.raises(RunError, match="the private state of client 'w1' is stored at site 'two'"):
        load_run(tmp_path / "over").model("w1")


def check_run_log(out):
    """Both sittings, with the first one's end: one round was whole."""
    lines = [line.partition(" ")[2] for line in (out / "run.log").read_text().splitlines()]
    got = [
        line.partition("  ")[0] for line in lines if not line.startswith(("prefed ", "Python ", "warning"))
    ]
    assert got == [
        *("3 rounds", "round 1/3", "interrupted after round 1/3"),
        *("continues after round 1/3", "round 2/3", "round 3/3", "done"),
    ]


def check_log(sites):
    """Each message that the hub counted, by its bytes. Two visits were repeated."""
    entries = [entry for site in sites.values() for entry in site.log.entries()]
    visits = [entry for entry in entries if entry["what"] == "train"]
    assert {(entry["client"], entry["round"]) for entry in visits} == {
        (client, number) for client in ("w0", "w1", "w2") for number in (1, 2, 3)
    }
    assert all(entry["weight"] == 8 and entry["tensors"] == {"model": 2048} for entry in visits)
    assert {entry["what"] for entry in entries} == {"join", "train", "evaluation", "restart", "published"}


def check_replay(sites):
    """Round 3 is answered: a request of round 1 of that run is an old one."""
    site = sites["one"]
    (order,) = (site._state / "runs").rglob("order.json")
    known = json.loads(order.read_bytes())
    fields = {"prefed": VERSION, "format": 1, "federation": "wards", "run": order.parent.name}
    fields |= {"order": known["order"]}
    task = {"kind": "visit", "round": 1, "exchange": "train", "client": "w0", "asked": 0, "receipt": None}
    header, _ = unpack(site.answer(pack(b"", **fields, **task)))
    assert "round 1 is over" in header["refused"]


def check_other_data(place, sites, tmp_path):
    """The site's file names worker 1's pairs, and the run began with worker 0's."""
    site = sites["one"]
    (order,) = (site._state / "runs").rglob("order.json")
    fields = {"prefed": VERSION, "format": 1, "federation": "wards", "run": order.parent.name}
    fields |= {"kind": "join"}
    other = Site(site_config(place, tmp_path, "w1", name="one"))
    shutil.copytree(site._state / "runs", other._state / "runs")
    header, _ = unpack(
        other.answer(pack(b"", **fields, experiment=json.loads(order.read_bytes())["experiment"]))
    )
    other.close()
    assert "data changed since the run started" in header["refused"]


def test_runs_over_the_same_pairs_share_their_tokens(place, tmp_path):
    """Tokens are kept once for all runs that read the same pairs in the same way. What makes other tokens,
    such as another length or another file, has a folder of its own."""
    shutil.copy(place / "w0.jsonl", tmp_path / "w0.jsonl")
    config = site_config(place, tmp_path, "w0")
    config.data["train"] = str(tmp_path / "w0.jsonl")

    def folders(length, **changes):
        asked = experiment(place, **changes)
        asked = asked.model_copy(update={"data": asked.data.model_copy(update={"max_length": length})})
        own_dataset(own_experiment(experiment_for_sites(asked), config), tmp_path / "cache")
        return len(list((tmp_path / "cache").rglob("clients.json")))

    assert folders(64) == 1
    assert folders(80) == 2
    assert folders(80, rounds=9, method="feddpo") == 2
    assert folders(64, rounds=9) == 2
    lines = (tmp_path / "w0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "w0.jsonl").write_text("".join(lines[1:]))
    assert folders(80) == 3
    assert folders(64) == 4


def test_a_site_that_refuses_says_why(place, sites, tmp_path):
    with pytest.raises(FederationError, match=r"'(one|two)' refuses: \[limits\] rounds: 6 requested"):
        federate(experiment(place, rounds=6), tmp_path / "over", Within(sites), TERMS)
    assert not (tmp_path / "over").exists()


def test_too_few_sites_are_named(place, sites, tmp_path):
    with pytest.raises(FederationError, match="1 of 2 sites connected within 0 seconds; missing: two"):
        federate(experiment(place), tmp_path / "over", Within({"one": sites["one"]}), TERMS)


def test_two_sites_with_a_client_of_one_name(place, sites, tmp_path):
    class Twice(Within):
        def call(self, site, request, timeout, most):
            return pack(clients={"w0": [8, 0, 2]}, versions={})

    with pytest.raises(FederationError, match="both have a client 'w0'"):
        federate(experiment(place), tmp_path / "over", Twice(sites), TERMS)


def run_of(out):
    return json.loads((out / "federation.json").read_text())["run"]


@pytest.mark.usefixtures("no_processes")
def test_what_sites_were_asked_for_is_the_runs_from_its_first_visit_on(place, sites, tmp_path):
    """The hub dies after one answer of round 1. With other settings nothing continues there. With its own the
    run continues under its name, whoever is named now: its clients are those of the sites it began with."""
    out, asked, heard = tmp_path / "over", experiment(place, rounds=1), Warned()
    with pytest.raises(KeyboardInterrupt):
        federate(asked, out, Within(sites), TERMS, callbacks=[toy.InterruptAt(1)])
    name = run_of(out)
    other = experiment(place, rounds=1, local_steps=3)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"(?s)other settings .*method.local_steps: 2 → 3.* --out"):
            federate(other, out, Within(sites), TERMS, resume=resume)
    fewer = Terms("wards", ("two",), wait=0.0)
    summary = federate(asked, out, Within(sites), fewer, resume=True, callbacks=[heard])
    assert run_of(out) == name
    assert summary["sites"] == {"one": ["w0"], "two": ["w1", "w2"]}
    line, *_ = heard.texts
    assert line.startswith(
        "the run continues with the sites it started with (one, two): to change them, start a new run"
    )


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("steps", [2, 3])
def test_a_start_that_failed_binds_nobody(place, sites, tmp_path, steps):
    """One site of two is lost when it is to build its job, so nobody was asked for a visit: the same
    experiment, or another, begins over other sites in the same directory. It existed, so it is kept."""
    out = tmp_path / "over"
    out.mkdir()

    def lost(site, request):
        if (site, unpack(request)[0]["kind"]) == ("one", "start"):
            raise UnreachableError("it is switched off")

    with pytest.raises(FederationError, match="site 'one' is away"):
        federate(experiment(place, rounds=1), out, Within(sites, lost), TERMS)
    assert (out / "checkpoint/COMMIT.json").exists()
    other = experiment(place, rounds=1, local_steps=steps)
    summary = federate(other, out, Within(sites), Terms("wards", ("two",), wait=0.0))
    assert summary["sites"] == {"two": ["w1", "w2"]}


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("request_", "clients"), [("join", ["w1", "w2"]), ("start", ["w0", "w1", "w2"])])
def test_the_rest_start_without_a_site_that_does_not_answer(place, sites, tmp_path, request_, clients):
    """With `--at-least 1`. A site that says which clients it has, and then nothing, is silent in round 1."""

    def lost(site, request):
        if (site, unpack(request)[0]["kind"]) == ("one", request_):
            raise UnreachableError("it has not joined the session")

    out, transport, heard = tmp_path / "over", Within(sites, lost), Warned()
    terms = Terms("wards", tuple(sites), wait=0.0, at_least=1)
    summary = federate(experiment(place, rounds=1), out, transport, terms, callbacks=[heard])
    assert transport.members == {*sites}
    assert sorted(client for own in summary["sites"].values() for client in own) == clients
    assert "site 'one' is away: it has not joined the session; " in heard.texts[0]
    (record,) = RunReader(out).rounds()
    assert [*record.get("silent_sites", {})] == (["one"] if request_ == "start" else [])


@pytest.mark.usefixtures("no_processes")
def test_ranks_of_clients_that_no_site_has_are_named(place, sites, tmp_path):
    """The site of w3 may be away, or its client have a pseudonym, so the hub warns and continues."""

    def lost(site, request):
        if unpack(request)[0]["kind"] == "start":
            raise UnreachableError("it is switched off")

    ranks = {"ranks": {"w0": 1, "w3": 1}}
    asked, heard = Experiment.model_validate(experiment(place).tables() | {"merge": ranks}), Warned()
    with pytest.raises(FederationError, match="is away"):
        federate(asked, tmp_path / "over", Within(sites, lost), TERMS, callbacks=[heard])
    assert heard.texts[0] == "[merge] ranks: no site has a client called 'w3'"


class Claiming(Within):
    """The site of w0 claims ten million pairs for it, and as much weight for its uploads."""

    def call(self, site, request, timeout, most):
        answer, kind = super().call(site, request, timeout, most), unpack(request)[0].get("kind")
        if site == "one" and kind in ("join", "visit"):
            header, body = unpack(answer)
            if kind == "join":
                return pack(**{**header, "clients": {"w0": [10_000_000, 0, 2]}})
            return pack(encode(replace(decode_upload(body), weight=1e7)), **header)
        return answer


@pytest.mark.usefixtures("no_processes")
def test_a_false_claim_of_pairs_counts_only_where_pairs_weigh(place, sites, tmp_path):
    """With uniform weights the model is the same bit for bit; by pairs, the control, it is another one."""

    def model(weights, transport):
        asked = experiment(place, "feddpo", rounds=1).tables() | {"merge": {"weights": weights}}
        out = tmp_path / f"{weights}-{type(transport).__name__}"
        federate(Experiment.model_validate(asked), out, transport, TERMS)
        assert RunReader(out).rounds()[0]["dropped"] == []
        (server,) = (out / "checkpoint").glob("server@*")
        return server.read_bytes()

    assert model("uniform", Claiming(sites)) == model("uniform", Within(sites))
    assert model("samples", Claiming(sites)) != model("samples", Within(sites))
