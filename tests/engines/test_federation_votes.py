"""Masked and noised sums of votes over sites: equal to their simulation, and what a hub that lies gets."""

import json
import shutil
import typing
from dataclasses import replace

import numpy as np
import pytest
from tests.engines.test_federation_judges import Dying, Liking, results, settings, vote
from tests.engines.test_federation_sums import (
    NAMES,
    NOISE,
    TERMS,
    Draws,
    Hub,
    Records,
    logged,
    private,
    remember_data,
    seed,
    site_of,
    spent,
    spent_by_w0,
)
from tests.engines.test_federation_sums import place as sums_place

from alignments import Killed, rows
from federating import Here, Within, closed, experiment
from liking import install
from prefed import run
from prefed.align import AlignError
from prefed.config import ConfigError
from prefed.engines import WorkerError
from prefed.networks.federation import site as site_module
from prefed.networks.federation.federate import federate
from prefed.networks.federation.judging import Votes, read_pairs
from prefed.networks.federation.messages import order_digest
from prefed.networks.federation.site_clients import site_clients
from prefed.networks.federation.transport import UnreachableError
from prefed.networks.federation.unix_socket import unpack
from prefed.privacy import Grid, VoteSum, guarantee_of
from prefed.privacy.secure import Participant, sum_words
from prefed.runs.align import align
from prefed.runs.finished_run import read_run
from prefed.runs.loaded_run import recorded_experiment
from preferences import jsonl

pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")

Z = NOISE["noise_multiplier"]
TEXTS = ((" b", " a"), (" abcc", " abc"), (" abc", " abcc"), (" a", " b"))
PAIRS = [{"prompt": "Why?", "first": one, "second": other, "extra": {}} for one, other in TEXTS]
LIKED = {"w0": 1, "w1": -1, "w3": 1}


class Taste(Liking):
    def liking(self, text):
        return len(text) if self.client == "w2" else LIKED[self.client] * (sum(text.encode()) % 3)


@pytest.fixture(scope="module", autouse=True)
def here():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_module, "Worker", Here)
        install(patch, Taste)
        yield


place = sums_place


def opened(place, folder, limits=None, names=NAMES):
    """Sites with a judge."""
    changes = {"judge": {"name": "liking"}, "limits": {"judgements": 4000, **(limits or {})}}
    return {name: site_of(place, folder, NAMES.index(name), **changes) for name in names}


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    """A run of FedBis with distributed noise over four sites, and its simulation, which is aligned."""
    folder = tmp_path_factory.mktemp("finished")
    jsonl(place / "prompts.jsonl", [{"prompt": f"Prompt {number}?"} for number in range(8)])
    plain = experiment(place, "fedbis", rounds=1)
    tables = plain.tables() | {"merge": {"weights": "uniform"}, "privacy": NOISE}
    asked = type(plain).from_tables(tables, "the test")
    with pytest.MonkeyPatch.context() as patch:
        seed(patch)
        run(asked, folder / "alone")
        sites = opened(place, folder)
        federate(asked, folder / "over", Within(sites), TERMS)
        closed(sites)
        summary = align(folder / "alone", settings(place, client_judge="liking"))
    return folder, summary


@pytest.fixture
def copy(finished, tmp_path):
    """The federation's run and its sites' states."""
    for name in ("over", *(f"site-{each}" for each in NAMES)):
        shutil.copytree(finished[0] / name, tmp_path / name)
    return tmp_path


def test_masked_votes_are_those_of_the_simulation(place, finished, copy, monkeypatch):
    """Bit for bit, with the same noise. Each sum is a release, here and in the site's ledger, whose log says
    what left; one client moves a sum by √n, so the noise of all sites is that of a server."""
    seed(monkeypatch)
    sites = opened(place, copy)
    summary = vote(copy / "over", sites, settings(place), TERMS)
    closed(sites)
    assert results(copy / "over") == results(finished[0] / "alone")
    mine, theirs = (own["privacy"] for own in (summary, finished[1]))
    assert {**mine, "draws": "seed"} == theirs
    sums = [row for row in rows(copy / "over/align", "votes.jsonl") if "sum" in row]
    assert mine["votes"] == len(sums) >= 4
    promised = guarantee_of(recorded_experiment(read_run(copy / "over")).privacy, 4, 4)
    assert mine["epsilon"] == pytest.approx(promised.epsilon(mine["releases"] + mine["votes"], 1e-5))
    for number, name in enumerate(NAMES):
        before = sum(spent(finished[0], name).values())
        assert spent(copy, name) == {f"w{number}": pytest.approx(before + len(sums) / Z**2)}
        left = [entry for entry in logged(copy, name, "sum") if "judge" in entry]
        assert [(entry["clients"], entry["sites"]) for entry in left] == [([f"w{number}"], [*NAMES])] * len(
            sums
        )
        assert not logged(copy, name, "judge")
    # z = 2 gives n pairs noise of 2 √n, and the sum of whole votes says little about four of them.
    noise = np.array(sums[0]["sum"]) - true_sum(copy / "over/align/generations/1")
    assert 1 < noise.std() / np.sqrt(len(noise)) < 3


