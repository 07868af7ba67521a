"""Distributed noise over a federation: equal to its simulation, and what a hub that lies or dies gets."""

import itertools
import json
import math
import shutil
import typing
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import toy
from crashes import Crash, Failing
from federating import Here, Within, closed, experiment, site_config
from prefed import run
from prefed.config import ConfigError
from prefed.core import Download, Key, files
from prefed.core.wire import encode
from prefed.engines import privacy as engine_privacy
from prefed.networks.federation import audit_log
from prefed.networks.federation import site as site_module
from prefed.networks.federation.approvals_withdrawals import withdraw
from prefed.networks.federation.federate import Terms, experiment_for_sites, federate
from prefed.networks.federation.forget import forget
from prefed.networks.federation.hub import Attempt, Sites
from prefed.networks.federation.messages import FORMAT, VERSION, Keys, Sum, order_digest, settings_of
from prefed.networks.federation.privacy_ledger import Releases
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import FederationError, UnreachableError
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.privacy import Grid, MetricSum, guarantee_of
from prefed.privacy.distributed import discrete_gaussian
from prefed.privacy.secure import Identity, Participant, fingerprint, sum_words
from workers import make_place

pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")

NOISE = {"kind": "distributed", "clip": 0.05, "noise_multiplier": 2.0, "delta": 1e-5, "colluders": 0}
NAMES = ("site-a", "site-b", "site-c", "site-d")
TERMS = Terms("wards", NAMES, wait=0.0)


def private(place, method="feddpo", rounds=2, **changes):
    asked = experiment(place, method=method, rounds=rounds)
    tables = asked.tables() | {"merge": {"weights": "uniform"}, "privacy": {**NOISE, **changes}}
    return type(asked).from_tables(tables, "the test")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Workers w0 to w3, of whom w0 and w1 are at one site each, w2 and w3 at two more."""
    place = make_place(tmp_path_factory.mktemp("place"))
    fourth = (place / "w0.jsonl").read_text().replace('"w0"', '"w3"').replace("Question", "Why")
    (place / "w3.jsonl").write_text(fourth)
    with (place / "pairs.jsonl").open("a") as stream:
        stream.write(fourth)
    return place


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Sites train in this process."""
    monkeypatch.setattr(site_module, "Worker", Here)


def seed(monkeypatch, count=4):
    """The draws of a round, one a site, are of the same streams, whichever site is first."""
    for module in (site_module, engine_privacy):
        draws = itertools.count()

        def source_of(key, draws=draws):
            return Key(5).at("draw", next(draws) % count).numpy().bytes

        monkeypatch.setattr(module, "source_of", source_of)


@pytest.fixture
def seeded(monkeypatch):
    seed(monkeypatch)


def identities(folder):
    return {name: Identity.at(folder / f"site-{name}" / "identity", create=True) for name in NAMES}


def site_of(place, folder, number, **changes):
    """One of the four sites, with one worker and the fingerprints of the others."""
    own = NAMES[number]
    pins = {name: fingerprint(each.public) for name, each in identities(folder).items() if name != own}
    data = {"train": str(place / f"w{number}.jsonl"), "partition": {"by": "column", "column": "worker"}}
    return Site(site_config(place, folder, own, name=own, **{"sites": pins, "data": data, **changes}))


def opened(place, folder, **limits):
    """The four sites."""
    return {name: site_of(place, folder, number, limits=limits) for number, name in enumerate(NAMES)}


def spent(folder, name):
    return Releases(folder / f"site-{name}").spent()


def server(out, number=2):
    return (out / f"checkpoint/server@{number:06d}.safetensors").read_bytes()


