"""A federation's parts, without NVIDIA FLARE: versions of private states, limits, requests, what is
reported."""

import errno
import stat
from pathlib import Path
from threading import Event

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from commands import prefed_
from federating import Receipts, Within, experiment, site_config
from prefed.config import ConfigError, Experiment, StopConfig, TrackConfig, to_toml
from prefed.core import files
from prefed.core.text import size
from prefed.data import FederatedDataset
from prefed.engines import TaskResult
from prefed.engines.tasks import Task
from prefed.networks.federation.audit_log import SentLog, status_lines
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.experiment import HELD, load_federated, own_experiment, reported_names
from prefed.networks.federation.federate import Terms, experiment_for_sites, federate
from prefed.networks.federation.hub import FederationBackend, Sites
from prefed.networks.federation.messages import FORMAT, VERSION
from prefed.networks.federation.site import Site
from prefed.networks.federation.site_limits import RefusalError, check_experiment, check_members, check_task
from prefed.networks.federation.unix_socket import Door, ask, pack, unpack, when_gone
from prefed.networks.federation.vault import Vault, site_secret
from prefed.store import StoreError
from prefed.ui.cli import app
from waiting import WATCHDOG
from workers import CLIENTS


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), max_size=12))
def test_the_version_that_the_hub_names_is_always_there(tmp_path_factory, rounds):
    """A client, and a hub that commits a round or is killed before it does and repeats it.

    Each round is a number of visits (exchanges), whether the hub merges their uploads, and whether it
    commits. A reference keeps the state that each receipt stands for; reading the receipt in force must give
    that state, whatever was killed before.
    """
    vault = Vault(tmp_path_factory.mktemp("vault"), b"secret")
    committed, number, left = None, 1, {None: None}
    for visits, merges, commits in rounds:
        current = committed
        for visit in range(visits):
            assert vault.read("w", current) == left[current]
            state = f"{current} {number} {visit}".encode()
            receipt = vault.keep("w", number, state)
            vault.tidy("w", current, number)
            left[receipt] = state
            current = receipt if merges else current
        if commits:
            committed, number = current, number + 1
    assert vault.read("w", committed) == left[committed]


def test_versions_do_not_pile_up(tmp_path):
    """After a visit of round 5 from the version of round 4 there are these two."""
    vault, receipt = Vault(tmp_path / "v", b"secret"), None
    for number in range(1, 6):
        new = vault.keep("w", number, str(number).encode())
        vault.tidy("w", receipt, number)
        receipt = new
    assert len(list((tmp_path / "v").iterdir())) == 2


def test_private_states_are_their_owners_alone_and_damage_is_seen(tmp_path):
    vault = Vault(tmp_path / "v", b"secret")
    receipt = vault.keep("ward/7", 1, b"state")
    (path,) = (tmp_path / "v").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "v").stat().st_mode) == 0o700
    path.write_bytes(b"stale")
    with pytest.raises(StoreError, match="damaged"):
        vault.read("ward/7", receipt)
    path.unlink()
    with pytest.raises(StoreError, match="missing"):
        vault.read("ward/7", receipt)
    with pytest.raises(StoreError, match="the hub sent an invalid receipt of a private state"):
        vault.read("ward/7", "../../secret")


def test_receipts_do_not_show_whether_states_are_equal(tmp_path):
    """Equal states of two clients, of two rounds and of two sites have different receipts."""
    one, other = Vault(tmp_path / "a", b"one"), Vault(tmp_path / "b", b"other")
    receipts = [
        one.keep("w", 1, b"s"),
        one.keep("v", 1, b"s"),
        one.keep("w", 2, b"s"),
        other.keep("w", 1, b"s"),
    ]
    digests = {receipt.partition("-")[2] for receipt in receipts}
    assert len(digests) == 4
    assert site_secret(tmp_path / "s") == site_secret(tmp_path / "s") != site_secret(tmp_path / "t")