def true_sum(folder):
    made = rows(folder, "completions.jsonl")
    texts = {(row["index"], row["sample"]): row["completion"] for row in made}
    asked = [[texts[row["index"], k] for k in row["samples"]] for row in rows(folder, "scores.jsonl")]
    votes = np.zeros(len(asked))
    for client in ("w0", "w1", "w2", "w3"):
        judge = Taste("", type("Options", (), {"taste": client}))
        votes += [np.sign(judge.liking(one) - judge.liking(other)) for one, other in asked]
    return votes


def test_the_hub_gets_only_the_sum_of_votes(place, copy, monkeypatch):
    """The control: with masks of 0 and no noise, the words of a site are its client's votes, and their sum is
    exact. With masks a site's words are random, though their sum is the same."""
    monkeypatch.setattr(Grid, "noise", lambda self, size, source: np.zeros(size, np.int64))
    summed, mask, seen = VoteSum(len(PAIRS)), Participant.mask, []
    for number, masked in enumerate((mask, lambda self, words, session: words), 1):
        monkeypatch.setattr(Participant, "mask", masked)
        sites = opened(place, copy)
        hub = Records(sites)
        with site_clients(copy / "over", settings(place), hub, TERMS, lambda text: None) as clients:
            total = clients.noised(read_pairs(json.dumps(PAIRS).encode()), "", number)
            grid = summed.grid(clients.privacy, 4, 4)
        closed(sites)
        assert total.tolist() == [1, 1, -1, -1]
        words = {s: np.frombuffer(unpack(a)[1], "<i4") for s, h, a in hub.got if h["kind"] == "sum"}
        assert {*words} == {*NAMES}
        seen.append({site: own.astype(np.int64) for site, own in words.items()})
    hidden, read = seen
    assert [grid.plausible(own) for own in hidden.values()] == [False] * 4
    votes = [summed.votes(grid.numbers(read[name])).tolist() for name in NAMES]
    assert votes == [[1, 0, 0, -1], [-1, 0, 0, 1], [0, 1, -1, 0], [1, 0, 0, -1]]


def test_killed_anywhere_a_hub_gets_each_sum_once(place, finished, copy, monkeypatch):
    """Before or after a site answers. The results are the simulation's, and each sum counts once."""
    seed(monkeypatch)
    sites, killed = opened(place, copy), 0
    for when in (1, -1, 3, -4, *[5, -6] * 4):
        try:
            vote(copy / "over", Dying(sites, when, "sum"), settings(place), TERMS)
            break
        except Killed:
            killed += 1
    closed(sites)
    assert 4 < killed < 12
    assert results(copy / "over") == results(finished[0] / "alone")
    for number, name in enumerate(NAMES):
        before = sum(spent(finished[0], name).values())
        assert spent(copy, name)[f"w{number}"] == pytest.approx(
            before + finished[1]["privacy"]["votes"] / Z**2
        )


def test_a_site_that_is_restarted_costs_another_release(place, copy):
    """Its masks are gone with its process, so all sites are asked anew, with new noise; the hub counts both.
    What is asked again under the first number has no answer."""
    sites, restarted = opened(place, copy), []

    def restart(site, request):
        if unpack(request)[0]["kind"] == "sum" and site == "site-c" and not restarted:
            sites[site].close()
            restarted.append(site)
            sites.update(opened(place, copy, names=[site]))

    summary = vote(copy / "over", Within(sites, restart), settings(place, generations=1, held_out=0), TERMS)
    closed(sites)
    (one, two) = [row for row in rows(copy / "over/align", "votes.jsonl") if "number" in row]
    assert (one["number"], two["number"], one["request"]) == (1, 2, two["request"])
    assert summary["privacy"]["votes"] == 2
    counts = [len([e for e in logged(copy, name, "sum") if "judge" in e]) for name in NAMES]
    assert counts == [2, 2, 1, 2]