def records(out):
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("method", "dies"), [("fedpdpo", False), ("feddpo", True)])
def test_a_federation_is_its_simulation(method, dies, place, tmp_path, seeded):
    """Bit for bit, with the same noise: the server's state, and metrics, which depend on clients' private
    states. One hub dies in the evaluation of round 2, so that its sums are asked for again: the sites answer
    as before and count both releases of each round once, and the hub counts round 2 twice."""
    asked = private(place, method)
    run(asked, tmp_path / "alone")
    sites = opened(place, tmp_path)
    transport, resume = Within(sites), False

    def die(site, request):
        header, _ = unpack(request)
        if (site, header["kind"], header.get("round"), header.get("exchange")) == ("site-c", "sum", 2, ""):
            raise KeyboardInterrupt

    if dies:
        with pytest.raises(KeyboardInterrupt):
            federate(asked, tmp_path / "over", Within(sites, die), TERMS)
        resume = True
    summary = federate(asked, tmp_path / "over", transport, TERMS, resume=resume)
    closed(sites)
    assert server(tmp_path / "over") == server(tmp_path / "alone")
    for own, alone in zip(records(tmp_path / "over"), records(tmp_path / "alone"), strict=True):
        assert own["evaluation"] == alone["evaluation"]
        assert (own["sum_attempts"], own["sum_sites"]) == (1, [*NAMES])
    releases = 6 if dies else 4
    assert summary["privacy"]["releases"] == releases
    assert summary["privacy"]["epsilon"] == guarantee_of(asked.privacy, 4, 4).epsilon(releases, 1e-5)
    assert summary["privacy"]["colluders"] == 0
    for number, name in enumerate(NAMES):
        assert spent(tmp_path, name) == {f"w{number}": 4 * 2.0**-2}


def test_the_sites_that_are_left_sum_anew_without_a_forgotten_client(place, tmp_path, monkeypatch):
    """With the same noise, the result is the run of three clients. The other clients have released twice as
    much, so only differential privacy is certified."""
    asked, old = private(place), tmp_path / "old"
    sites = opened(place, tmp_path, minimum_cohort=1)
    federate(asked, old, Within(sites), TERMS)
    before = server(old)
    sites["site-d"].close()
    withdraw(sites["site-d"].config, "w3", "Dr Ada", "asked for it")
    sites["site-d"] = Site(sites["site-d"].config)
    seed(monkeypatch, 3)
    (certificate,) = forget(old, ["w3"], Within(sites), TERMS)
    closed(sites)
    tables = asked.tables()
    tables["data"]["exclude"] = ["w3"]
    run(type(asked).from_tables(tables, "the test"), tmp_path / "never")
    assert server(old) == server(tmp_path / "never") != before
    assert [record["sum_sites"] for record in records(old)] == [[*NAMES[:3]]] * 2
    content = json.loads(certificate.read_bytes())
    assert "differential privacy" in content["guarantee"]
    assert {*content["sites"]} == {*NAMES}
    assert [spent(tmp_path, name)[f"w{number}"] for number, name in enumerate(NAMES)] == [2, 2, 2, 1]


def test_a_hub_that_is_killed_at_any_message_gets_each_sum_once(place, tmp_path, seeded):
    """The n-th process of the hub is killed at its message 8 + 2n, before or after the site has it: those are
    sums of updates and metrics, and the last models. The run ends as one process leaves it, and each site has
    counted four releases, two a round."""
    asked = private(place)
    run(asked, tmp_path / "alone")
    sites, kills = opened(place, tmp_path), []

    class Dies(Within):
        left = itertools.count(1)

        def call(self, site, request, timeout, most):
            number = next(self.left)
            if number == self.at and number % 4:
                raise KeyboardInterrupt
            answer = super().call(site, request, timeout, most)
            if number == self.at:
                raise KeyboardInterrupt
            return answer

    for at in itertools.count(10, 2):
        transport = Dies(sites)
        transport.at, transport.left = at, itertools.count(1)
        try:
            federate(asked, tmp_path / "over", transport, TERMS, resume=at > 10)
            break
        except KeyboardInterrupt:
            kills.append(at)
    closed(sites)
    assert len(kills) > 5
    assert server(tmp_path / "over") == server(tmp_path / "alone")
    assert records(tmp_path / "over")[-1]["evaluation"] == records(tmp_path / "alone")[-1]["evaluation"]
    for number, name in enumerate(NAMES):
        assert spent(tmp_path, name) == {f"w{number}": 4 * 2.0**-2}


