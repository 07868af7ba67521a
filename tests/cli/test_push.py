"""``prefed export --card`` and ``prefed push``, against a stand-in for the hub's API."""

import json
import re
import tomllib

import pytest
from huggingface_hub import ModelCard, constants
from safetensors.torch import load
from typer.testing import CliRunner

from finished import small_experiment, small_place
from hub import TOKEN, stand_in
from prefed import Experiment
from prefed import run as run_experiment
from prefed.runs.export import name_base
from prefed.ui.cli import app


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs that share a model, share one next to personal ones, and share none; the base has a card."""
    folder = small_place(tmp_path_factory.mktemp("place"))
    (folder / "model/README.md").write_text("---\nlicense: cc-by-4.0\n---\n\n# A tiny model\n")
    for method in ("feddpo", "ditto", "local"):
        tree = small_experiment(folder)
        tree["method"]["name"] = method
        run_experiment(Experiment.model_validate(tree), folder / method)
    return folder


@pytest.fixture
def hub(monkeypatch):
    with stand_in() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def prefed_(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + repr(result.exception)
    assert TOKEN not in result.output
    return result.output


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def table(text, heading):
    """The rows of the table under a heading, as lists of cells."""
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_a_card_says_what_the_run_says(place, tmp_path):
    """Figures are those of summary.json; no path of this machine and no client's name is on it."""
    prefed_("export", place / "feddpo", "--card", "--out", tmp_path / "it")
    card = ModelCard.load(tmp_path / "it/README.md")
    assert card.data.library_name == "peft"
    assert card.data.license == "cc-by-4.0"
    assert card.data.base_model is None
    assert "feddpo" in card.data.tags
    summary = summary_of(place / "feddpo")
    got = {each.metric_name: each.metric_value for each in card.data.eval_results}
    assert got["preference accuracy"] == round(summary["preference_accuracy"]["mean"], 4)
    rows = {row[0]: row for row in table(card.text, "Evaluation")}
    assert rows["before"][1] == f"{summary['baseline_accuracy']['mean']:.1%}"
    assert rows["reward accuracy"][1] == f"{summary['reward_accuracy']['mean']:.1%}"
    settings = dict(row[:2] for row in table(card.text, "Training"))
    assert float(settings["method.lr"]) == 0.01
    assert settings["lora.rank"] == "2"
    for words in (
        "16 preference pairs from a dataset that is not public, held by 2 clients with 8 pairs each",
        "https://arxiv.org/abs/2605.20696",
        "cc-by-4.0, like the base model",
        "PeftModel.from_pretrained(base, 'path/to/this/folder')",
    ):
        assert words in card.text
    assert str(place) not in str(card)
    assert not re.search(r"\bleft\b|\bright\b", card.text)


def test_a_clients_card_has_its_own_figures_alone(place, tmp_path):
    """With 4 pairs of its own, Wilson's interval: for 2 of 4 it is 15.0% to 85.0%."""
    prefed_(
        *("export", place / "ditto", "--client", "left", "--card", "--license", "mit"),
        *("--out", tmp_path / "it"),
    )
    card = ModelCard.load(tmp_path / "it/README.md")
    own = summary_of(place / "ditto")["preference_accuracy"]["per_client"]["left"]
    wilson = {0: "0.0% to 49.0%", 1: "4.6% to 69.9%", 2: "15.0% to 85.0%", 3: "30.1% to 95.4%"}
    row = next(row for row in table(card.text, "Evaluation") if row[0] == "own model")
    assert row[1] == f"{own:.1%}"
    assert row[2] == {**wilson, 4: "51.0% to 100.0%"}[round(4 * own)]
    assert card.data.license == "mit"
    assert "The personal model of one client." in card.text
    assert not re.search(r"\bleft\b", card.text)


def test_the_shared_models_card_has_none_of_the_clients_own_models(place, tmp_path):
    prefed_("export", place / "ditto", "--card", "--out", tmp_path / "it")
    labels = [row[0] for row in table(ModelCard.load(tmp_path / "it/README.md").text, "Evaluation")][1:]
    assert labels == ["before", "shared model"]


def test_a_push_is_private_and_holds_what_an_export_holds(place, hub, tmp_path):
    """Weights go as large files, bit for bit; no file names a path of this machine."""
    prefed_("export", place / "feddpo", "--out", tmp_path / "it")
    got = prefed_("push", place / "feddpo", "ann/aligned")
    repo = hub.repos["ann/aligned"]
    assert repo.private
    assert repo.large == {"adapter_model.safetensors"}
    assert set(repo.files) == {path.name for path in (tmp_path / "it").iterdir()} | {"README.md"}
    exported = load((tmp_path / "it/adapter_model.safetensors").read_bytes())
    pushed = load(repo.files["adapter_model.safetensors"])
    assert exported.keys() == pushed.keys()
    assert all(exported[name].equal(pushed[name]) for name in exported)
    assert not [name for name, data in repo.files.items() if str(place).encode() in data]
    assert json.loads(repo.files["adapter_config.json"])["base_model_name_or_path"] == "model"
    card = repo.files["README.md"].decode()
    assert "# ann/aligned\n" in card
    assert "PeftModel.from_pretrained(base, 'ann/aligned')" in card
    assert "publishing the shared model\nto ann/aligned (private):" in got
    assert f"published: {hub.url}/ann/aligned/commit/" in got
    assert "--base NAME" in got
    assert not [name for name, data in repo.files.items() if TOKEN.encode() in data]


