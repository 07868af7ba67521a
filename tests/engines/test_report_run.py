"""What the models of a run write to the prompts of ``[report]``: kept round by round, and shown."""

import json
import shutil
import stat

import pytest

from federating import Here, Within, experiment, open_sites
from finished import small_experiment
from prefed import Experiment, load_run, read_run, run
from prefed.config import ConfigError
from prefed.core import Callback
from prefed.models import ModelConfig
from prefed.networks.federation import site as site_module
from prefed.networks.federation.federate import Terms, experiment_for_sites, federate
from prefed.runs.export import Export
from prefed.runs.responses import Models
from prefed.train.generation import Sampling
from prefed.ui.pages.card import model_card
from prefed.ui.pages.page import public_page, render, write_page
from workers import make_place

PROMPTS = ["Case 3:", "Case 17:"]


def fedper(place, rounds=3, **report):
    method = {"name": "fedper", "lr": 0.01, "local_steps": 3, "batch_size": 4}
    table = {"prompts": PROMPTS, "max_new_tokens": 6, **report}
    return Experiment.model_validate(small_experiment(place, rounds=rounds, method=method, report=table))


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    return run(fedper(place), tmp_path_factory.mktemp("runs") / "run").path


def rows(path):
    return [json.loads(line) for line in (path / "answers.jsonl").read_text("utf-8").splitlines()]


def test_the_answers_are_those_of_each_rounds_models(finished):
    """The base model's before round 1, then the shared one's and each client's own. After the last round
    they are what the finished run's models write."""
    known = rows(finished)
    models = [("shared", None), ("own", "left"), ("own", "right")]
    expected = [(0, "untouched", None), *((number, *model) for number in (1, 2, 3) for model in models)]
    got = [(row["round"], row["model"], row.get("client"), row["prompt"]) for row in known]
    assert got == [(*model, prompt) for model in expected for prompt in PROMPTS]
    loaded = Models(load_run(finished), Sampling(max_tokens=6, temperature=0))
    sides = {
        (0, "untouched", None): loaded.base(),
        (3, "shared", None): loaded.shared("left"),
        **{(3, "own", client): loaded.own(client) for client in ("left", "right")},
    }
    assert len({side.tensors.flat.numpy().tobytes() for side in sides.values()}) == 4
    for model, side in sides.items():
        batches = side._responses(dict(enumerate(map(side.ids, PROMPTS))), ())
        texts = dict(row for batch in batches for row in batch)
        own = [row["text"] for row in known if (row["round"], row["model"], row.get("client")) == model]
        assert own == [texts[0], texts[1]]
    assert stat.S_IMODE((finished / "answers.jsonl").stat().st_mode) == 0o600


def test_the_table_changes_no_number(place, finished, tmp_path):
    plain = fedper(place).model_copy(update={"report": None})
    run(plain, tmp_path / "run")
    for name in ("checkpoint/server@000003.safetensors", "adapters/shared/adapter_model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()
    assert not (tmp_path / "run" / "answers.jsonl").exists()


class Killed(Callback):
    """Ends the run in round 2, after its commit or, ``early``, between its answers and its commit."""

    def __init__(self, early):
        self.early, self.done = early, 0

    def on_task_end(self, what, done, of):
        if self.early and self.done == 1 and what == "evaluation":
            raise KeyboardInterrupt

    def on_round_end(self, record):
        self.done = record["round"]
        if self.done == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("early", [True, False])
def test_a_resumed_run_has_the_same_answers(place, finished, tmp_path, early):
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(fedper(place), path, callbacks=[Killed(early)])
    assert {row["round"] for row in rows(path)} == {0, 1, 2}
    run(fedper(place), path, resume=True)
    assert (path / "answers.jsonl").read_bytes() == (finished / "answers.jsonl").read_bytes()


def test_more_rounds_leave_no_answers_of_what_was_the_last(place, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    run(fedper(place, rounds=4), tmp_path / "run", resume=True)
    assert {row["round"] for row in rows(tmp_path / "run")} == {0, 1, 2, 4}


def test_page_and_cards_show_them_and_a_public_page_does_not(finished, tmp_path):
    record = read_run(finished)
    page = render(record)
    for words in (
        "What the models write",
        "right&#39;s own model",
        "Round by round: shared model",
        "Case 17:",
    ):
        assert words in page
    assert "What the models write" not in public_page(finished)
    write_page(record, tmp_path / "report.html")
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o600
    model = ModelConfig.model_validate(record.config["model"])
    for client, of in ((None, ("shared", None)), ("right", ("own", "right"))):
        export = Export(client, None, aligned=False, taste=None, merged=False, more=(), model=model)
        card = model_card(record, export)
        after = card.partition("## Responses")[2].partition("## Cost")[0].split("Case 17:")[1]
        text = next(row.text for row in reversed(record.answers) if (row.model, row.client) == of)
        assert card.count("this model:") == 2
        assert "left" not in card
        assert all(line in after for line in text.strip().split())


def test_a_method_without_personal_models_has_the_shared_answers_alone(place, tmp_path):
    table = {"prompts": "Case 3:", "max_new_tokens": 4}
    run(Experiment.model_validate(small_experiment(place, report=table)), tmp_path / "run")
    assert [(row["round"], row["model"]) for row in rows(tmp_path / "run")] == [
        (0, "untouched"),
        (1, "shared"),
        (2, "shared"),
    ]


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"clients": ["lefd"]}, "[report] clients: no client is called 'lefd'; did you mean 'left'?"),
        ({"prompts": ["x" * 70]}, "[report] prompts: 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx': the prompt"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_the_first_round(place, tmp_path, report, message):
    with pytest.raises(ConfigError) as error:
        run(fedper(place, **report), tmp_path / "run")
    assert str(error.value).startswith(message)
    assert not (tmp_path / "run").exists()


def test_a_federations_hub_has_the_shared_models_answers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(site_module, "Worker", Here)
    (tmp_path / "place").mkdir()
    place = make_place(tmp_path / "place")
    table = {"prompts": PROMPTS[:1], "max_new_tokens": 4}
    named = experiment(place, method="fedper", rounds=2).tables()
    asked = Experiment.model_validate({**named, "report": table})
    assert PROMPTS[0] not in experiment_for_sites(asked)
    transport = Within(open_sites(place, tmp_path, ("w0", "w1")))
    federate(asked, tmp_path / "run", transport, Terms("wards", tuple(transport.sites)))
    assert [(row["round"], row["model"]) for row in rows(tmp_path / "run")] == [
        (0, "untouched"),
        (1, "shared"),
        (2, "shared"),
    ]
    assert set(read_run(tmp_path / "run").summary["text"]) == {"base", "shared"}
    refused = Experiment.model_validate({**named, "report": {**table, "clients": ["left"]}})
    text = r"\[report\] clients needs personal models, which stay at the sites: remove it"
    with pytest.raises(ConfigError, match=text):
        federate(refused, tmp_path / "other", transport, Terms("wards", tuple(transport.sites)))
