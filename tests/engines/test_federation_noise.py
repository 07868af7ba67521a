"""Noise over a federation: what a site draws once, what it counts, and what its administrator refuses."""

import json
import os

import pytest
import torch

import toy
from federating import Here, Within, experiment, site_config
from prefed import run
from prefed.core import Download, Privacy
from prefed.core.wire import encode
from prefed.networks.federation import site as site_module
from prefed.networks.federation.audit_log import status_lines
from prefed.networks.federation.config import Limits
from prefed.networks.federation.federate import Terms, experiment_for_sites, federate
from prefed.networks.federation.messages import FORMAT, VERSION, order_digest
from prefed.networks.federation.privacy_ledger import Releases, epsilon_of
from prefed.networks.federation.site import Site
from prefed.networks.federation.site_limits import RefusalError, check_experiment
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.privacy import clip_and_noise, guarantee_of
from prefed.store import StoreError
from workers import CLIENTS
from workers import place as place

pytest.importorskip("dp_accounting")

LOCAL = {"kind": "local", "clip": 0.05, "noise_multiplier": 2.0, "delta": 1e-5, "draws": "system"}
TERMS = Terms("wards", ("site-pairs",), wait=0.0)


def private(place, rounds=2, **changes):
    asked = experiment(place, method="feddpo", rounds=rounds)
    tables = asked.tables()
    return type(asked).from_tables(
        {**tables, "merge": {"weights": "uniform"}, "privacy": {**LOCAL, **changes}}, "the test"
    )


def goes_on(experiment, place, folder, **options):
    """A run over one site with three clients, which is started anew for it."""
    site = Site(site_config(place, folder, "pairs"))
    try:
        return federate(experiment, folder / "over", Within({"site-pairs": site}), TERMS, **options)
    finally:
        site.close()


@pytest.mark.parametrize(
    ("kind", "answers"),
    [("local", 2), ("local", 3 + 3 + 2), ("central", 3 + 3 + 2)],
    ids=lambda value: f"{value}",
)
def test_a_round_that_is_done_again_has_no_second_draw_at_a_site(kind, answers, place, tmp_path, monkeypatch):
    """FedDPO of a site with three clients, two rounds; the hub dies in round 1 or 2 after two answers of
    three, and the site is started anew. Draws are made a fixed sequence of numbers, and counted: with it the
    run in one process is the oracle, bit for bit. Each client draws once a round. The hub, who cannot see
    that, counts the round twice: ε in the end is that of three releases. A central mean is drawn once, as
    round 2 was stopped before it. The site has one run.
    """
    draws = []

    def normal(size, key):
        assert key is None
        draws.append(size)
        return torch.linspace(-1, 1, size, dtype=torch.float64)

    monkeypatch.setattr(clip_and_noise, "normal", normal)
    monkeypatch.setattr(site_module, "Worker", Here)
    asked = private(place, kind=kind)
    run(asked, tmp_path / "alone")
    once = 2 * 3 if kind == "local" else 2
    assert len(draws) == once

    with pytest.raises(KeyboardInterrupt):
        goes_on(asked, place, tmp_path, callbacks=[toy.InterruptAt(answers)])
    summary = goes_on(asked, place, tmp_path, resume=True)
    assert len(draws) == 2 * once
    server = "checkpoint/server@000002.safetensors"
    assert (tmp_path / "over" / server).read_bytes() == (tmp_path / "alone" / server).read_bytes()
    assert summary["privacy"]["epsilon"] == guarantee_of(asked.privacy, 3, 3).epsilon(3, 1e-5)
    assert (summary["privacy"]["draws"], summary["privacy"]["releases"]) == ("system", 3)
    assert len(list((tmp_path / "site-pairs/runs").iterdir())) == 1
    spent = Releases(tmp_path / "site-pairs").spent()
    assert spent == (dict.fromkeys(CLIENTS, 2 * 2.0**-2) if kind == "local" else {})


