"""Clients that vote at their sites on what the hub's policy says, compared with the run in one process."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from alignments import Killed, content, rows
from federating import Here, Within, closed, experiment, site_config
from liking import LikingJudge, install
from prefed import run
from prefed.align import AlignError
from prefed.config import ConfigError
from prefed.config.align import align_settings
from prefed.core import Key, Privacy, files
from prefed.data import Message, Record, synthetic
from prefed.data.synthetic import utility
from prefed.engines.tasks import MemoryStates
from prefed.networks.federation import site as site_module
from prefed.networks.federation.approvals_withdrawals import withdraw
from prefed.networks.federation.audit_log import line_of
from prefed.networks.federation.config import SiteJudge
from prefed.networks.federation.federate import Terms, federate
from prefed.networks.federation.final_models import export_client
from prefed.networks.federation.forget import plan
from prefed.networks.federation.hub import FederationBackend, Sites
from prefed.networks.federation.judging import SiteJudges, read_pairs, write_pairs
from prefed.networks.federation.messages import FORMAT, VERSION, order_digest
from prefed.networks.federation.site import Site
from prefed.networks.federation.site_clients import SiteClients, site_clients
from prefed.networks.federation.transport import FederationError
from prefed.networks.federation.unix_socket import HEADER, pack, unpack
from prefed.runs.align import align
from prefed.runs.export import write_model
from prefed.store import RunReader
from preferences import jsonl
from toy import Warned
from workers import make_place

TERMS = Terms("wards", ("one", "two"), wait=0.0)
DATA = {"one": "w0", "two": "w1w2"}
SIGNS = {"w0": 1, "w1": -1, "w2": 1}
LIMIT = 4000


class Liking(LikingJudge):
    """``w2`` likes length, and the others disagree."""

    def liking(self, text):
        return len(text) if self.client == "w2" else SIGNS[self.client] * (sum(text.encode()) % 3)


@pytest.fixture(scope="module", autouse=True)
def here():
    """Sites work in this process, and have the judge."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_module, "Worker", Here)
        install(patch, Liking)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = make_place(tmp_path_factory.mktemp("place"))
    jsonl(folder / "prompts.jsonl", [{"prompt": f"Prompt {number}?"} for number in range(8)])
    return folder


def opened(place, folder, **changes):
    changes = {"limits": {"judgements": LIMIT}, "judge": {"name": "liking"}, **changes}
    return {n: Site(site_config(place, folder, data, name=n, **changes)) for n, data in DATA.items()}


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    """A run of FedBis in one process and over two sites, which are closed again; and the first aligned."""
    folder = tmp_path_factory.mktemp("finished")
    asked = experiment(place, "fedbis", rounds=1)
    run(asked, folder / "alone")
    sites = opened(place, folder)
    federate(asked, folder / "over", Within(sites), TERMS)
    closed(sites)
    align(folder / "alone", settings(place, client_judge="liking"))
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    """The federation's run and its sites' states."""
    for name in ("over", "site-w0", "site-w1w2"):
        shutil.copytree(finished / name, tmp_path / name)
    return tmp_path


def settings(place, **changes):
    keys = {"completions": 3, "max_new_tokens": 6, "temperature": 1.0, "generate": 5, "batch_size": 4}
    keys |= {"pairs": "all", "lr": 0.01, "epochs": 1, "held_out": 0.25, "generations": 2}
    table = {"prompts": str(place / "prompts.jsonl"), "labels": "clients", "client_judge": "site", **keys}
    return align_settings(table | changes, [], place)


def vote(path, sites, config, terms=TERMS, warn=lambda text: None, **options):
    """Align over sites in this process."""
    transport = sites if isinstance(sites, Within) else Within(sites)
    with site_clients(path, config, transport, terms, warn) as clients:
        return align(path, config, clients=clients, **options)


