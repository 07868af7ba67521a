"""What `prefed site export` writes, compared with models of a run in one process, and what a hub says it
lacks."""

import hashlib
import json
import shutil
import stat
from pathlib import Path

import pytest
import tomli_w
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import toy
from commands import prefed_
from federating import Here, Within, closed, experiment, site_config
from prefed import run
from prefed.core import Download, Key, files
from prefed.core.wire import encode
from prefed.models.tiny import make_tiny
from prefed.networks.federation import final_models
from prefed.networks.federation import site as site_module
from prefed.networks.federation.federate import Terms, federate
from prefed.networks.federation.final_models import Published, export_client
from prefed.networks.federation.messages import VERSION
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import UnreachableError
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.runs.export import write_model
from prefed.runs.finished_run import RunError
from prefed.ui.cli import app
from toy import Warned
from workers import CLIENTS
from workers import place as place

TERMS = Terms("wards", ("one", "two"), wait=0.0)
DATA = {"one": "w0", "two": "w1w2"}


def configs(place, folder, **changes):
    return {name: site_config(place, folder, data, name=name, **changes) for name, data in DATA.items()}


def over_sites(asked, made, out, transport=Within, **options):
    """Run over sites that are opened for it and closed afterwards; gives what the hub was warned of."""
    sites, warned = {name: Site(config) for name, config in made.items()}, Warned()
    try:
        callbacks = [*options.pop("callbacks", ()), warned]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(site_module, "Worker", Here)
            federate(asked, out, transport(sites), TERMS, callbacks=callbacks, **options)
    finally:
        closed(sites)
    return warned.texts