def test_a_base_on_the_hub_is_named_everywhere(place, hub):
    prefed_("push", place / "feddpo", "ann/aligned", "--public", "--base", "some/base", "--license", "mit")
    repo = hub.repos["ann/aligned"]
    assert not repo.private
    assert json.loads(repo.files["adapter_config.json"])["base_model_name_or_path"] == "some/base"
    card = ModelCard(repo.files["README.md"].decode())
    assert (card.data.base_model, card.data.license) == ("some/base", "mit")
    assert "AutoModelForCausalLM.from_pretrained('some/base', dtype='float32')" in card.text


def test_a_merged_model_names_no_path(place, hub):
    prefed_("push", place / "feddpo", "ann/whole", "--merge")
    repo = hub.repos["ann/whole"]
    assert repo.large == {"model.safetensors"}
    assert not [name for name, data in repo.files.items() if str(place).encode() in data]
    assert "AutoModelForCausalLM.from_pretrained('ann/whole')" in repo.files["README.md"].decode()


def test_a_whole_client_is_pushed_without_a_path(tmp_path):
    """The note that load_client reads names the base model; its other keys stay."""
    about = {"format": 1, "model": {"name": "/home/ann/model", "dtype": "float32"}, "needs": ["lora"]}
    (tmp_path / "prefed.json").write_text(json.dumps(about))
    name_base(tmp_path, "some/base")
    written = json.loads((tmp_path / "prefed.json").read_text())
    assert written == {**about, "model": {"name": "some/base", "dtype": "float32"}}


def test_a_clients_model_is_pushed_when_it_is_named_alone(place, hub):
    """Unasked, what is pushed is the file that the run itself left as the shared adapter, to the byte. A
    method that shares no model is refused, with the option that names a client's."""
    got = prefed_("push", place / "ditto", "ann/own", "--client", "left")
    assert "the personal model of client 'left': trained on its pairs, it may reproduce them" in got
    prefed_("push", place / "ditto", "ann/shared")
    own, shared = (hub.repos[f"ann/{name}"].files["adapter_model.safetensors"] for name in ("own", "shared"))
    assert shared == (place / "ditto/adapters/shared/adapter_model.safetensors").read_bytes()
    assert any(not value.equal(load(shared)[name]) for name, value in load(own).items())
    assert "local shares no model: choose a client" in prefed_("push", place / "local", "ann/none", code=1)
    assert "ann/none" not in hub.repos


def test_a_repository_that_is_there_is_replaced_when_asked_for(place, hub):
    """Files of an export go, other people's stay; neither a public nor a private one changes its readers."""
    prefed_("push", place / "feddpo", "ann/aligned")
    repo = hub.repos["ann/aligned"]
    repo.files |= {"model.safetensors": b"old", "notes.txt": b"mine", ".gitattributes": b"a"}
    refused = prefed_("push", place / "feddpo", "ann/aligned", code=1)
    assert "ann/aligned already exists" in refused
    assert "replace the model in it with --update" in refused
    assert "nothing was published" in refused
    assert "is private: leave out --public" in prefed_(
        "push", place / "feddpo", "ann/aligned", "--update", "--public", code=1
    )
    prefed_("push", place / "feddpo", "ann/aligned", "--update")
    assert (repo.commits, repo.private) == (2, True)
    assert {"notes.txt", ".gitattributes", "adapter_config.json"} <= set(repo.files)
    assert "model.safetensors" not in repo.files
    repo.private = False
    assert "is public: add --public" in prefed_("push", place / "feddpo", "ann/aligned", "--update", code=1)
    assert repo.commits == 2


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ({"POST /api/repos/create": 401}, "the hub rejected the token (401): run `hf auth login`"),
        ({"POST /api/repos/create": 403}, "the token has no write access to ann/aligned (403)"),
        ({"POST /api/repos/create": 409}, "already exists, or is being changed (409)"),
        ({"POST /api/repos/create": 500}, "the hub returned status 500 for ann/aligned (fails on request)"),
        ({"POST /api/repos/create": 0}, " failed ("),
        ({"POST /api/models": 409}, "ann/aligned exists and is empty: push again with --update"),
        ({"PUT /large": 403}, "ann/aligned exists and is empty: push again with --update"),
    ],
)
def test_what_fails_is_reported_in_a_line(place, hub, fail, message):
    hub.fail = fail
    got = prefed_("push", place / "feddpo", "ann/aligned", code=1)
    assert message in got
    error = got.partition("error: ")[2]
    assert len(error.strip().splitlines()) == 1
    assert not hub.repos or not hub.repos["ann/aligned"].files


def test_a_wrong_token_and_none(place, hub, monkeypatch):
    """Without a token, and for names that cannot be, nothing is sent."""
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    got = prefed_("push", place / "feddpo", "ann/aligned", code=1)
    assert "rejected the token (401)" in got
    assert "hf_wrong" not in got
    hub.seen.clear()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    assert "run `hf auth login`, or set HF_TOKEN" in prefed_("push", place / "feddpo", "ann/aligned", code=1)
    for name in ("aligned", "ann/a/b", "ann/a b"):
        assert "use OWNER/NAME" in prefed_("push", place / "feddpo", name, code=1)
    assert hub.seen == []


def test_the_token_is_written_nowhere(place, hub):
    prefed_("push", place / "feddpo", "ann/aligned")
    written = [path for path in place.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert written == []
    assert tomllib.loads((place / "feddpo/config.toml").read_text())["seed"] == 3