def test_what_a_site_writes_is_its_owners_alone(place, tmp_path, monkeypatch):
    """A whole run with local noise, under a umask that forbids nothing. Only the lock, which holds the id of
    a process, is anybody's to read in a folder of its owner's."""
    monkeypatch.setattr(site_module, "Worker", Here)
    before = os.umask(0)
    try:
        goes_on(private(place), place, tmp_path)
    finally:
        os.umask(before)
    state = tmp_path / "site-pairs"
    assert state.stat().st_mode & 0o777 == 0o700
    modes = {p.relative_to(state): p.stat().st_mode & 0o777 for p in state.rglob("*") if p.is_file()}
    assert {path.parts[0] for path in modes} >= {"cache", "log", "runs", "secret", "spent.json"}
    assert {str(path) for path, mode in modes.items() if mode != 0o600} == {"checkpoint/LOCK"}


def test_more_rounds_are_no_second_draw(place, tmp_path, monkeypatch):
    """The hub dies in round 1 of two, after two of three answers, and resumes with three rounds. Each client
    draws once a round all the same, so it has spent 3/z² with z = 2."""
    monkeypatch.setattr(site_module, "Worker", Here)
    asked = private(place, kind="local")

    with pytest.raises(KeyboardInterrupt):
        goes_on(asked, place, tmp_path, callbacks=[toy.InterruptAt(2)])
    goes_on(asked.model_copy(update={"rounds": 3}), place, tmp_path, resume=True)
    assert Releases(tmp_path / "site-pairs").spent() == dict.fromkeys(CLIENTS, 3 * 2.0**-2)


# A site whose every visit draws anew


class Draws(Here):
    """Each visit gives other bytes."""

    number = 0

    def build(self, factory, threads):
        self.due = {"fingerprint": {"data": "", "model": ""}, "exchanges": ["train"], "metrics": []}

    def give(self, task, state, timeout):
        Draws.number += 1
        self.due = {"message": f"draw {Draws.number}".encode(), "withheld": "", "note": "", "state": None}


@pytest.fixture
def asks(tmp_path, monkeypatch):
    """Open a site that knows a run with local noise, and give what it answers to visits."""
    (tmp_path / "w0.jsonl").touch()
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(site_module, "Worker", Draws)
    monkeypatch.setattr(Site, "_join", joined)
    opened = []

    def opens(run="0" * 16, **limits):
        for site in opened:
            site.close()
        opened[:] = [Site(site_config(tmp_path, tmp_path, "w0", limits=limits))]
        text, members = experiment_for_sites(private(tmp_path)), ["w0-reported", "b", "c"]
        common = {"format": FORMAT, "prefed": VERSION, "federation": "wards", "run": run}
        header, _ = unpack(opened[0].answer(pack(**common, kind="join", experiment=text)))
        header, _ = unpack(opened[0].answer(pack(**common, kind="start", members=members, unseen=[])))
        assert "fingerprint" in header, header
        order = order_digest(text, members, [])

        def visit(number=1, model=0, **changes):
            body = encode(Download({}, {"model": model}))
            task = {
                "kind": "visit",
                "client": "w0-reported",
                "round": number,
                "exchange": "train",
                "asked": 0,
            }
            header, message = unpack(
                opened[0].answer(pack(body, **common, **task, order=order, receipt=None, **changes))
            )
            return header.get("refused") or header.get("failed") or message.decode()

        return visit

    yield opens
    for site in opened:
        site.close()


def joined(site, run, text, code, judged):
    site._write_order(
        run,
        {"data": "", "round": 0, "experiment": text, "names": {"w0": "w0-reported"}}
        | {"pairs": {"w0-reported": [8, 0, 2]}},
    )
    return pack()


def test_the_same_request_has_the_same_answer_whatever_was_killed(asks, tmp_path):
    """Also after five others, which is more than a site remembers, and after it was started anew. What is
    asked differently, or in another run, is drawn anew and counted."""
    visit = asks()
    first = visit()
    assert visit() == first
    others = [visit(model=number) for number in range(1, 6)]
    assert len({first, *others}) == 6
    assert visit() == first
    visit = asks()
    assert visit() == first
    assert asks(run="1" * 16)() != first
    assert Releases(tmp_path / "site-w0").spent() == {"w0": pytest.approx(7 * 2.0**-2)}
    folder = tmp_path / "site-w0/runs" / ("0" * 16) / "answers"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    visit = asks()
    visit(2)
    assert len(list(folder.iterdir())) == 1