@pytest.mark.usefixtures("forked_workers")
def test_the_noise_of_workers_and_of_one_process_is_the_same(place, tmp_path):
    """Drawn from the run's seed, site by site."""
    asked = private(place, sites=3, rounds=1)
    run(asked, tmp_path / "one")
    two = asked.model_copy(update={"engine": asked.engine.model_copy(update={"workers": 2})})
    run(two, tmp_path / "two")
    assert server(tmp_path / "one", 1) == server(tmp_path / "two", 1)


def test_a_site_that_is_missing_costs_a_second_attempt(place, tmp_path):
    """Site d is away when it is asked in round 2. The others answer twice, with other words, and the sum is
    of three. In round 3 d is still left out, and c is away, too: two are too few, the round merges and
    measures nothing, and the run continues. In round 4 d is back. Each site counts its own releases."""
    answers, gone = {}, {"d": {2}, "c": {3}}

    def before(site, request):
        header, _ = unpack(request)
        if header["kind"] == "sum" and header["round"] in gone.get(site[-1], ()):
            raise UnreachableError("it is switched off")

    class Listens(Within):
        def call(self, site, request, timeout, most):
            answer = super().call(site, request, timeout, most)
            header, _ = unpack(request)
            if header["kind"] == "sum" and header["exchange"]:
                answers.setdefault((site, header["round"]), []).append(unpack(answer)[1])
            return answer

    sites = opened(place, tmp_path)
    federate(private(place, rounds=4), tmp_path / "over", Listens(sites, before), TERMS)
    closed(sites)
    first, second, third, fourth = records(tmp_path / "over")
    assert (first["sum_attempts"], first["sum_sites"]) == (1, [*NAMES])
    assert (second["sum_attempts"], second["sum_sites"]) == (2, [*NAMES[:3]])
    # d is away in round 3, too: three are asked, and after one of them is gone two are left.
    assert third["sum_sites"] == []
    assert {each["client"] for each in third["dropped"]} == {"w0", "w1", "w2", "w3"}
    assert {each["client"]: each["reason"] for each in second["dropped"]} == {"w3": "it is switched off"}
    one, other = answers["site-a", 2]
    assert one != other
    assert len(one) == len(other)
    counts = {name: round(sum(spent(tmp_path, name).values()) * 4) for name in NAMES}
    assert counts == {"site-a": 8, "site-b": 8, "site-c": 5, "site-d": 4}
    assert second["evaluation"]["not_evaluated"] == {"w3": "its site is away"}
    assert [each["evaluation"]["clients"] for each in (first, second, fourth)] == [4, 3, 3]
    assert "evaluation" not in third


def test_garbage_of_a_site_merges_nothing_and_names_what_it_can(place, tmp_path):
    """Random words with a valid signature: the sum cannot be, and no one can see of whom. A byte flipped on
    the way is found by the signature, costs its site the round, and is named."""
    sites = opened(place, tmp_path)
    mask = Participant.mask

    def garbage(participant, words, session):
        masked = mask(participant, words, session)
        lies = session.round == 1 and participant.member.site == "site-b"
        return np.random.default_rng(0).integers(0, 2**32, len(masked), dtype=np.uint32) if lies else masked

    class Flips(Within):
        def call(self, site, request, timeout, most):
            answer = super().call(site, request, timeout, most)
            header, _ = unpack(request)
            flips = header["kind"] == "sum" and header["round"] == 2 and site == "site-c"
            return answer[:-1] + bytes([answer[-1] ^ 1]) if flips else answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Participant, "mask", garbage)
        federate(private(place), tmp_path / "over", Flips(sites), TERMS)
    closed(sites)
    first, second = records(tmp_path / "over")
    assert first["sum_sites"] == []
    assert {each["reason"] for each in first["dropped"]} == {"there was no sum"}
    assert (second["sum_attempts"], second["sum_sites"]) == (2, ["site-a", "site-b", "site-d"])
    (dropped,) = second["dropped"]
    assert dropped["client"] == "w2"
    assert "not signed by its identity for this sum: it was changed" in dropped["reason"]


def logged(folder, name, what):
    """The entries of a site's log of one kind."""
    (path,) = (folder / f"site-{name}/log").glob("*.jsonl")
    return [each for line in path.read_text().splitlines() if (each := json.loads(line))["what"] == what]