def results(path):
    """What clients' votes lead to: scores, labels, every checkpoint and the adapter."""
    kept, private = (
        ("scores.jsonl", "labels.jsonl", "completions.jsonl", ".safetensors"),
        "checkpoint/clients",
    )
    found = content(path / "align").items()
    # Digests, as the difference of two long files takes minutes.
    return {name: files.digest(data) for name, data in found if name.endswith(kept) and private not in name}


def test_sites_vote_as_in_one_process(place, finished, copy):
    """Bit for bit. The hub keeps votes and no site's texts; a site keeps votes, and no text of the hub's."""
    sites, notes = opened(place, copy), Warned()
    vote(copy / "over", sites, settings(place), callbacks=[notes])
    assert results(copy / "over") == results(finished / "alone")
    assert "prompts and completions are sent to the sites, whose clients judge them" in notes.notes
    scores = [row["scores"] for row in rows(copy / "over/align", "generations/1/scores.jsonl")]
    assert {tuple(np.shape(row)) for row in scores} == {(3,)}
    assert {vote for row in scores for vote in row} == {-1.0, 0.0, 1.0}
    for site, clients in (("one", ["w0"]), ("two", ["w1", "w2"])):
        entries = [entry for entry in sites[site].log.entries() if entry["what"] == "judge"]
        for number, client in enumerate(clients):
            own = [entry["votes"] for entry in entries if entry["client"] == client]
            column = [row[number + (site == "two")] for row in scores]
            assert own[0] == column
        made = [path for path in sites[site]._state.rglob("*") if path.is_file()]
        assert not any(b"Prompt 1?" in path.read_bytes() for path in made)
        votes = sites[site]._state / "runs" / sites[site]._run / "votes"
        assert {path.stat().st_mode & 0o777 for path in made if path.is_relative_to(votes)} <= {0o600}
    closed(sites)


class Dying(Within):
    """Ends the hub before or after a request of a kind."""

    def __init__(self, sites, when, kind="judge"):
        super().__init__(sites)
        self.when, self.kind, self.asked, self.turn = when, kind, 0, Lock()

    def call(self, site, request, timeout, most):
        with self.turn:
            self.asked += unpack(request)[0]["kind"] == self.kind
            if self.asked >= self.when > 0:
                raise Killed
            answer = super().call(site, request, timeout, most)
            if self.asked >= -self.when > 0:
                self.when = -self.when
                raise Killed
            return answer


def test_killed_anywhere_sites_vote_the_same(place, finished, copy):
    """The hub and the sites die at a request, before or after it is answered, and start again: at each of the
    first batch, and at the first of each later batch."""
    killed = 0
    for when in (1, -1, 2, -2, 3, -3, *[4, -4] * 4):
        sites = opened(place, copy)
        transport = Dying(sites, when)
        try:
            vote(copy / "over", transport, settings(place))
            break
        except Killed:
            killed += 1
        finally:
            with transport.turn:
                closed(sites)
    assert 8 < killed < 14
    assert results(copy / "over") == results(finished / "alone")


PAIRS = [{"prompt": "Why?", "first": " ab", "second": " abc", "extra": {}}] * 3


@pytest.fixture
def asks(place, copy):
    """Ask a site of the finished run to let a client judge, as a hub may."""
    got, opened_sites = list[str](), []

    def make(**changes):
        config = site_config(place, copy, "w1w2", name="two", **{"judge": {"name": "liking"}, **changes})
        site = Site(config, got.append)
        opened_sites.append(site)
        known = json.loads((copy / "over/federation.json").read_bytes())
        order = json.loads((copy / f"site-w1w2/runs/{known['run']}/order.json").read_bytes())

        def ask(pairs=PAIRS, client="w2", **header):
            body = pairs if isinstance(pairs, bytes) else json.dumps(pairs).encode()
            task = {"kind": "judge", "client": client, "round": 1, "exchange": "", "asked": 0}
            about = {"run": known["run"], "federation": "wards", "prefed": VERSION, "format": FORMAT}
            request = {**about, **task, "order": order["order"], "receipt": None, **header}
            return unpack(site.answer(pack(body, **request)))

        ask.site, ask.got = site, got
        return ask

    yield make
    closed({str(n): site for n, site in enumerate(opened_sites)})