def test_an_answer_that_cannot_be_kept_does_not_leave(asks, tmp_path, monkeypatch):
    """The disk is full for the answer, after it was counted. Asked again, the site draws again: what was
    drawn before has been seen by nobody, and the account has one release too many."""
    visit, write = asks(), site_module.files.write

    def full(path, data, **options):
        if path.parent.name == "answers":
            raise OSError("No space left on device")
        write(path, data, **options)

    monkeypatch.setattr(site_module.files, "write", full)
    assert visit() == "OSError: see the site's log"
    monkeypatch.setattr(site_module.files, "write", write)
    assert visit() == f"draw {Draws.number}"
    assert Releases(tmp_path / "site-w0").spent() == {"w0": 2 * 2.0**-2}


def test_a_site_ends_what_a_client_may_spend_in_all_runs(asks, tmp_path):
    """z = 2 for replaced clients is σ = 1 over the sensitivity, as two releases at z = 2 √2 are. A limit that
    lies between the ε of two and of three releases lets two visits pass, of two runs, and a repetition."""
    two, three = (guarantee_of(Privacy(**LOCAL), 3, 3).epsilon(count, 1e-5) for count in (2, 3))
    limit = (two + three) / 2
    visit = asks(epsilon=limit)
    first = visit()
    asks(run="1" * 16, epsilon=limit)()
    visit = asks(epsilon=limit)
    assert f"would reach epsilon {three:.3g} over all runs; at most {limit:g} is allowed" in visit(2)
    assert visit() == first
    lines = [*status_lines(site_config(tmp_path, tmp_path, "w0", limits={"epsilon": limit}), 0)]
    assert f"  w0: epsilon {two:.3g} at delta 1e-05, in all runs so far" in lines


@pytest.mark.parametrize(("noises", "count"), [((1.0,), 1), ((2.0, 2.0), 2), ((4.0,) * 5, 5)])
def test_releases_add_up_as_the_accountant_adds_them(noises, count):
    """The accountant's own sum of Rényi divergences, of equal releases, is the oracle."""
    privacy = Privacy(kind="local", clip=1.0, noise_multiplier=noises[0], delta=1e-5)
    expected = guarantee_of(privacy, 3, 3).epsilon(count, 1e-5)
    assert epsilon_of(sum(noise**-2 for noise in noises), 1e-5) == pytest.approx(expected, rel=1e-12)
    assert epsilon_of(0.0, 1e-5) == 0


def test_a_damaged_account_is_no_account(tmp_path):
    (tmp_path / "spent.json").write_text(json.dumps({"spent": {"w0": 0.1}, "digest": "0"}))
    with pytest.raises(StoreError, match=r"spent\.json is damaged.*restore it from a copy"):
        Releases(tmp_path).spent()
    with pytest.raises(StoreError, match="is damaged"):
        Releases(tmp_path).check("w0", Privacy(**LOCAL), Limits(epsilon=1.0))


PLAIN = {"kind": None, "clip": None, "noise_multiplier": None, "delta": None, "draws": None}


@pytest.mark.parametrize(
    ("limits", "changes", "message"),
    [
        ({"privacy": "local"}, PLAIN, r"\[limits\] privacy: .* kind = 'local', with noise"),
        ({"privacy": "local"}, {"kind": "central"}, r"kind = 'local', with noise"),
        ({"privacy": "local"}, {"noise_multiplier": 0.0}, r"kind = 'local', with noise"),
        ({"privacy": "central"}, PLAIN, r"kind = 'local' or 'distributed' or 'central', with noise"),
        ({"noise_multiplier": 2.5}, {}, r"noise_multiplier: 2 requested, at least 2.5 required$"),
        ({"noise_multiplier": 2.5}, PLAIN, r"noise_multiplier: 0 requested, at least 2.5 required$"),
        ({"epsilon": 4.0}, {"kind": "central"}, r"\[limits\] epsilon: .* only for its own noise"),
        ({"epsilon": 4.0}, {"noise_multiplier": 0.0}, r"\[limits\] epsilon: .* only for its own noise"),
        ({"privacy": "local", "noise_multiplier": 2.0, "epsilon": 4.0}, {}, None),
        ({"privacy": "central"}, {}, None),
        ({"privacy": "central"}, {"kind": "central"}, None),
    ],
)
def test_an_administrator_asks_for_noise(tmp_path, limits, changes, message):
    asked, config = private(tmp_path, **changes), site_config(tmp_path, tmp_path, "w0", limits=limits)
    if message is None:
        check_experiment(asked, config)
        return
    with pytest.raises(RefusalError, match=message):
        check_experiment(asked, config)