class Records(Within):
    """Keeps all that the hub gets."""

    def __init__(self, sites):
        super().__init__(sites)
        self.got = []

    def call(self, site, request, timeout, most):
        answer = super().call(site, request, timeout, most)
        self.got.append((site, unpack(request)[0], answer))
        return answer


def test_the_hub_gets_only_the_sum_of_metrics(place, tmp_path, seeded):
    """The control: without secure sums, it reads client w2's accuracy in an answer of site c. With them, no
    answer has a metric, and the words of site c are not those of a sum. Whole numbers in plain Python, from
    the metrics in the sites' logs and the same noise, give the words of all and the means in rounds.jsonl."""
    sites = opened(place, tmp_path / "plain")
    hub = Records(sites)
    summary = federate(experiment(place, method="feddpo", rounds=1), tmp_path / "control", hub, TERMS)
    closed(sites)
    (read,) = [unpack(a)[1] for site, h, a in hub.got if (site, h["kind"]) == ("site-c", "evaluate")]
    assert json.loads(read)["preference_accuracy"] == summary["preference_accuracy"]["per_client"]["w2"]

    sites = opened(place, tmp_path)
    hub = Records(sites)
    federate(private(place, rounds=1), tmp_path / "over", hub, TERMS)
    closed(sites)
    assert not [site for site, _, answer in hub.got if b"accuracy" in answer]
    words = {s: unpack(a)[1] for s, h, a in hub.got if h["kind"] == "sum" and not h["exchange"]}
    own = [entry["figures"] for name in NAMES for entry in logged(tmp_path, name, "metrics")]
    names = ("baseline_accuracy", "preference_accuracy", "reward_accuracy")
    assert len(own) == 4
    # z = 2, n = 4, c = 0, C = √3/2.
    step = 2 * (3**0.5 / 2) / (2 * 2**24)
    noise = [discrete_gaussian(64, 24, Key(5).at("draw", n).numpy().bytes) for n in range(4)]
    total = [sum(int(draw[at]) for draw in noise) for at in range(64)]
    for at, name in enumerate(names):
        total[at] += sum(math.trunc((each[name] - 0.5) / step) for each in own)
    assert total == [
        (sum(map(int, column)) + 2**31) % 2**32 - 2**31
        for column in zip(*(np.frombuffer(each, "<u4") for each in words.values()), strict=True)
    ]
    (record,) = records(tmp_path / "over")
    for name, word in zip(names, total, strict=False):
        metric = record["evaluation"][name]
        assert metric["mean"] == pytest.approx(min(max(0.5 + step * word / 4, 0), 1), abs=1e-12)
        assert metric["noise"] == pytest.approx(2 * (3**0.5 / 2) / 4)
        assert (metric["per_client"], metric["mean_alone"]) == ({}, 4)
    grid = MetricSum(names).grid(private(place).privacy, 4, 4)
    assert grid.plausible(np.array(total))
    assert not grid.plausible(np.frombuffer(words["site-c"], "<i4").astype(np.int64))


def test_a_site_that_lets_no_metrics_leave_is_not_asked(place, tmp_path):
    """The others' metrics are summed in one attempt: a refusal would cost them another release."""
    sites = opened(place, tmp_path)
    sites["site-b"].close()
    content = sites["site-b"].config.model_dump()
    content["limits"]["evaluate"] = False
    sites["site-b"] = Site(type(sites["site-b"].config).model_validate(content))
    warned = toy.Warned()
    federate(private(place, rounds=1), tmp_path / "over", Within(sites), TERMS, callbacks=[warned])
    closed(sites)
    (record,) = records(tmp_path / "over")
    assert record["evaluation"]["not_evaluated"] == {"w1": "its site lets no metrics leave"}
    counts = {name: round(sum(spent(tmp_path, name).values()) * 4) for name in NAMES}
    assert counts == {"site-a": 2, "site-b": 1, "site-c": 2, "site-d": 2}
    assert "round 1: the metrics of 1 client are in no sum: its site lets no metrics leave" in warned.texts