def test_a_hub_gets_no_vote_that_a_site_does_not_allow(asks, monkeypatch):
    """By default none, and then so many pairs of each client in a run. What is asked again counts once, and
    the answer is the first one's, whatever the judge says now."""
    ask = asks()
    header, votes = ask()
    assert header == {"refused": "[limits] judgements = 0: clients of this site judge no completions"}
    assert votes == b""
    ask.site.close()
    ask = asks(limits={"judgements": 7})
    first = ask()
    assert first == ({}, np.array([-1, -1, -1], np.int8).tobytes())
    monkeypatch.setattr(Liking, "liking", lambda self, text: 0)
    assert [ask(), ask(client="w1")[1]] == [first, bytes(3)]
    assert ask([*PAIRS, PAIRS[0]])[1] == bytes(4)
    refused = ask(PAIRS[:1])[0]["refused"]
    assert "[limits] judgements: 8 pairs of the client requested in this run, at most 7 allowed" in refused
    assert ask(PAIRS[:1], client="w1")[1] == bytes(1)
    judged = [entry for entry in ask.site.log.entries() if entry["what"] == "judge"]
    assert [entry.get("votes") for entry in judged if entry["client"] == "w2"] == [[-1] * 3] * 2 + [[0] * 4]
    assert line_of(judged[0]).endswith("judge  w2  3 B: 3 votes")
    ask.site.close()
    changed = asks(limits={"judgements": 7}, judge={"name": "liking", "judge_tokens": 5})
    assert changed()[0]["refused"].startswith("[judge] of this site changed since the run's first votes")


@pytest.mark.parametrize(
    ("pairs", "header", "reason"),
    [
        (PAIRS, {"client": "w0"}, "the client is not at this site"),
        (PAIRS, {"client": "../w2"}, "the client is not at this site"),
        (PAIRS, {"round": 0}, "round 0 is over"),
        (PAIRS, {"exchange": "train"}, "only a visit names an exchange"),
        ([], {}, "at least 1 item"),
        (b"\xff\xfe", {}, "invalid pairs of completions"),
        (b"[" * 10_000, {}, "invalid pairs of completions"),
        (b'[{"prompt":"\\ud800","first":"a","second":"b","extra":{}}]', {}, "invalid pairs of completions"),
        ([{**PAIRS[0], "path": "/etc/passwd"}], {}, "0.path: Extra inputs are not permitted"),
        ([{**PAIRS[0], "first": "a" * 100_001}], {}, "0.first: String should have at most 100000 characters"),
        ([{**PAIRS[0], "first": " abc"}], {}, "completions 1: chosen and rejected are the same"),
        ([{**PAIRS[0], "first": None}], {}, "0.first: Input should be a valid string"),
        ([{**PAIRS[0], "extra": {str(k): k for k in range(65)}}], {}, "0.extra: Dictionary should have"),
        (b'[{"prompt":"a","first":"a","second":"b","extra":{"x":NaN}}]', {}, "invalid pairs of completions"),
        ([{**PAIRS[0], "prompt": [{"role": "root", "content": ""}]}], {}, "invalid pairs of completions"),
    ],
)
def test_what_is_no_pair_of_texts_is_refused(asks, monkeypatch, pairs, header, reason):
    """Before a process is started; the log has it."""
    monkeypatch.setattr(site_module, "Worker", None)
    ask = asks(limits={"judgements": 100})
    answer, votes = ask(pairs, **header)
    assert reason in answer["refused"], answer
    assert votes == b""
    assert reason[:20] in [*ask.site.log.entries()][-1]["refused"]