def exported(folder):
    """All tensors of an exported folder: of the adapter, and of the parts that are in none."""
    return {
        f"{path.name} {name}": value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert one
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        assert (value == other[name]).all(), name


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    """FedPDPO over two sites, three rounds, and the same in one process."""
    folder = tmp_path_factory.mktemp("finished")
    asked, made = experiment(place), configs(place, folder)
    run(asked, folder / "alone")
    over_sites(asked, made, folder / "over")
    return folder, made


def test_a_clients_model_is_that_of_the_run_in_one_process(finished, tmp_path):
    """Bit for bit. FedPDPO's clients have a bottleneck, a head and a reward head of their own."""
    folder, made = finished
    for client in CLIENTS:
        write_model(folder / "alone", tmp_path / f"alone-{client}", client=client)
        got = export_client(made["one" if client == "w0" else "two"], tmp_path / client, client=client)
        assert_equal(exported(tmp_path / client), exported(tmp_path / f"alone-{client}"))
        assert "head" in got.more


@pytest.mark.parametrize(
    ("method", "changes"),
    [("fedper", {"shared_layers": 1}), ("perfedavg", {}), ("fedbiscuit", {"lr": 0.05})],
)
def test_other_methods_models_are_too(place, tmp_path, method, changes):
    """One with personal layers, one that trains on the client's pairs before it predicts, and one with a
    selector for each cluster of clients."""
    asked, made = experiment(place, method, rounds=1, **changes), configs(place, tmp_path)
    run(asked, tmp_path / "alone")
    over_sites(asked, made, tmp_path / "over")
    write_model(tmp_path / "alone", tmp_path / "one", client="w1")
    export_client(made["two"], tmp_path / "here", client="w1")
    assert_equal(exported(tmp_path / "here"), exported(tmp_path / "one"))


@pytest.fixture(scope="module")
def tasty(place, tmp_path_factory):
    """FedVPA over two sites, and the same in one process: models infer tastes from clients' pairs."""
    folder = tmp_path_factory.mktemp("tasty")
    asked, made = experiment(place, "fedvpa", rounds=1), configs(place, folder)
    run(asked, folder / "alone")
    warned = over_sites(asked, made, folder / "over")
    return folder, made, warned


def test_a_taste_is_inferred_at_the_site(tasty, tmp_path):
    folder, made, _ = tasty
    write_model(folder / "alone", tmp_path / "alone", client="w1")
    export_client(made["two"], tmp_path / "here", client="w1")
    assert_equal(exported(tmp_path / "here"), exported(tmp_path / "alone"))


def says(words, code=0):
    """What a command prints, errors after all else, on one line."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return " ".join([*result.stdout.split(), *result.stderr.split()])


def figures(words):
    result = prefed_(*[str(word) for word in words])
    return json.loads(result)


def test_a_hub_says_what_it_has_of_tastes(tasty, place, tmp_path):
    """The model that all share is a folder; a client's own is at its site, which is named. The population's
    taste, the one that a client sent and that of a file judge the pairs of a file at the hub, as they do in
    the run in one process, except the client's: there it is inferred from its pairs under the last model."""
    folder, _, warned = tasty
    assert [text for text in warned if "no adapter" in text] == [
        "no adapter was saved: an adapter cannot contain a selector with a latent taste; export the client's "
        "folder"
    ]
    over, alone = folder / "over", folder / "alone"
    says(["export", over, "--out", tmp_path / "shared"])
    says(["export", alone, "--out", tmp_path / "shared-alone"])
    assert_equal(exported(tmp_path / "shared"), exported(tmp_path / "shared-alone"))
    assert "client 'w1' is stored at site 'two'" in says(["export", over, "--client", "w1"], 1)
    judged = ["--test", place / "w0.jsonl", "--everyone", "--json"]
    for taste in ("population", f"infer:{place / 'w1.jsonl'}"):
        got = figures(["evaluate", over, *judged, "--taste", taste])
        neighbour = figures(["evaluate", alone, *judged, "--taste", taste])
        assert got["choice_loss"] == neighbour["choice_loss"]
    assert figures(["evaluate", over, *judged, "--taste", "w1"])["taste"] == "w1"
    for taste in ("own", "infer:4"):
        assert "needs pairs that are stored" in says(["evaluate", over, *judged, "--taste", taste], 1)
    assert "or use --taste population or --taste CLIENT here" in says(["evaluate", over, *judged], 1)


def test_a_hub_aligns_a_model_of_its_own(tasty, tmp_path):
    """It has no client's prompt, and can leave none out: all six of its own are there."""
    folder, *_ = tasty
    shutil.copytree(folder / "over", tmp_path / "over")
    lines = [json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    settings = {"completions": 2, "max_new_tokens": 4, "epochs": 1, "batch_size": 4}
    words = [word for name, value in settings.items() for word in ("--set", f"align.{name}={value}")]
    words += ["--set", "align.taste=population"]
    says(["align", tmp_path / "over", "--prompts", tmp_path / "prompts.jsonl", *words])
    summary = json.loads((tmp_path / "over/align/summary.json").read_text())
    assert (summary["prompts"]["kept"], summary["prompts"]["clients"]) == (6, 0)


# What the hub sends, and what a site keeps of it


def state_of(made, site="two"):
    (order,) = Path(made[site].state).glob("runs/*/order.json")
    return order.parent


def test_what_is_kept_is_its_owners_alone_and_once(finished):
    """FedPDPO gives all clients the same: one file for two clients, of a federation in which nothing of it is
    secret but whose it is."""
    _, made = finished
    folder = state_of(made) / "published"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.glob("*.safetensors"))) == 1
    given = Published(state_of(made)).clients()
    assert set(given) == {"w1", "w2"}
    assert {entry.round for entry in given.values()} == {3}


@pytest.fixture
def copied(finished, tmp_path):
    """Site two with a copy of its state, and how the hub asks it of the run's end again."""
    _, made = finished
    shutil.copytree(made["two"].state, tmp_path / "two")
    config = made["two"].model_copy(update={"state": str(tmp_path / "two")})
    site, folder = Site(config), state_of({"two": config})
    given, message = Published(folder).read("w1")
    order = json.loads((folder / "order.json").read_bytes())["order"]

    def asks(body=message, meant=None, **changes):
        fields = {"prefed": VERSION, "format": 1, "federation": "wards", "run": folder.name}
        fields |= {"order": order, "kind": "published"}
        fields |= {"round": 3, "clients": {"w1": given.receipt}, "model": given.model, **changes}
        text = json.dumps([fields, hashlib.sha256(body).hexdigest()], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest() if meant is None else meant
        return unpack(site.answer(pack(body, **fields, digest=digest)))[0]

    yield config, folder, asks
    site.close()


def kept(folder):
    return {path.name: path.read_bytes() for path in (folder / "published").iterdir()}


RECEIPT = "000003-" + "0" * 32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clients": {"w0": None}}, "the client is not at this site"),
        ({"clients": {"w1": RECEIPT}}, "the private state of client 'w1' is not at this site"),
        ({"clients": {"w1": "../../secret"}}, "clients.w1: Value error, not a valid receipt of a private"),
        ({"clients": ["w1"]}, "invalid request (published): clients: Input should be a valid dictionary"),
        ({"model": 3}, "invalid request (published): model: Input should be a valid string"),
        ({"round": True}, "invalid request (published): round: Input should be a valid integer"),
        ({"round": 2}, "round 2 is over: this site already answered in round 3"),
        ({"round": 4}, "round 4 does not exist: the run has 3 rounds"),
        ({"body": b"tensors"}, "cannot be read"),
        ({"meant": "0" * 64}, "the request was changed on its way: its digest is another"),
        ({"federation": "others"}, "belongs to the federation 'wards'"),
    ],
)
def test_a_site_keeps_nothing_else(copied, changes, reason):
    """Another site's client, a private state that it has not, another round: what was kept stays."""
    _, folder, asks = copied
    before = kept(folder)
    assert reason in asks(**changes)["refused"]
    assert kept(folder) == before