def test_too_few_sites_are_refused_before_the_run(place, tmp_path):
    with pytest.raises(ConfigError, match="colluders = 3 needs 5 sites, and the run has 4"):
        federate(private(place, colluders=3), tmp_path / "over", Within({}), TERMS)
    with pytest.raises(ConfigError, match="a federation has its own sites"):
        federate(private(place, sites=3), tmp_path / "over", Within({}), TERMS)


# A hub that lies


class Hub:
    """Speaks to site a alone, in the name of the hub and of any other site's process."""

    settings: typing.ClassVar = {}

    def __init__(self, place, folder, **limits):
        self.place, self.folder = place, folder
        self.run, self.model = "0" * 16, b""
        self.text = experiment_for_sites(private(place, rounds=4))
        self.clients = ["w0", "w1", "w2", "w3"]
        self.start_run()
        self.open(**limits)
        self.body = encode(Download({}, {}))

    def start_run(self):
        """Begin another run, with new keys of the other sites."""
        self.run = f"{int(self.run, 16) + 1:016x}"
        self.others = {
            name: Participant(own, "wards", self.run, name)
            for name, own in identities(self.folder).items()
            if name != "site-a"
        }
        if hasattr(self, "site"):
            self.join()

    def open(self, **limits):
        """Start site a anew, and join it."""
        if hasattr(self, "site"):
            self.site.close()
        self.site = site_of(self.place, self.folder, 0, limits=limits, **self.settings)
        self.join()

    def join(self):
        """Send site a the run."""
        self.say(kind="join", experiment=self.text)
        header, _ = self.say(kind="start", members=self.clients, unseen=[])
        self.own = Keys.model_validate(header["keys"])

    def say(self, body=b"", **fields):
        common = {"format": FORMAT, "prefed": VERSION, "federation": "wards", "run": self.run}
        return unpack(self.site.answer(pack(body, **common, **fields)))

    def request(
        self, number=1, attempt=1, without=(), size=None, body=None, clients=("w0",), exchange="train"
    ):
        members = [self.own, *(Keys.of(o.member) for n, o in self.others.items() if n not in without)]
        asked = Sum(
            run=self.run,
            federation="wards",
            round=number,
            exchange=exchange,
            attempt=attempt,
            size=size or (1024 if exchange == "train" else 64),
            members=members,
            clients=dict.fromkeys(clients),
            order=order_digest(self.text, self.clients, []),
        )
        session = asked.of(settings_of(self.text, self.clients, []), body or self.body)
        return asked.bound(body or self.body), session

    def sum(self, body=None, **fields):
        """The site's words, or why there are none."""
        request, _ = self.request(body=body, **fields)
        header, words = self.say(
            body or self.body, **request.model_dump(exclude={"run", "federation", "format", "prefed"})
        )
        return words or header.get("refused") or header.get("failed") or next(k for k in header if header[k])


class Draws(Here):
    """A visit gives an update of ones, and an evaluation an accuracy, whatever was asked."""

    accuracy = 0.75

    def build(self, factory, threads):
        self.due = {"fingerprint": {"data": self.data, "model": ""}, "exchanges": ["train"]}
        self.due["metrics"] = ["preference_accuracy"]

    def give(self, task, state, timeout):
        message = json.dumps({"preference_accuracy": self.accuracy}).encode()
        self.due = {"message": message, "withheld": "", "note": "", "state": None}


def remember_data(monkeypatch):
    """Let :class:`Draws` know the data that a site joins a run with."""
    join = Site._join

    def joins(site, *arguments):
        answer = join(site, *arguments)
        Draws.data = site._read_order(arguments[0])["data"]
        return answer

    monkeypatch.setattr(Site, "_join", joins)


@pytest.fixture
def hub(place, tmp_path, monkeypatch):
    """A site whose one client has an update of 1024 ones."""
    monkeypatch.setattr(site_module, "Worker", Draws)
    monkeypatch.setattr(site_module, "decode_upload", lambda message: message)
    monkeypatch.setattr(site_module, "flat_steps", lambda message: np.ones(1024) * 1e-3)
    remember_data(monkeypatch)
    hub = Hub(place, tmp_path)
    yield hub
    hub.site.close()