def test_a_hubs_text_reaches_neither_disk_nor_terminal(asks, copy):
    """Completions may have control characters, which a judge reads like any others."""
    ask = asks(limits={"judgements": 100})
    evil = {
        "prompt": "\x1b[2Jzzqq",
        "first": " ../../zzqq\x00\x07",
        "second": " zz\u202eqq",
        "extra": {"zzqq": "\x1b"},
    }
    assert len(ask([evil])[1]) == 1
    assert "zzqq" in ask([{**evil, "zzqq\x1b": 1}])[0]["refused"]
    assert not any("\x1b" in line for line in ask.got)
    kept = [path for path in (copy / "site-w1w2").rglob("*") if path.is_file() and "log" not in path.parts]
    assert not any(b"zzqq" in path.read_bytes() for path in kept)
    ask.site.close()


def test_a_run_with_noise_has_no_votes(place, finished, copy, asks):
    """Neither the hub asks, nor would a site answer: epsilon does not count votes."""
    path = copy / "over/config.toml"
    path.write_text(noised(path.read_text()))
    with (
        pytest.raises(ConfigError, match="sites add noise only to sums of votes"),
        site_clients(copy / "over", settings(place), Within({}), TERMS, print),
    ):
        pass
    (order,) = (copy / "site-w1w2/runs").glob("*/order.json")
    known = files.loads_with_digest(order.read_bytes())
    asked = noised(known["experiment"])
    digest = order_digest(asked, known["members"], known["unseen"])
    order.write_bytes(files.dumps_with_digest({**known, "experiment": asked, "order": digest}))
    refused = asks(limits={"judgements": 9})()[0]["refused"]
    assert refused == "[privacy]: votes have no noise, and this run promises noise"


def noised(text):
    tables = tomllib.loads(text)
    tables["privacy"] = {"kind": "local", "clip": 0.1, "noise_multiplier": 2.0, "delta": 1e-5}
    return tomli_w.dumps({**tables, "merge": {"weights": "uniform"}})


def answering(message, **header):
    """A site that gives this answer to each request."""
    return SimpleNamespace(answer=lambda request: pack(message, **header))


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (answering(b"\x01"), "no valid votes: 1 votes on 2 pairs"),
        (answering(bytes(3)), "no valid votes: 3 votes on 2 pairs"),
        (answering(b"\x01\x02"), "no valid votes: a vote is not 1, 0 or -1"),
        (answering(b"\x01\x80"), "no valid votes: a vote is not 1, 0 or -1"),
        (answering(np.array([np.nan], np.float16).tobytes()), "no valid votes: a vote is not 1, 0 or -1"),
        (answering(bytes(HEADER)), "no votes: its site reports: its answer has 16,777,2"),
        (answering(bytes(2), refused="[limits] judgements\x1b[2J"), r"no votes: .*judgements\\x1b\[2J"),
        (answering(bytes(2), withheld=7), "no votes: .*its answer is invalid"),
        (SimpleNamespace(answer=lambda request: b"no message"), "no votes: .*its answer is not a message"),
    ],
)
def test_what_is_no_vote_ends_the_alignment_by_name(site, reason):
    """A site votes for the clients that it is asked about: its answer has no names. The other site's votes
    are no vote of it, and nobody's are left out in silence."""
    voters = voting({"one": answering(b"\xff\x01"), "two": site})
    with pytest.raises(AlignError, match=f"site 'two', client 'w1': {reason}"):
        voters.scores(RECORDS)


RECORDS = [Record("Why?", " a", " b"), Record("How?", " a", " b")]


def voting(sites):
    homes, said = {"w0": "one", "w1": "two"}, list[str]()
    asked = Sites(Within(sites), "wards", "0" * 16, 1.0)
    asked.most = lambda *_: 0
    backend, terms = FederationBackend(asked, MemoryStates(), homes, 1.0, said.append), TERMS
    config = SimpleNamespace(refresh=SimpleNamespace(pairs=2))
    about = Path(), config, {}, homes, 1, Privacy(), len(homes)
    return SiteClients(*about, backend, Within(sites), terms, said.append)