def test_a_door_answers_and_says_when_it_is_gone():
    with Door(lambda request: request[::-1]) as door:
        assert stat.S_IMODE(door.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(door.path.parent.stat().st_mode) == 0o700
        assert ask(door.path, b"abc" * 100_000) == b"cba" * 100_000
        when_gone(door.path, lambda: None)
    with pytest.raises(OSError, match=r"No such file|refused"):
        ask(door.path, b"abc")


def test_who_waits_looks_and_gives_up():
    """Nobody answers before the asker has looked twice."""
    looks, looked = [], Event()

    def look():
        looks.append(1)
        if len(looks) == 2:
            looked.set()

    with Door(lambda request: b"yes" if looked.wait(WATCHDOG) else b"no") as door:
        with pytest.raises(TimeoutError):
            ask(door.path, b"", 0.01)
        assert ask(door.path, b"", WATCHDOG, look, 0.01) == b"yes"


def test_an_administrator_limits_runs(tmp_path, subtests):
    for changes, asked, message in (
        ({"disclose": {"pairs": False}}, {}, "does not report"),
        ({"limits": {"methods": ["feddpo"]}}, {}, "fedpdpo is not one of feddpo"),
        ({"limits": {"rounds": 2}}, {}, "3 requested, at most 2 allowed"),
        ({"limits": {"minimum_pairs": 4}}, {}, "minimum_pairs = 4"),
        ({"limits": {"threads": 2}}, {"engine": {"threads": 3}}, r"\[limits\] threads: 3 .* at most 2 "),
        ({}, {"engine": {"threads": 10_000}}, r"\[limits\] threads: 10,000 requested"),
        ({}, {"data": {"max_length": 10_000_000}}, r"\[limits\] max_length: 10,000,000 .* at most 4,096 "),
        ({"limits": {"max_length": 99}}, {"data": {"max_length": 100}}, "max_length: 100 .* at most 99 "),
        ({}, {"engine": {"max_tokens": 65_537}}, r"\[limits\] max_tokens: 65,537 .* at most 65,536 "),
        ({"limits": {"rank": 3}}, {"model": {"lora": {"rank": 4}}}, r"\[limits\] rank: 4 .* at most 3 "),
        ({}, {"model": {"bottleneck": {"width": 4097}}}, r"\[limits\] width: 4,097 .* at most 4,096 "),
        ({}, {"model": {"reward": {"width": 9000}}}, r"\[limits\] width: 9,000 requested"),
        ({}, {"model": {"variational": {"latent": 5000}}}, r"\[limits\] width: 5,000 requested"),
        ({}, {"model": {"variational": {"widths": [8, 6000]}}}, r"\[limits\] width: 6,000 requested"),
        ({}, {"model": {"mixture": {"count": 7000}}}, r"\[limits\] width: 7,000 requested"),
        ({}, {"method": "fedvpa", "samples": 8000}, r"\[limits\] width: 8,000 requested"),
        ({}, {"method": "centralized"}, "this site's pairs do not leave it"),
        ({}, {"method": "decdpo"}, r"\[graph\], \[fleet\] and decdpo are not available in a federation"),
    ):
        with subtests.test(changes=changes, asked=asked):
            config = site_config(tmp_path, tmp_path, "w0", **changes)
            with pytest.raises(RefusalError, match=message):
                check_experiment(hub_asks(tmp_path, **asked), config)


def hub_asks(place, engine=None, data=None, model=None, **method):
    """What a hub may ask for, with changes to its tables."""
    tables = experiment(place, **method).tables()
    asked = {"engine": engine, "data": data, "model": model}
    changed = {name: {**tables[name], **(table or {})} for name, table in asked.items()}
    return Experiment.from_tables({**tables, **changed}, "the test")


def test_what_an_administrator_allows_or_sets_is_not_refused(tmp_path):
    """The largest numbers allowed; and with threads of the site's own whatever the hub asks for."""
    most = {
        "engine": {"threads": 3, "max_tokens": 700},
        "data": {"max_length": 600},
        "model": {"lora": {"rank": 5}, "variational": {"widths": [300, 64]}},
    }
    limits = {"threads": 3, "max_length": 600, "max_tokens": 700, "rank": 5, "width": 300}
    config = site_config(tmp_path, tmp_path, "w0", limits=limits)
    check_experiment(hub_asks(tmp_path, **most), config)
    own = site_config(tmp_path, tmp_path, "w0", threads=2)
    check_experiment(own_experiment(to_toml(hub_asks(tmp_path, engine={"threads": 10_000})), own), own)


def test_an_administrator_limits_cohorts_exchanges_and_evaluations(tmp_path):
    """A cohort of half of 4 is 2, below 3; of half of 6 it is 3."""
    config = site_config(
        tmp_path, tmp_path, "w0", limits={"minimum_cohort": 3, "exchanges": ["train"], "evaluate": False}
    )
    half = experiment(tmp_path).model_copy(
        update={"cohort": experiment(tmp_path).cohort.model_copy(update={"fraction": 0.5})}
    )
    with pytest.raises(RefusalError, match="2 clients, at least 3 required"):
        check_members(half, config, 4)
    check_members(half, config, 6)
    check_task(Task("visit", "w0", 1, "train", b""), half, config, [8, 0, 2], ["train"])
    for task, message in (
        (Task("visit", "w0", 1, "score", b""), "'score' is not one of train"),
        (Task("visit", "w0", 4, "train", b""), "round 4 does not exist: the run has 3 rounds"),
        (Task("visit", "w0", 2, "train", b"", asked=10**6), "a visit cannot be requested in round 1000000"),
        (Task("evaluate", "w0", 1, "", b""), "no metrics"),
    ):
        with pytest.raises(RefusalError, match=message):
            check_task(task, half, config, [8, 0, 2], ["train", "score"])


def test_sites_read_nothing_that_the_hub_names(tmp_path):
    """The hub's file names its own data and model; a site's experiment has the site's, and all the rest."""
    config = site_config(tmp_path, tmp_path, "w0", threads=2)
    hub = experiment(tmp_path)
    own = own_experiment(to_toml(hub), config)
    assert own.data.train.path == str(tmp_path / "w0.jsonl")
    assert own.engine.threads == 2
    assert (own.method, own.data.test_fraction, own.seed) == (hub.method, 0.2, 3)
    fused = hub.model_copy(update={"model": hub.model.model_copy(update={"kernels": "liger"})})
    assert own_experiment(to_toml(fused), config) == own, "a site chooses its kernels"
    got = experiment_for_sites(hub)
    assert str(tmp_path) not in got
    assert own_experiment(got, config) == own
    tracked = hub.model_copy(update={"track": TrackConfig(to="tensorboard")})
    assert experiment_for_sites(tracked) == got
    scored = experiment(tmp_path, method="feddpo", objective="ppo", reward_model="hub/model")
    with pytest.raises(ConfigError, match="ppo needs a reward model"):
        own_experiment(to_toml(scored), config)
    for table in ('[fleet]\nname = "uniform"', "[stop]\npatience = 2"):
        with pytest.raises(ConfigError, match=r"\[(fleet|stop)\] is not available in a federation"):
            own_experiment(f"{to_toml(hub)}\n{table}\n", config)


def test_what_a_federation_has_not_is_refused_by_hub_and_site(tmp_path):
    """Hub and sites know the seed, and take noise of it off again; a best round has no receipts."""
    asked = experiment(tmp_path, method="feddpo")
    changes = {"kind": "local", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "draws": "seed"}
    noisy = Experiment.from_tables(
        {**asked.tables(), "merge": {"weights": "uniform"}, "privacy": changes}, "the test"
    )
    terms = Terms("wards", ("w0",))
    with pytest.raises(ConfigError, match=r"\[privacy\] draws = 'seed'"):
        federate(noisy, tmp_path / "run", None, terms)
    tastes = experiment(tmp_path, method="fedvpl", posterior_clip=1.0, posterior_noise=1.0)
    with pytest.raises(ConfigError, match="posterior_noise is drawn from the seed"):
        federate(tastes, tmp_path / "run", None, terms)
    sizes = experiment(tmp_path, method="fedvpa", trust_start="sizes")
    with pytest.raises(ConfigError, match="which a site does not know"):
        federate(sizes, tmp_path / "run", None, terms)
    known = noisy.privacy.model_copy(update={"kind": "central", "draws": None, "secret_cohorts": True})
    with pytest.raises(ConfigError, match="cohorts are drawn from the seed, which every site knows"):
        federate(noisy.model_copy(update={"privacy": known}), tmp_path / "run", None, terms)
    diagnosed = Experiment.from_tables(
        {**asked.tables(), "evaluate": {"diagnose": 1, "diagnostic_pairs": 2}}, "the test"
    )
    with pytest.raises(ConfigError, match=r"\[evaluate\] diagnose"):
        federate(diagnosed, tmp_path / "run", None, terms)
    with pytest.raises(ConfigError, match=r"\[evaluate\] diagnose"):
        own_experiment(experiment_for_sites(diagnosed), site_config(tmp_path, tmp_path, "w0"))
    with pytest.raises(ConfigError, match=r"\[stop\]"):
        federate(asked.model_copy(update={"stop": StopConfig()}), tmp_path / "run", None, terms)
    with pytest.raises(ConfigError, match=r"\[privacy\] draws = 'seed'"):
        own_experiment(experiment_for_sites(noisy), site_config(tmp_path, tmp_path, "w0"))
    assert not (tmp_path / "run").exists()


def test_a_file_may_leave_out_what_sites_have(tmp_path):
    path = tmp_path / "e.toml"
    path.write_text('[model]\nname = "m"\n[method]\nname = "feddpo"\n[data]\nmax_length = 64\n')
    loaded = load_federated(path, None, ["rounds=2"])
    assert (loaded.data.train.path, loaded.data.max_length, loaded.rounds) == (HELD, 64, 2)
    # What a hub leaves out has a name, but not at a site that draws its clients.
    text = experiment_for_sites(load_federated(path, None, ["data.exclude=['w0']"]))
    drawn = site_config(tmp_path, tmp_path, "w0")
    assert own_experiment(text, drawn).data.exclude == ("w0",)
    drawn.data["partition"] = {"by": "iid", "clients": 2}
    assert own_experiment(text, drawn).data.exclude == ()


def request(**header):
    return pack(format=FORMAT, prefed=VERSION, federation="wards", run="0" * 16, **header)


@pytest.fixture
def site(tmp_path):
    made = Site(site_config(tmp_path, tmp_path, "w0", limits={"message_mb": 1}))
    yield made
    made.close()


@given(st.binary(max_size=200))
def test_no_bytes_disturb_a_site(data):
    """It answers whatever comes, with a refusal; here without its disk."""
    site = object.__new__(Site)
    site.config = SiteConfig(federation="f", name="n", data={}, model={"name": "m"})
    site._tell = lambda text: None
    site.log = type("Log", (), {"add": lambda self, what, **fields: None})()
    header, _ = unpack(site.answer(data))
    assert header.keys() & {"refused", "failed"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            pack(kind="hello", format=99, prefed="2.0.0"),
            f"the hub has prefed 2.0.0 (message format 99) and this site prefed {VERSION} (message format "
            f"{FORMAT}): install the same version",
        ),
        (pack(kind="hello", format=FORMAT, prefed="9.1.0"), "the hub has prefed 9.1.0 (message format 1)"),
        (
            pack(kind="visit", format=FORMAT, prefed=VERSION, federation="wards", run="../../etc"),
            "does not name its run",
        ),
        (
            pack(kind="visit", format=FORMAT, prefed=VERSION, federation="others", run="0" * 16),
            "belongs to the federation 'wards'",
        ),
        (request(kind="shell"), "unknown kind"),
        (pack(kind="foreign", asked="'south' asked for sys.shell"), "'south' asked for sys.shell"),
        (b"\xff" * 40, "not a message: 40 bytes"),
        (request(kind="join", experiment="rounds ="), "not TOML"),
        (bytes(2**20 + 1), "longer than"),
    ],
)
def test_what_a_site_refuses_is_in_its_log(site, message, reason):
    header, _ = unpack(site.answer(message))
    assert reason in header["refused"]
    (entry,) = site.log.entries()
    assert reason in entry["refused"]
    assert entry["what"] == "refused"