def spent_by_w0(hub):
    return round(Releases(hub.folder / "site-site-a").spent().get("w0", 0) * 4)


def test_an_attempt_has_one_answer_whatever_was_killed(hub):
    """The same request has the same bytes, also after a restart. Any other one under this attempt has none:
    other members, another model. The next attempt has other noise; there is no third."""
    first = hub.sum()
    assert hub.sum() == first
    assert hub.sum(without=["site-d"]) == "used"
    other = encode(Download({}, {"model": 1}))
    assert hub.sum(body=other) == "used"
    assert spent_by_w0(hub) == 1
    old = hub.own
    hub.open()
    assert hub.own.key != old.key
    assert hub.own.identity == old.identity
    assert hub.sum() == "used"
    new, hub.own = hub.own, old
    assert hub.sum() == first
    hub.own = new
    second = hub.sum(attempt=2, without=["site-d"])
    assert isinstance(second, bytes)
    assert spent_by_w0(hub) == 2
    with pytest.raises(ValueError, match="attempt"):
        hub.request(attempt=3)
    hub.sum(number=2)
    assert "there is no sum in 'train' in round 1" in hub.sum()


def test_a_site_that_is_killed_at_any_write_answers_an_attempt_once(hub, monkeypatch):
    """In each run the site is killed at a later write of its first sum, half done, and started again. Then a
    sum of other sites under this attempt, and the old request: at most one of them has words. Any noise is
    in one sum only, and every release is in the ledger."""
    sums, mask = [], Participant.mask

    def masked(participant, words, session):
        sums.append((words.tobytes(), session.name))
        return mask(participant, words, session)

    monkeypatch.setattr(Participant, "mask", masked)
    outcomes = []
    for at in itertools.count(1, 2):
        hub.start_run()
        counted = spent_by_w0(hub)
        with monkeypatch.context() as patch:
            failing = Failing(at)
            for module in (files, audit_log):
                patch.setattr(module, "os", failing)
            with suppress(Crash):
                hub.sum()
        old = hub.own
        hub.open()
        other, new = hub.sum(without=["site-d"]), hub.own
        hub.own = old
        answers = [each for each in (other, hub.sum()) if isinstance(each, bytes)]
        hub.own = new
        assert len(answers) <= 1
        assert isinstance(hub.sum(attempt=2, without=["site-d"]), bytes)
        assert spent_by_w0(hub) - counted > len(answers)
        outcomes.append((other == "used", len(answers)))
        if failing.left > 0:
            break
    assert {*outcomes} == {(False, 1), (True, 0), (True, 1)}
    assert len({words for words, _ in sums}) == len({name for _, name in sums}) == len(sums)


def test_a_restored_disk_repeats_no_mask(hub):
    """The state folder is put back to before the answer, and the site started from it: an old request is of
    old keys, which this process has not. A new one has other masks, which the sites that had answered do not
    take off: what is left is random."""
    kept = hub.folder / "kept"
    shutil.copytree(hub.site._state, kept)
    first, old = hub.sum(), hub.own
    hub.site.close()
    shutil.rmtree(hub.site._state)
    shutil.copytree(kept, hub.site._state)
    hub.open()
    new, hub.own = hub.own, old
    assert "does not have this site with its own keys" in hub.sum()
    hub.own = new
    again = hub.sum()
    assert isinstance(again, bytes)
    words = [np.frombuffer(each, "<u4").astype(np.int64) for each in (first, again)]
    assert abs(np.mean((words[0] - words[1]) % 2**32) / 2**32 - 0.5) < 5 / np.sqrt(12 * 1024)


def test_what_the_hub_gets_from_all_is_the_noised_sum(hub):
    """The others' masks, from their own processes, take site a's off: 1024 times 0.001/γ and noise of 2^k."""
    _, session = hub.request()
    words = [np.frombuffer(hub.sum(), "<u4")]
    words += [other.mask(np.zeros(1024, np.uint32), session) for other in hub.others.values()]
    grid = Grid.of(private(hub.place).privacy, 4, 4)
    noise = sum_words(words) - np.trunc(np.ones(1024) * 1e-3 / grid.step)
    assert noise.std() == pytest.approx(2**grid.bits, rel=5 / np.sqrt(2 * 1024))
    assert abs(noise.mean()) < 5 * 2**grid.bits / np.sqrt(1024)