def test_votes_are_in_the_order_of_clients_and_a_site_that_is_away_is_named():
    voters = voting({"one": answering(b"\xff\x01"), "two": answering(b"\x00\x01")})
    assert voters.scores(RECORDS)[1].tolist() == [[-1, 1], [0, 1]]
    assert voters.scores([])[1].shape == (2, 0)
    with pytest.raises(AlignError, match=r"^'two' did not vote: continue with prefed align --resume"):
        voting({"one": answering(b"\xff\x01")}).scores(RECORDS)


def test_who_votes_is_chosen_and_named(place, finished, copy):
    """Without site two only w0 votes. A site that refuses stops the alignment, which others then continue.
    Other voters are another labeller."""
    sites = opened(place, copy, limits={})
    with pytest.raises(AlignError, match=r"site '(one|two)', client .*: no votes: .*\[limits\] judgements"):
        vote(copy / "over", sites, settings(place))
    closed(sites)
    sites = opened(place, copy)
    only = replace(TERMS, sites=("one",))
    vote(copy / "over", sites, settings(place), only)
    scores = rows(copy / "over/align", "generations/1/scores.jsonl")
    assert {len(row["scores"]) for row in scores} == {1}
    with pytest.raises(AlignError, match=r"selectors changed\n.*--stage labels-1"):
        vote(copy / "over", sites, settings(place))
    closed(sites)
    with pytest.raises(ConfigError, match="no site 'tow': the run's are one, two"):
        vote(copy / "over", {}, settings(place), replace(TERMS, sites=("tow",)))
    with pytest.raises(AlignError, match="its clients judge at their sites: name the hub with --hub"):
        align(copy / "over", settings(place), stage="labels-1")
    with pytest.raises(AlignError, match="client_judge = 'site': this run has no sites"):
        align(finished / "alone", settings(place), stage="labels-1")
    with pytest.raises(AlignError, match="not on this machine; sites judge with client_judge = 'site'"):
        align(copy / "over", settings(place, client_judge="liking"), stage="labels-1")
    due = {each.where: each.action for each in plan(copy / "over", ["w0"]).descendants}
    assert due["align"] == "deleted"


def test_a_site_without_pairs_of_the_run_is_sent_it_again(place, finished, copy):
    """Its state folder was not restored: it knows no run, and has no private states of FedBis to lack."""
    shutil.rmtree(copy / "site-w1w2")
    sites = opened(place, copy)
    vote(copy / "over", sites, settings(place))
    closed(sites)
    assert results(copy / "over") == results(finished / "alone")


class Tokens(list):
    record = list.__getitem__


def test_a_site_knows_its_clients_by_their_own_names(tmp_path):
    """Which the hub does not: the utility is that of the client behind the made-up name."""
    records = synthetic.generate(Key(5), clients=2, train=30, test=0)
    dataset = SimpleNamespace(tokens=Tokens(records), flipped=frozenset())
    judges = SiteJudges(SiteJudge(name="utility"), dataset, {"ada": "s-1", "ben": "s-2"}, tmp_path)
    tastes = synthetic.tastes(Key(5), 2)
    for reported, own in (("s-1", "ada"), ("s-2", "ben")):
        gaps = [utility(r.chosen, tastes[own]) - utility(r.rejected, tastes[own]) for r in records]
        votes = np.frombuffer(judges(reported, write_pairs(records))[0], np.int8)
        assert votes.tolist() == np.sign(np.round(gaps, 6)).tolist()
        assert {-1, 1} <= {*votes.tolist()}


def test_pairs_travel_unchanged():
    """Text of any script, turns of a conversation, and columns."""
    turns = (Message("system", "Be brief."), Message("user", "안녕?\n"))
    sent = [Record(turns, "é\x00", "\u202e", extra={"a": 1, "b": 0.1, "c": "x"}), *RECORDS]
    assert read_pairs(write_pairs(sent)) == sent