def test_a_visit_of_an_unknown_run_asks_for_the_run(site):
    answer = site.answer(request(kind="visit", client="w0", round=1, exchange="train", asked=0, order="x"))
    assert unpack(answer)[0] == {"unknown": True}


def test_errors_stay_at_the_site(site, tmp_path):
    """The site's file does not exist: its path must not reach the hub, and is in the log."""
    answer = site.answer(request(kind="join", experiment=experiment_for_sites(experiment(tmp_path))))
    header, _ = unpack(answer)
    assert str(tmp_path) not in header["failed"]
    (entry,) = site.log.entries()
    assert str(tmp_path) in entry["failed"]


def test_a_full_disk_is_a_failed_answer(site, monkeypatch):
    """Nothing can be written, the log included; the hub gets what failed, and no path of the site."""

    def full(path, *arguments, **options):
        raise files.write_error(path, 5, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(files, "write", full)
    monkeypatch.setattr(files, "append", full)
    monkeypatch.setattr(
        "prefed.networks.federation.site.own_dataset", lambda *_: FederatedDataset.without_pairs({})
    )
    answer = site.answer(request(kind="join", experiment=experiment_for_sites(experiment(Path("x")))))
    assert unpack(answer)[0] == {"failed": "WriteError: see the site's log"}


def test_two_processes_do_not_share_a_state_folder(site, tmp_path):
    """The remedy is one that `prefed site` has: it takes no --out."""
    with pytest.raises(StoreError, match=r"in use by process .*; stop it first: only one process") as caught:
        Site(site_config(tmp_path, tmp_path, "w0"))
    assert "--out" not in str(caught.value)


def test_made_up_names_are_the_sites_own(tmp_path):
    data = type("Data", (), {"clients": {"ada": None, "ben": None}})()
    config = site_config(tmp_path, tmp_path, "w0", disclose={"names": False, "pairs": True})
    names = reported_names(data, config, b"secret")
    assert names == reported_names(data, config, b"secret") != reported_names(data, config, b"other")
    assert all(got.startswith("site-w0-") and "ada" not in got for got in names.values())
    assert len(set(names.values())) == 2


def test_the_log_says_what_was_sent(tmp_path):
    log = SentLog(tmp_path / "log")
    log.add(
        "train", run="3fa9b2c4d5e6f708", round=1, client="w0", bytes=2000, tensors={"model": 5}, weight=8.0
    )
    log.add("refused", refused="round 4 does not exist: the run has 3 rounds")
    lines = list(status_lines(site_config(tmp_path, tmp_path, "w0", state=str(tmp_path)), 2))
    assert lines[-2].endswith(f"round 1  train  w0  {size(2000)}: model 5 numbers, weight 8")
    assert lines[-1].endswith("refused: refused: round 4 does not exist: the run has 3 rounds")
    assert any("sent 1 message, 2.0 kB" in line for line in lines)


def test_the_command_shows_limits_and_log(tmp_path):
    config = site_config(tmp_path, tmp_path, "w0", state="state", limits={"methods": ["feddpo"]})
    path = tmp_path / "site.toml"
    path.write_text(tomli_w.dumps(config.model_dump(exclude_none=True)))
    SentLog(tmp_path / "state" / "log").add("train", run="3fa9b2c4d5e6f708", round=1, client="w0", bytes=812)
    shown = prefed_("site", "status", path)
    assert "methods: feddpo; exchanges: all" in shown
    assert shown.rstrip().endswith("run 3fa9b2c4  round 1  train  w0  812 B")
    assert "use `prefed site CONFIG`" in CliRunner().invoke(app, ["site", "status", "a", "b"]).output


@pytest.mark.parametrize(
    "words", [["federate", "e.toml"], ["federation", "init", "wards.toml"], ["site", "site.toml"]]
)
def test_a_missing_package_is_named(words, tmp_path, monkeypatch):
    (tmp_path / "site.toml").write_text('federation = "w"\nname = "a"\n[data]\n[model]\nname = "m"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prefed.networks.federation.flare.find_spec", lambda name: None)
    shown = prefed_(*words, code=1)
    assert "pip install 'prefed[nvflare]'" in shown


class Echo:
    """A site whose uploads are the messages that it gets."""

    def answer(self, message):
        header, body = unpack(message)
        if header["kind"] == "hello":
            return pack(site="x")
        return pack(body, client=header["client"], withheld="", asked=header["asked"], receipt=None)


def backend(transport, warnings):
    homes = {client: f"site-{client}" for client in CLIENTS}
    return FederationBackend(
        Sites(transport, "wards", "0" * 16, 1.0), Receipts(), homes, 1.0, warnings.append
    )


def tasks(number):
    return [Task("visit", client, number, "train", client.encode()) for client in CLIENTS]


def test_a_site_that_is_away_costs_one_time_out():
    """Site w1 is off: one call to it in the first round, and hellos alone from then on, until it is back."""
    calls, sites, warnings = [], {f"site-{client}": Echo() for client in CLIENTS}, []
    transport = Within(sites, lambda site, message: calls.append((site, unpack(message)[0]["kind"])))
    gone = sites.pop("site-w1")
    with backend(transport, warnings) as sites_of_run:
        for number in (1, 2, 3):
            results = {result.client: result for result in sites_of_run.run(tasks(number))}
            assert results == {c: TaskResult(c, c.encode()) for c in ("w0", "w2")}
        assert [kind for site, kind in calls if site == "site-w1"] == ["visit"]
        sites["site-w1"] = gone
        for number in range(4, 50):
            results = {result.client for result in sites_of_run.run(tasks(number))}
            if len(results) == 3:
                break
        assert results == set(CLIENTS)
    assert "is away" in warnings[0]
    assert "is back" in warnings[1]


def test_refusals_and_failures_are_reasons_of_the_round():
    class Refuses(Echo):
        def answer(self, message):
            return pack(refused="[limits] exchanges")

    class Babbles(Echo):
        def answer(self, message):
            return b"\xff" * 40

    sites = {"site-w0": Refuses(), "site-w1": Babbles(), "site-w2": Echo()}
    with backend(Within(sites), []) as sites_of_run:
        results = {result.client: result.withheld for result in sites_of_run.run(tasks(1))}
    assert results == {
        "w0": "its site reports: [limits] exchanges",
        "w1": "its site reports: its answer is not a message",
        "w2": "",
    }