def test_a_lying_hub_is_refused_by_name(hub):
    """An invented site, too few sites, a changed header, a client of another site, a single upload."""
    stranger = Participant(Identity(b"s" * 32), "wards", hub.run, "site-x")
    known = dict(hub.others)
    hub.others["site-x"] = stranger
    assert "site 'site-x' has no fingerprint in [sites]" in hub.sum()
    hub.others = {**known, "site-b": Participant(Identity(b"s" * 32), "wards", hub.run, "site-b")}
    refused = hub.sum()
    pinned = hub.site.config.sites["site-b"]
    assert "site 'site-b' has another key" in refused
    assert pinned in refused
    assert fingerprint(Identity(b"s" * 32).public) in refused
    hub.others = known
    assert "a sum of 2 sites: 3 are the fewest" in hub.sum(without=["site-c", "site-d"])
    assert "the client is not at this site" in hub.sum(clients=("w1",))
    # Without a client, too, names of files are not the hub's choice, and lengths have a limit.
    assert "there is no sum in '../../x'" in hub.sum(clients=(), exchange="../../x")
    assert "longer than [limits] message_mb allows" in hub.sum(clients=(), size=2**40)
    request, _ = hub.request()
    fields = request.model_dump(exclude={"run", "federation", "format", "prefed"})
    for changed in ({"round": 2}, {"size": 1023}, {"exchange": "score"}, {"digest": "0" * 64}):
        header, _ = hub.say(hub.body, **{**fields, **changed})
        assert "changed on its way" in header["refused"]
    for kind, exchange in (("visit", "train"), ("evaluate", "")):
        task = {"kind": kind, "client": "w0", "round": 1, "exchange": exchange, "asked": 0, "receipt": None}
        header, _ = hub.say(hub.body, **task, order=fields["order"])
        assert "no upload and no metrics of a single client leave this site" in header["refused"]
    assert spent_by_w0(hub) == 0


class Flips:
    """Carries messages to site a; one bit of one of them is another one at its end.

    Args:
        which: the way, ``to`` or ``from`` the site, and the kind of the request.
        place: of the byte, as a share of the message's length.
    """

    def __init__(self, site, which, place, bit):
        self.site, self.which, self.place, self.bit = site, which, place, bit

    def flipped(self, which, message):
        if which != self.which:
            return message
        self.which, changed = None, bytearray(message)
        changed[int(self.place * len(message))] ^= 1 << self.bit
        return bytes(changed)

    def call(self, site, request, timeout, most):
        kind = unpack(request)[0]["kind"]
        answer = self.site.answer(self.flipped(("to", kind), request))
        return self.flipped(("from", kind), answer)


MESSAGES = [(way, kind) for kind in ("join", "start", "sum") for way in ("to", "from")]


@settings(
    max_examples=4 * settings().max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(MESSAGES),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 7),
    st.sampled_from(["train", ""]),
)
def test_a_flipped_bit_of_any_message_is_refused_or_changes_nothing(hub, which, place, bit, exchange):
    """Of a run's join, start and sum, of updates or metrics, and of the answers to them: the hub reads why
    there are no words, or words in which the other sites' masks cancel, and what is left is the site's update
    and noise."""
    hub.start_run()
    sites = Sites(Flips(hub.site, which, place, bit), "wards", hub.run, 1.0)
    sites.secure = True
    why = ""
    try:
        sites.join("site-a", hub.text)
        sites.start("site-a", hub.clients, [], "")
    except FederationError as error:
        why = str(error)
    if why:
        assert "site 'site-a' " in why
        return
    sites.keys |= {name: Keys.of(other.member) for name, other in hub.others.items()}
    size = 1024 if exchange else 64
    attempt = Attempt(1, exchange, NAMES, size, {"site-a": {"w0": None}})
    request = sites.request_sum(attempt, NAMES, 1, hub.body)["site-a"]
    answer, words = sites.sum("site-a", request, hub.body, 1.0)
    if not words:
        assert answer.refused or answer.failed or answer.unknown or answer.used
        return
    session, asked = sites.session(request, hub.body), private(hub.place).privacy
    masks = [other.mask(np.zeros(size, np.uint32), session) for other in hub.others.values()]
    grid = Grid.of(asked, 4, 4) if exchange else MetricSum(("preference_accuracy",)).grid(asked, 4, 4)
    update = np.full(size, 1e-3) if exchange else np.eye(1, size)[0] / 4
    noise = sum_words([np.frombuffer(words, "<u4"), *masks]) - np.trunc(update / grid.step)
    assert np.abs(noise).max() < 8 * 2**grid.bits