def test_a_missing_site_and_a_lie_stop_the_alignment(place, copy, monkeypatch):
    """By name. It continues without the site, whose clients then have no vote; random words have no name."""

    def away(site, request):
        if unpack(request)[0]["kind"] == "sum" and site == "site-d":
            raise UnreachableError("it is switched off")

    asked = settings(place, generations=1, held_out=0)
    sites = opened(place, copy)
    with pytest.raises(AlignError, match=r"site 'site-d': it is switched off.*--sites, --stage"):
        vote(copy / "over", Within(sites, away), asked, TERMS)
    random = np.random.default_rng(0)
    with monkeypatch.context() as patch:
        patch.setattr(
            Participant,
            "mask",
            lambda self, words, session: words + random.integers(2**32, size=len(words)).astype(np.uint32),
        )
        warned = list[str]()
        with pytest.raises(AlignError, match="no sum of votes in 3 requests, each a release"):
            vote(copy / "over", sites, asked, TERMS, warned.append)
    assert len(warned) == 3
    assert "which is spent all the same: what 'site-a', 'site-b', 'site-c', 'site-d' sent" in warned[0]
    vote(copy / "over", sites, asked, replace(TERMS, sites=NAMES[:3]), stage="labels-1")
    closed(sites)
    last = rows(copy / "over/align", "votes.jsonl")[-1]
    assert len(last["sum"]) == len(rows(copy / "over/align/generations/1", "scores.jsonl"))
    assert [e["sites"] for e in logged(copy, "site-a", "sum") if "judge" in e][-1] == [*NAMES[:3]]


def test_sites_add_no_noise_of_other_kinds(place, copy):
    """So their hub asks for no votes, and a refresh's rounds are not counted."""
    with pytest.raises(ConfigError, match="sites add noise only to sums of votes"):
        vote(copy / "over", {}, settings(place, labels="majority", refresh={}), TERMS)
    text = (copy / "over/config.toml").read_text()
    changed = text.replace('kind = "distributed"', 'kind = "central"').replace("colluders = 0\n", "")
    (copy / "over/config.toml").write_text(changed)
    with pytest.raises(ConfigError, match="kind = 'central': sites add noise only to sums of votes"):
        vote(copy / "over", {}, settings(place), TERMS)


# A hub that lies


class VotesHub(Hub):
    """Asks site a for the sum of votes on two pairs."""

    settings: typing.ClassVar = {"judge": {"name": "liking"}}

    def votes(self, number=1, pairs=PAIRS, at=1, **fields):
        self.asked = json.dumps(pairs).encode()
        return self.sum(**{"body": self.asked, "exchange": f"votes-{number}", "number": at, **fields})


class Ones(Draws):
    """A client prefers the first completion of each pair."""

    def give(self, task, state, timeout):
        assert task.kind == "judge"
        ones = np.ones(len(json.loads(task.message)), np.int8).tobytes()
        self.due = {"message": ones, "withheld": "", "note": "", "state": None}


@pytest.fixture
def hub(place, tmp_path, monkeypatch):
    monkeypatch.setattr(site_module, "Worker", Ones)
    remember_data(monkeypatch)
    hub = VotesHub(place, tmp_path, judgements=20)
    yield hub
    hub.site.close()


def test_a_number_has_one_answer(hub):
    """The same request has the same bytes, also after a restart, and is one release. Under its number there
    are no other pairs, no fewer sites and no other round; under another one the noise is another, which
    counts, though the client judged these pairs once."""
    first = hub.votes()
    assert len(first) == 4 * 64
    assert hub.votes() == first
    assert hub.votes(pairs=PAIRS[:1]) == hub.votes(without=["site-d"]) == "used"
    assert spent_by_w0(hub) == 1
    old = hub.own
    hub.open(judgements=20)
    assert hub.votes() == "used"
    new, hub.own = hub.own, old
    assert hub.votes() == first
    hub.own = new
    second = hub.votes(2)
    assert second not in (first, "used")
    assert spent_by_w0(hub) == 2
    votes = Votes(hub.site._state / "runs" / hub.run, "w0", hub.site.config.judge)
    assert votes.count == len(PAIRS)


