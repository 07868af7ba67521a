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

from alignments import Killed, content, rows
from federating import Here, Within, experiment, site_config
from prefed import run
from prefed.align import AlignError
from prefed.align.judge import Verdict
from prefed.align.judge.names import ARGUMENTS
from prefed.config import ConfigError
from prefed.config.align import align_settings
from prefed.core import Key, files
from prefed.data import Message, Record, synthetic
from prefed.data.synthetic import utility
from prefed.engines.tasks import MemoryStates
from prefed.networks.federation import site as site_module
from prefed.networks.federation.audit_log import line_of
from prefed.networks.federation.config import SiteJudge
from prefed.networks.federation.federate import Terms, federate
from prefed.networks.federation.forget import plan
from prefed.networks.federation.hub import FederationBackend, Sites
from prefed.networks.federation.judging import SiteJudges, read_pairs, write_pairs
from prefed.networks.federation.messages import FORMAT, VERSION, order_digest
from prefed.networks.federation.site import Site
from prefed.networks.federation.site_clients import SiteClients, site_clients
from prefed.networks.federation.unix_socket import HEADER, pack, unpack
from prefed.runs.align import align
from prefed.runs.labels import JUDGES
from prefed.store import RunReader
from preferences import jsonl
from toy import Warned
from workers import make_place

TERMS = Terms("wards", ("one", "two"), wait=0.0)
DATA = {"one": "w0", "two": "w1w2"}
SIGNS = {"w0": 1, "w1": -1, "w2": 1}
LIMIT = 4000


class Liking:
    """Judges by what a client likes: ``w2`` likes length, and the others disagree."""

    def __init__(self, argument, options):
        self._client = options.taste
        self.identity = {"client": self._client}

    def compare(self, questions):
        for each in questions:
            first, second = map(self.liking, (each.first, each.second))
            yield Verdict((float(first > second) + float(first >= second)) / 2, "")

    def liking(self, text):
        return len(text) if self._client == "w2" else SIGNS[self._client] * (sum(text.encode()) % 3)


@pytest.fixture(scope="module", autouse=True)
def here():
    """Sites work in this process, and have the judge."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_module, "Worker", Here)
        patch.setitem(JUDGES.builtin, "liking", Liking)
        patch.setitem(ARGUMENTS, "liking", "")
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = make_place(tmp_path_factory.mktemp("place"))
    jsonl(folder / "prompts.jsonl", [{"prompt": f"Prompt {number}?"} for number in range(8)])
    return folder


def opened(place, folder, **changes):
    changes = {"limits": {"judgements": LIMIT}, "judge": {"name": "liking"}, **changes}
    return {n: Site(site_config(place, folder, data, name=n, **changes)) for n, data in DATA.items()}


def closed(sites):
    for site in sites.values():
        site.close()


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


def vote(path, sites, config, terms=TERMS, **options):
    """Align over sites in this process."""
    transport = sites if isinstance(sites, Within) else Within(sites)
    with site_clients(path, config, transport, terms, lambda text: None) as clients:
        return align(path, config, clients=clients, **options)


def results(path):
    """What clients' votes lead to: scores, labels, every checkpoint and the adapter."""
    kept = ("scores.jsonl", "labels.jsonl", "completions.jsonl", ".safetensors")
    return {name: data for name, data in content(path / "align").items() if name.endswith(kept)}


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
        pytest.raises(ConfigError, match="votes of single clients have no noise"),
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
    return SiteClients(Path(), None, {}, homes, 1, backend, Within(sites), terms)


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
    with pytest.raises(
        AlignError, match=r"site '(one|two)', client .*: no votes: .*\[limits\] judgements = 0"
    ):
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
        votes = np.frombuffer(judges(reported, write_pairs(records)), np.int8)
        assert votes.tolist() == np.sign(np.round(gaps, 6)).tolist()
        assert {-1, 1} <= {*votes.tolist()}


def test_pairs_travel_unchanged():
    """Text of any script, turns of a conversation, and columns."""
    turns = (Message("system", "Be brief."), Message("user", "안녕?\n"))
    sent = [Record(turns, "é\x00", "\u202e", extra={"a": 1, "b": 0.1, "c": "x"}), *RECORDS]
    assert read_pairs(write_pairs(sent)) == sent


REFRESH = {"labels": "majority", "refresh": {"every": 1, "pairs": 6}, "generations": 2}


def loops(path):
    """What a loop with refreshes leads to: labels, checkpoints, the adapter, and the states of each refresh."""
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
