"""Forgetting in a federation: the replay over the sites is the run that never had the client, every site
deletes what it has of the old one, and the certificate has their statements."""

import json

import pytest
import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

import toy
from federating import Here, Within, closed, experiment, site_config
from prefed import Experiment, run
from prefed.core import files
from prefed.networks.federation import site as site_module
from prefed.networks.federation.approvals_withdrawals import withdraw
from prefed.networks.federation.audit_log import SentLog, check_chain
from prefed.networks.federation.experiment import load_federated
from prefed.networks.federation.federate import Terms, federate
from prefed.networks.federation.forget import forget, plan
from prefed.networks.federation.messages import FORMAT, VERSION, SiteError
from prefed.networks.federation.privacy_ledger import Releases
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import FederationError, UnreachableError
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.privacy.secure import Identity
from prefed.runs.finished_run import RunError
from prefed.runs.forget import plan as plan_here
from toy import outcome
from workers import place as place

TERMS = Terms("wards", ("one", "two"), wait=0.0)
DATA = {"one": "w0", "two": "w1w2"}


@pytest.fixture
def opened(place, tmp_path, monkeypatch):
    """The sites, which train in this process, and what withdraws a client and opens its site again."""
    monkeypatch.setattr(site_module, "Worker", Here)
    limits = {"minimum_cohort": 1}
    configs = {n: site_config(place, tmp_path, data, name=n, limits=limits) for n, data in DATA.items()}
    sites = {name: Site(config) for name, config in configs.items()}

    def withdraws(client, site="two"):
        sites[site].close()
        withdraw(configs[site], client, "Dr Ada", "asked for it")
        sites[site] = Site(configs[site])

    yield sites, withdraws
    closed(sites)


def numbers(out):
    """What a run leaves, apart from what only one machine has: tokens, private states, tastes."""
    left = outcome(out)
    left["checkpoint/COMMIT.json"] = left["checkpoint/COMMIT.json"]["private"]
    apart = ("cache/", "fed", "forgotten/", "config.toml", "summary.json", "checkpoint/clients/", "tastes")
    return {name: content for name, content in left.items() if not name.startswith(apart)}


def never(place, path, asked):
    tables = asked.tables()
    tables["data"]["exclude"] = ["w2"]
    run(Experiment.model_validate(tables), path)
    return numbers(path)


@pytest.mark.parametrize(
    "method",
    ["fedpdpo", "fedamp", "fedvpa"],
    ids=["private parts", "models of others", "posteriors of others"],
)
def test_forget_over_sites_is_never_had(place, opened, tmp_path, method):
    """Once its client withdrew, the sites train again, although the hub dies in between. What they have of
    the old run is gone; both say so, and one signs it."""
    sites, withdraws = opened
    asked, old = experiment(place, method, rounds=2), tmp_path / "old"
    federate(asked, old, Within(sites), TERMS)
    name, before = json.loads((old / "federation.json").read_text())["run"], outcome(old)
    with pytest.raises(SiteError, match=r"'two' refuses: 'w2' did not withdraw: .* `prefed site withdraw"):
        forget(old, ["w2"], Within(sites), TERMS)
    assert {*(tmp_path / "site-w0/runs" / name).iterdir()} > {tmp_path / "site-w0/runs" / name / "order.json"}
    identity = Identity.at(sites["one"].config.identity, create=True)
    withdraws("w2")
    assert not [*(tmp_path / "site-w1w2/runs").rglob("*@*")]
    with pytest.raises(FederationError, match="site 'two' refuses: 'w2' withdrew"):
        federate(experiment(place, method, rounds=3), old, Within(sites), TERMS, resume=True)
    with pytest.raises(KeyboardInterrupt):
        forget(old, ["w2"], Within(sites), TERMS, callbacks=[toy.InterruptAt(3)])
    assert outcome(old) == before
    (certificate,) = forget(old, ["w2"], Within(sites), TERMS)
    assert numbers(old) == never(place, tmp_path / "never", asked) != {}
    assert outcome(old)["rounds.jsonl"] != before["rounds.jsonl"]
    content = files.loads_with_digest(certificate.read_bytes())
    assert certificate == old / "forgotten/w2.json"
    assert (content["missed"], content["pairs"], content["after"]) == (0, [8, 0, 2], 0)
    assert not (tmp_path / "old.forgetting").exists()
    for site, said in content["sites"].items():
        stated, opened_site = json.loads(said["statement"]), sites[site]
        state = opened_site._state
        assert (stated["run"], stated["site"], stated["clients"]) == (name, site, ["w2"])
        assert f"runs/{name}/published" in stated["deleted"]
        (left,) = (state / "runs" / name).iterdir()
        assert left.name == "order.json"
        assert (b"w2" in left.read_bytes()) == (site == "two")
        assert check_chain(SentLog(state / "log"), stated["logged"]).faults == []
        about = {"format": FORMAT, "prefed": VERSION, "federation": "wards", "run": name}
        answer, _ = unpack(opened_site.answer(pack(**about, kind="start", members=["w0"], unseen=[])))
        assert "this site deleted what it had of this run" in answer["refused"]
    one, two = content["sites"]["one"], content["sites"]["two"]
    assert "signature" not in two
    assert one["identity"] == identity.public.hex()
    public = Ed25519PublicKey.from_public_bytes(identity.public)
    public.verify(bytes.fromhex(one["signature"]), one["statement"].encode())
    assert forget(old, ["w2"], Within({}), TERMS) == [certificate]