@pytest.mark.parametrize("accuracy", [0.75, math.nan, 1.5, -1e-9])
def test_a_metric_outside_its_range_is_named_at_the_site_and_in_no_sum(hub, monkeypatch, accuracy):
    """Without noise, one sees what the site adds: 0 for a client without valid metrics, and it counts."""
    monkeypatch.setattr(Draws, "accuracy", accuracy)
    monkeypatch.setattr(Grid, "noise", lambda grid, size, source: np.zeros(size, np.int64))
    _, session = hub.request(exchange="")
    words = [np.frombuffer(hub.sum(exchange=""), "<u4")]
    words += [other.mask(np.zeros(64, np.uint32), session) for other in hub.others.values()]
    grid = MetricSum(("preference_accuracy",)).grid(private(hub.place).privacy, 4, 4)
    valid = accuracy == 0.75
    assert sum_words(words).tolist() == [math.trunc(0.25 / grid.step) if valid else 0, *[0] * 63]
    failed = [(entry["client"], entry["failed"]) for entry in hub.site.log.entries() if "failed" in entry]
    why = "its metrics are left out: 'preference_accuracy' is missing or not between 0 and 1"
    assert failed == ([] if valid else [("w0", why)])
    assert spent_by_w0(hub) == 1


@pytest.mark.parametrize("field", ["identity", "key", "signature"])
def test_a_key_that_was_changed_is_named_when_a_run_starts(hub, field):
    """Otherwise every site would refuse the sums, and none could say why."""

    class Changes:
        def call(self, site, request, timeout, most):
            header, body = unpack(hub.site.answer(request))
            if "keys" in header:
                text = header["keys"][field]
                header["keys"][field] = ("1" if text[0] == "0" else "0") + text[1:]
            return pack(body, **header)

    sites = Sites(Changes(), "wards", hub.run, 1.0)
    sites.join("site-a", hub.text)
    with pytest.raises(FederationError, match="'site-a' in this run is not signed by its identity: it was"):
        sites.start("site-a", hub.clients, [], "")
    assert "site-a" not in sites.keys


def test_a_budget_ends_sums(place, tmp_path, hub):
    """A limit below the ε of one release at z = 2 lets none pass."""
    hub.open(epsilon=1.0)
    assert "would reach epsilon" in hub.sum()
    assert spent_by_w0(hub) == 0


@pytest.mark.parametrize("full", ["claim", "ledger", "answer"])
def test_nothing_leaves_that_is_not_on_disk(hub, monkeypatch, full):
    """The disk is full for one of the three files: no words. The release is counted where it may have been
    drawn, and a second attempt works."""
    write = site_module.files.write
    number = {"claim": 0, "ledger": 1, "answer": 2}[full]
    seen = []

    def fails(path, data, **options):
        if path.parent.name == "answers" or path.name == "spent.json":
            seen.append(path)
            if len(seen) == number + 1:
                raise OSError("No space left on device")
        write(path, data, **options)

    monkeypatch.setattr(site_module.files, "write", fails)
    assert hub.sum() == "OSError: see the site's log"
    monkeypatch.setattr(site_module.files, "write", write)
    assert spent_by_w0(hub) == (1 if full == "answer" else 0)
    assert isinstance(hub.sum(attempt=2, without=["site-d"]), bytes)