def test_a_site_that_knows_another_order_asks_for_it(copied):
    _, folder, asks = copied
    before = kept(folder)
    assert asks(order="0" * 16) == {"unknown": True}
    assert kept(folder) == before


def test_a_site_that_dies_in_between_has_what_it_had(copied, monkeypatch, tmp_path):
    """The message is written and the index is not: the model of before is there, and the next message takes
    the half one away."""
    config, folder, asks = copied
    other = encode(Download({}, {"other": 1.0}))
    write, before = files.write, kept(folder)

    def dies(path, data, **options):
        if path.name == "clients.json":
            raise KeyboardInterrupt
        write(path, data, **options)

    with monkeypatch.context() as patched:
        patched.setattr(final_models.files, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            asks(other)
    assert before.items() < kept(folder).items()
    export_client(config, tmp_path / "model", client="w1")
    assert asks(other) == {}
    assert len(list((folder / "published").glob("*.safetensors"))) == 2
    assert asks(other, clients={"w1": None, "w2": None}) == {}
    assert [path.read_bytes() for path in (folder / "published").glob("*.safetensors")] == [other]


class Away(Within):
    """Site two is gone when the run has ended; ``refuses``: it is of a version that knows no such request."""

    refuses = False

    def call(self, site, request, timeout, most):
        header, _ = unpack(request)
        if site == "two" and header["kind"] == "published":
            if self.refuses:
                return pack(refused="unknown kind of request")
            raise UnreachableError("it has left")
        return super().call(site, request, timeout, most)


class Older(Away):
    refuses = True


def test_a_site_that_was_away_gets_its_models_from_a_finished_run(place, tmp_path):
    """The run ends well, and says which site has not got them; so it does for a site that refuses. Resumed,
    it sends them again."""
    asked, made = experiment(place, "feddpo", rounds=1), configs(place, tmp_path)
    for transport, reason in ((Away, "it has left"), (Older, "unknown kind of request")):
        warned = over_sites(asked, made, tmp_path / "over", transport, resume=transport is Older)
        (text,) = [text for text in warned if "models" in text]
        assert text.startswith("site 'two' did not receive the models of its clients")
        assert reason in text
        assert "run the same command with --resume to send them again" in text
    with pytest.raises(RunError, match="has not sent the final models yet: it sends them at the end"):
        export_client(made["two"], tmp_path / "early", client="w1")
    assert not (tmp_path / "early").exists()
    assert not [text for text in over_sites(asked, made, tmp_path / "over", resume=True) if "models" in text]
    export_client(made["two"], tmp_path / "model", client="w1")
    # All clients have one model: the hub judges it on pairs of its own, and has it under each client's name.
    run(asked, tmp_path / "alone")
    over, alone = (
        figures(["evaluate", tmp_path / name, "--test", place / "w0.jsonl", "--json"])
        for name in ("over", "alone")
    )
    assert over["dpo_loss"] == alone["dpo_loss"]
    write_model(tmp_path / "over", tmp_path / "hub", client="w1")
    assert_equal(exported(tmp_path / "hub"), exported(tmp_path / "model"))


def test_a_run_that_goes_on_takes_its_models_along(place, tmp_path):
    """After round 1 the hub sends the models. The run continues to round 4, and the hub dies before its end:
    the private states of round 1 are gone by then, and so are its models. Then there are those of round 4."""
    made = configs(place, tmp_path)
    over_sites(experiment(place, rounds=1), made, tmp_path / "over")
    more = experiment(place, rounds=4)
    with pytest.raises(KeyboardInterrupt):
        over_sites(more, made, tmp_path / "over", resume=True, callbacks=[toy.InterruptAt(2 * 6 + 4)])
    with pytest.raises(RunError, match="was resumed after round 1, the round of the stored final models"):
        export_client(made["one"], tmp_path / "early")
    over_sites(more, made, tmp_path / "over", resume=True)
    run(more, tmp_path / "alone")
    write_model(tmp_path / "alone", tmp_path / "one", client="w0")
    export_client(made["one"], tmp_path / "here")
    assert_equal(exported(tmp_path / "here"), exported(tmp_path / "one"))


# The command


def site_file(config, path):
    content = config.model_dump(exclude_none=True)
    path.write_text(tomli_w.dumps(content))
    return path


def test_the_command_writes_a_model_that_loads(place, tmp_path):
    """Ditto's are adapters. The site makes up names: its own serve, and those that the hub knows. While
    `prefed site` runs, the state folder is its alone, and the command reads it."""
    made = configs(place, tmp_path, disclose={"pairs": True, "names": False})
    over_sites(experiment(place, "ditto", rounds=1), made, tmp_path / "over")
    config = site_file(made["two"], tmp_path / "site.toml")
    got = next(name for name in Published(state_of(made)).clients())
    own = next(
        name
        for name, known in json.loads((state_of(made) / "order.json").read_bytes())["names"].items()
        if known == got
    )
    running = Site(made["two"])
    said = says(["site", "export", config, "--client", own, "--out", tmp_path / "model"])
    running.close()
    assert f"adapter: {tmp_path / 'model'}" in said
    assert f"model = PeftModel.from_pretrained(base, '{tmp_path / 'model'}')" in said
    base = AutoModelForCausalLM.from_pretrained(place / "model", dtype="float32")
    assert PeftModel.from_pretrained(base, tmp_path / "model").peft_config["default"].r == 2
    name = state_of(made).name[:4]
    words = ["site", "export", config, "--run", name, "--out", tmp_path / "again"]
    says([*words, "--client", got])
    assert_equal(exported(tmp_path / "again"), exported(tmp_path / "model"))
    assert "already exists; choose another --out, or --force" in says([*words, "--client", got], 1)
    says([*words, "--client", got, "--force", "--merge"])
    assert (tmp_path / "again" / "config.json").exists()
    assert "this site has 2 clients: select one with --client: w1, w2" in says([*words, "--force"], 1)
    assert "did you mean 'w2'" in says([*words, "--force", "--client", "w22"], 1)
    words[4] = "zzzz"
    assert "no run starts with 'zzzz'; the runs are" in says([*words, "--force"], 1)


def test_another_model_and_other_data_are_named(finished, place, tmp_path):
    """Pairs that changed do not matter as long as the site has its tokens: it has those of the run."""
    _, made = finished
    shutil.copytree(made["one"].state, tmp_path / "one")
    here = {"state": str(tmp_path / "one")}
    other = made["one"].model_copy(
        update=here | {"data": {**made["one"].data, "train": str(place / "w1.jsonl")}}
    )
    export_client(other, tmp_path / "model")
    shutil.rmtree(tmp_path / "one" / "cache")
    with pytest.raises(RunError, match="data changed since the run started"):
        export_client(other, tmp_path / "model")
    again = made["one"].model_copy(update=here)
    export_client(again, tmp_path / "again")
    assert_equal(exported(tmp_path / "again"), exported(tmp_path / "model"))
    assert not (tmp_path / "one" / "cache").exists()
    texts = [json.loads(line)["prompt"] for line in (place / "w0.jsonl").read_text().splitlines()]
    make_tiny(tmp_path / "tiny", texts, Key(1), layers=2, width=32, heads=2, vocabulary=280, steps=2)
    moved = again.model_copy(
        update={"model": again.model.model_copy(update={"name": str(tmp_path / "tiny")})}
    )
    shutil.copytree(Path(made["one"].state) / "cache", tmp_path / "one" / "cache")
    with pytest.raises(RunError, match="tiny is not the one used in run"):
        export_client(moved, tmp_path / "model")