REFRESH = {"labels": "majority", "refresh": {"every": 1, "pairs": 6}, "generations": 2}


def loops(path):
    """What a loop with refreshes leads to: labels, checkpoints, the adapter and the states of refreshes."""
    commits = [RunReader(path / f"align/generations/{number}/refresh").commit for number in (1, 2)]
    return results(path), [(commit.round, commit.digests.server) for commit in commits]


def test_sites_refresh_as_in_one_process(place, finished, tmp_path_factory, copy):
    """Bit for bit, killed in a request to judge, in a round, and where a site joins a refresh. Verdicts and
    judged pairs stay at the site; the hub learns numbers of pairs."""
    alone = tmp_path_factory.mktemp("alone") / "run"
    shutil.copytree(finished / "alone", alone, ignore=shutil.ignore_patterns("align"))
    align(alone, settings(place, **{**REFRESH, "client_judge": "liking"}))
    kills, killed = [("judge", 2), ("join", 1), ("join", -2), ("visit", 2), ("visit", -1), ("judge", 99)], 0
    for kind, when in kills:
        sites = opened(place, copy)
        transport = Dying(sites, when, kind)
        try:
            vote(copy / "over", transport, settings(place, **REFRESH))
        except Killed:
            killed += 1
        finally:
            with transport.turn:
                closed(sites)
    assert killed == 5
    assert loops(copy / "over") == loops(alone)
    folder = copy / "over/align/generations"
    assert not [*folder.rglob("judged.jsonl"), *folder.rglob("pairs.jsonl"), *folder.rglob("held-out.jsonl")]


@pytest.mark.parametrize("method", ["fedvpa", "fedbiscuit", "fedbis"])
def test_private_states_and_groups_go_on(place, tmp_path, method):
    """FedVPA-GP's clients have private states, which a refresh continues at their sites; the hub has
    FedBiscuit's groups. A client that finds all completions alike sits it out, except of FedVPA-GP, whose
    priors are over all clients. With FedBis, under made-up names, which draw other numbers."""
    more = {"selectors": 2, "warmup_rounds": 1} if method == "fedbiscuit" else {}
    asked, named = experiment(place, method, rounds=2, **more), method != "fedbis"
    sites = opened(place, tmp_path, disclose={"names": named, "pairs": True})
    federate(asked, tmp_path / "over", Within(sites), TERMS)
    change = {**REFRESH, "generations": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIGNS, "w1", 0)
        if method == "fedvpa":
            with pytest.raises(AlignError, match=r"fedvpa: .* but 'w1' judged only ties"):
                vote(tmp_path / "over", sites, settings(place, **change))
            patch.setitem(SIGNS, "w1", -1)
            change["refresh"] = {**change["refresh"], "pairs": 7}
        vote(tmp_path / "over", sites, settings(place, **change))
        if named:
            run(asked, tmp_path / "alone")
            align(tmp_path / "alone", settings(place, **change, client_judge="liking"))
            assert results(tmp_path / "over") == results(tmp_path / "alone")
    refresh = tmp_path / "over/align/generations/1/refresh"
    clients = json.loads((refresh / "federation.json").read_bytes())["sites"]
    assert {site: len(own) for site, own in clients.items()} == {"one": 1, "two": 1 + (method == "fedvpa")}
    assert all((client in DATA[site]) == named for site, own in clients.items() for client in own)
    if method == "fedvpa":
        name = json.loads((refresh / "federation.json").read_bytes())["run"]
        (here,) = (tmp_path / "site-w0/runs" / name / "clients").glob("w0@000003-*")
        there = tmp_path / "alone/align/generations/1/refresh/checkpoint/clients/w0@000003.safetensors"
        assert here.read_bytes() == there.read_bytes()
    closed(sites)