def test_a_site_that_is_gone_is_named(place, opened, tmp_path):
    """It can confirm later. What it says about another run, or signs with another key, is no confirmation."""
    sites, withdraws = opened
    old = tmp_path / "old"
    federate(experiment(place, rounds=1), old, Within(sites), TERMS)
    withdraws("w2")

    def gone(site, request):
        if (site, unpack(request)[0]["kind"]) == ("one", "forget"):
            raise UnreachableError("it is switched off")

    said = []
    (certificate,) = forget(old, ["w2"], Within(sites, gone), TERMS, report=said.append)

    def confirmed():
        return files.loads_with_digest(certificate.read_bytes())["sites"]

    assert confirmed()["one"] == {"missing": "it is switched off"}
    assert "site 'one' has not confirmed that it deleted the run: it is switched off" in said
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(site_module, "statement_of", lambda federation, run, *rest, **done: "{}")
        forget(old, ["w2"], Within(sites), TERMS)
    assert confirmed()["one"] == {"missing": "the statement of site 'one' is about something else"}
    Identity.at(sites["one"].config.identity, create=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Identity, "sign", lambda self, text: bytes(64))
        forget(old, ["w2"], Within(sites), TERMS)
    assert "is not signed by its key" in confirmed()["one"]["missing"]
    forget(old, ["w2"], Within(sites), TERMS)
    assert {*confirmed()["one"]} == {"statement", "key", "identity", "signature"}


def test_all_of_a_site_withdraw(place, opened, tmp_path):
    """The site takes no part in the replay, and confirms. Without the rest of the sites there is none. The
    experiment names no data, as most hubs' do."""
    sites, withdraws = opened
    old, file = tmp_path / "old", tmp_path / "experiment.toml"
    tables = experiment(place, rounds=1).tables()
    del tables["data"]["train"], tables["data"]["partition"]
    file.write_text(tomli_w.dumps(tables))
    federate(load_federated(file, None, []), old, Within(sites), TERMS)
    withdraws("*")
    with pytest.raises(FederationError, match="0 of 1 sites connected within 0 seconds; missing: one"):
        forget(old, ["w1", "w2"], Within({"two": sites["two"]}), TERMS)
    certificates = forget(old, ["w1", "w2"], Within(sites), TERMS)
    assert [path.name for path in certificates] == ["w1.json", "w2.json"]
    assert json.loads((old / "summary.json").read_text())["sites"] == {"one": ["w0"]}
    load_federated(file, None, ["data.exclude=['w1', 'w2']"])
    assert all("statement" in said for said in json.loads(certificates[0].read_text())["sites"].values())


def test_the_plan_and_noise(place, opened, tmp_path):
    """With noise, which sites draw from the system, nothing is equal, and the others' ε counts both runs."""
    sites, withdraws = opened
    privacy = {"kind": "local", "clip": 0.1, "noise_multiplier": 1000.0, "delta": 1e-5}
    asked = experiment(place, "feddpo", rounds=1)
    noisy = Experiment.model_validate(asked.tables() | {"privacy": privacy, "merge": {"weights": "uniform"}})
    promised = []
    for number, each in enumerate((asked, noisy)):
        out = tmp_path / str(number)
        federate(each, out, Within(sites), TERMS)
        promised.append(plan(out, ["w2"]).guarantee)
    assert "bit-identical" in promised[0]
    assert promised[1].startswith("differential privacy only")
    actions = {each.where: each.action for each in plan(out, ["w2"]).descendants}
    assert actions["site one"] == actions["site two"] == "deleted"
    assert actions["checkpoint"] == "made again"
    spent = Releases(sites["one"]._state).spent()["w0"]
    withdraws("w2")
    (certificate,) = forget(out, ["w2"], Within(sites), TERMS)
    assert json.loads(certificate.read_text())["guarantee"] == promised[1]
    assert Releases(sites["one"]._state).spent()["w0"] == 2 * spent > 0
    out = tmp_path / "0"
    with pytest.raises(RunError, match="no client is called 'w3'"):
        plan(out, ["w3"])
    with pytest.raises(RunError, match="no other client is left"):
        plan(out, ["w0", "w1", "w2"])
    with pytest.raises(RunError, match="with --hub"):
        plan_here(out, ["w2"])