def test_a_judge_that_fails_has_no_votes(hub, monkeypatch):
    """Its site sends a sum all the same, which says nothing of it; only the site's log does."""

    def fails(worker, task, state, timeout):
        raise WorkerError("boom")

    monkeypatch.setattr(Ones, "give", fails)
    assert len(hub.votes()) == 4 * 64
    assert spent_by_w0(hub) == 1
    assert [entry["failed"] for entry in hub.site.log.entries() if entry["what"] == "failed"] == ["boom"]
    assert not list(hub.site._state.rglob("votes/*"))


def test_masks_and_noise_are_of_one_request(hub, monkeypatch):
    """What the other sites' masks for these pairs take off leaves votes with noise. Of a site that was sent
    other pairs, a list of other sites or another number, they leave random words. Noise is drawn anew."""
    drawn, mask = [], Participant.mask
    monkeypatch.setattr(
        Participant, "mask", lambda p, words, session: (drawn.append(words), mask(p, words, session))[1]
    )
    grid = VoteSum(len(PAIRS)).grid(private(hub.place).privacy, 4, 4)

    def unmasked(number, pairs, without=(), other=1):
        words = np.frombuffer(hub.votes(number, pairs, without=without), "<u4")
        _, session = hub.request(exchange=f"votes-{other}", body=json.dumps(PAIRS).encode())
        others = [own.mask(np.zeros(64, np.uint32), session) for own in hub.others.values()]
        drawn[len(drawn) - len(others) :] = []
        return sum_words([words, *others])

    honest = unmasked(1, PAIRS)
    assert grid.plausible(honest)
    lies = [unmasked(2, PAIRS[::-1], other=2), unmasked(3, PAIRS, ["site-d"], other=3), unmasked(4, PAIRS)]
    assert [grid.plausible(lie) for lie in lies] == [False] * 3
    assert len({each.tobytes() for each in drawn}) == len(drawn) == 4


@pytest.mark.parametrize(
    ("limits", "fields", "reason"),
    [
        ({"judgements": 0}, {}, "[limits] judgements = 0: clients of this site judge no completions"),
        ({"judgements": 3}, {}, "[limits] judgements: 4 pairs of the client requested in this run, at most"),
        ({"epsilon": 0.1, "delta": 1e-5}, {}, "[limits] epsilon: with this upload the client would reach"),
        ({}, {"size": 65}, "a sum of votes has 64 numbers, not 65"),
        ({}, {"clients": ("w1",)}, "the client is not at this site"),
        ({}, {"pairs": []}, "invalid pairs of completions"),
        ({}, {"without": ["site-b", "site-c", "site-d"]}, "a sum of 1 sites: 3 are the fewest"),
        ({}, {"number": "x"}, "there is no sum in 'votes-x' in round 1"),
        ({}, {"at": 10**9}, "there is no sum in 'votes-1' in round 1000000000"),
        ({}, {"attempt": 2}, "votes-1: one number is one sum of votes, so there is no attempt 2"),
    ],
)
def test_what_a_site_refuses_leaves_no_trace_in_its_ledger(hub, limits, fields, reason):
    """Before the client is asked and before anything leaves."""
    hub.open(**{"judgements": 20, **limits})
    assert reason in hub.votes(**fields)
    assert spent_by_w0(hub) == 0
    assert not list(hub.site._state.rglob("votes/*"))
    assert not [entry for entry in hub.site.log.entries() if entry["what"] == "sum"]


def test_a_client_that_does_not_train_has_no_vote(hub):
    hub.say(kind="start", members=hub.clients, unseen=["w0"])
    order = order_digest(hub.text, hub.clients, ["w0"])
    request, _ = hub.request(exchange="votes-1", body=json.dumps(PAIRS).encode())
    asked = request.model_copy(update={"order": order}).bound(json.dumps(PAIRS).encode())
    body, fields = json.dumps(PAIRS).encode(), {"run", "federation", "format", "prefed"}
    assert "w0 does not train in this run" in hub.say(body, **asked.model_dump(exclude=fields))[0]["refused"]
    assert (
        "votes have no noise"
        in hub.say(
            body,
            **{
                "kind": "judge",
                "client": "w0",
                "round": 1,
                "exchange": "",
                "asked": 0,
                "receipt": None,
                "order": order,
            },
        )[0]["refused"]
    )