@pytest.fixture
def joins(asks, copy):
    """Let a client judge for a refresh, and ask its site to join one."""

    def make(changes=lambda tables: None, count=True, **judged):
        ask = asks(limits={"judgements": 100})
        known = json.loads((copy / "over/federation.json").read_bytes())["run"]
        if count:
            assert ask(exchange="refresh-1") == ({}, b"3")
        order = files.loads_with_digest((copy / f"site-w1w2/runs/{known}/order.json").read_bytes())
        tables = tomllib.loads(order["experiment"])
        tables |= {"rounds": 2, "evaluate": {"every": 0, "text": 0}}
        del tables["data"]["test_fraction"]
        changes(tables)
        judged = {"run": known, "after": known, "refreshes": [1], **judged}
        request = {"kind": "join", "run": "b" * 16, "experiment": tomli_w.dumps(tables), "code": {}}
        header = {"federation": "wards", "prefed": VERSION, "format": FORMAT, **request, "judged": judged}
        return ask, unpack(ask.site.answer(pack(**header)))[0]

    return make


def test_a_site_joins_a_refresh_with_what_its_clients_judged(joins, copy):
    """Only with clients that judged; equal pairs count once. The files have no character that a terminal
    obeys."""
    ask, joined = joins()
    assert joined["clients"] == {"w2": [1, 0, 2]}
    evil = [{"prompt": "\x1b[2J?", "first": " \x07", "second": " \x9b\u202e", "extra": {"x": "\x00"}}]
    assert ask(evil, exchange="refresh-1-2") == ({}, b"4")
    assert ask(evil, exchange="refresh-2") == ({}, b"1")
    written = [path.read_bytes() for path in (copy / "site-w1w2/runs").rglob("judged/*/*")]
    assert len(written) == 2
    assert all(32 <= byte < 127 or byte == 10 for data in written for byte in data)
    entries = [entry for entry in ask.site.log.entries() if entry["what"] == "refresh"]
    assert [entry["figures"] for entry in entries] == [{"pairs": 3}, {"pairs": 4}, {"pairs": 1}]
    assert not any("votes" in entry for entry in entries)
    assert line_of(entries[0]).endswith("refresh  w2  1 B: pairs 3")
    ask.site.close()
    assert joins(count=False, refreshes=[1, 2])[1]["refused"].endswith("with other pairs: start a new run")


@pytest.mark.parametrize(
    ("changes", "judged", "reason"),
    [
        (None, {"run": "c" * 16}, "[limits] judgements: no client of this site judged for these rounds"),
        (None, {"after": "c" * 16}, "[limits] judgements: no client of this site judged for these rounds"),
        (None, {"run": "../../../etc/xy"}, "invalid request (join): judged.run"),
        (None, {"refreshes": []}, "invalid request (join): judged.refreshes"),
        (None, {"refreshes": [2]}, "no client of this site prefers a completion in these refreshes"),
        (lambda t: t["model"]["lora"].update(rank=3), {}, "different settings (model.lora.rank = 3"),
        (lambda t: t["method"].update(local_steps=9), {}, "different settings (method.local_steps = 9"),
        (lambda t: t.update(rounds=2000), {}, "[limits] rounds: 2,000 requested, at most 1,000 allowed"),
    ],
)
def test_a_hub_cannot_continue_what_nobody_judged(joins, copy, changes, judged, reason):
    """Nor with other settings, which could send private states. Nothing is written."""
    _, answer = joins(changes or (lambda tables: None), **judged)
    assert reason in answer["refused"], answer
    assert not (copy / "site-w1w2/runs" / ("b" * 16)).exists()


@pytest.mark.parametrize("message", [b"NaN", b"true", b"-1", b"3", b"1.5", b'"1"', b"[" * 9999, b"", b"\xff"])
def test_what_is_no_number_of_pairs_ends_the_alignment_by_name(message):
    """Of two pairs, a client cannot keep three."""
    voters = voting({"one": answering(b"1"), "two": answering(message)})
    with pytest.raises(AlignError, match="site 'two', client 'w1': its answer is no number of pairs up to 2"):
        voters.judge([1], {"w0": RECORDS, "w1": RECORDS})


class Lying(Within):
    """Site two reports another number of pairs, or another client, when it joins a refresh."""

    def __init__(self, sites, change):
        super().__init__(sites)
        self.change = change

    def call(self, site, request, timeout, most):
        answer, header = super().call(site, request, timeout, most), unpack(request)[0]
        if site != "two" or header["kind"] != "join" or header["judged"] is None:
            return answer
        joined, body = unpack(answer)
        return pack(body, **{**joined, "clients": self.change(joined["clients"])})


@pytest.mark.parametrize(
    "change",
    [
        lambda clients: {**clients, "w1": [7, 0, 2]},
        lambda clients: {**clients, "stranger": [1, 0, 0]},
        lambda clients: {**clients, "w0": [1, 0, 0]},
    ],
)
def test_a_site_that_joins_with_other_pairs_is_named(place, copy, change):
    sites = opened(place, copy)
    named = "site 'two' reports more pairs than its clients have judged|'two' both have a client 'w0'"
    with pytest.raises((AlignError, FederationError), match=named):
        vote(copy / "over", Lying(sites, change), settings(place, **REFRESH))
    closed(sites)


def test_refreshes_are_exported_and_forgotten_with_their_run(place, copy):
    """The site exports the newest selectors. When its hub forgets a client, no judged pair is left."""
    sites = opened(place, copy)
    vote(copy / "over", sites, settings(place, **REFRESH))
    closed(sites)
    config = site_config(place, copy, "w1w2", name="two")
    export_client(config, copy / "own", client="w2")
    write_model(copy / "over/align/generations/2/refresh", copy / "hubs")
    one, other = (load_file(copy / name / "adapter_model.safetensors") for name in ("own", "hubs"))
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    withdraw(config, "w1", "Dr Ada", "asked for it")
    sites = opened(place, copy)
    known = json.loads((copy / "over/federation.json").read_bytes())["run"]
    Sites(Within(sites), "wards", known, 1.0).forget("two", ["w1"])
    closed(sites)
    runs = copy / "site-w1w2/runs"
    assert [path.name for path in runs.rglob("*") if path.is_file()] == ["order.json"]
    assert f"runs/{known}/judged" in str([*sites["two"].log.entries()])


def test_people_judge_at_their_site(place, copy):
    """The alignment stops, and the site says whom to ask, in which file: without a character that a terminal
    obeys. It continues when they have chosen; another person's site has answered in the meantime."""
    folder, said = copy / "people", []
    allowed = {"limits": {"judgements": 100}}
    one = site_config(place, copy, "w0", name="one", judge={"name": "liking"}, **allowed)
    two = site_config(place, copy, "w1w2", name="two", judge={"name": f"people:{folder}"}, **allowed)
    sites = {"one": Site(one), "two": Site(two, said.append)}
    change = {**REFRESH, "generations": 1}
    for client in ("w1", "w2"):
        with pytest.raises(AlignError, match=f"'two', client '{client}'.*have not judged yet: {client}"):
            vote(copy / "over", sites, settings(place, **change))
        asked = folder / f"{client}.questions.jsonl"
        assert f"prefed collect --from {asked} --client {client}" in said[-2]
        assert all(32 <= byte < 127 or byte == 10 for byte in asked.read_bytes())
        jsonl(folder / f"{client}.jsonl", rows(folder, asked.name)[:2])
    vote(copy / "over", sites, settings(place, **change))
    refresh = json.loads((copy / "over/align/generations/1/refresh/federation.json").read_bytes())
    assert {client: counts[0] for client, counts in refresh["sites"]["two"].items()} == {"w1": 2, "w2": 2}
    closed(sites)


def test_people_do_not_vote(asks, tmp_path):
    refused = asks(limits={"judgements": 9}, judge={"name": f"people:{tmp_path}"})()[0]["refused"]
    assert refused == "[judge]: people do not vote on every pair: use [align.refresh]"
