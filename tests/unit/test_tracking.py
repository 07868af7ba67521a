"""Logging a run to tools: what is logged, when, and that no failure of a tool ends the run."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finished import write_run
from prefed.config import Experiment, TrackConfig, to_toml
from prefed.core import Callback
from prefed.runs.start_or_resume import settings_digest
from prefed.runs.track import tracked
from prefed.store import reader
from prefed.trackers.logged_metrics import alignment_figures, summary_figures
from prefed.trackers.tools import TRACKERS, Tracker, TrackerError, trackers
from prefed.trackers.tracking import STATE, AlignmentTracking, Tracking


class Fake(Tracker):
    """A tool in memory, which fails on request.

    Attributes:
        fails: what raises: ``"begin"``, ``"log"``, ``"finish"`` or ``"close"``.
    """

    package = "json"

    def __init__(self, run):
        self._may("begin")
        self.started.append(run)
        self.known = run.known or f"id-{len(self.started)}"

    def _may(self, what):
        if what in self.fails:
            raise ConnectionError(f"no answer in {what} of http://ann:secret@host/\nmore")

    def log(self, number, figures):
        self._may("log")
        self.rounds.append(number)

    def finish(self, got):
        self._may("finish")
        self.got.append(got)

    def close(self, *, succeeded):
        self.closed.append(succeeded)
        self._may("close")


def make_fake():
    return type("FakeOne", (Fake,), {"fails": set(), "started": [], "rounds": [], "got": [], "closed": []})


@pytest.fixture
def fake():
    """A class of its own for each test."""
    return make_fake()


SUMMARY = {
    "rounds": 3,
    "split": "test",
    "preference_accuracy": {"mean": 0.5, "worst": 0.25, "worst_decile": 0.25, "per_client": {"ann": 0.25}},
    "clients": {"ann": {"train": 3, "validation": 0, "test": 4}},
    "loss": 0.5,
}


def record(number):
    return {"round": number, "loss": 1 / number, "cohort": ["ann"], "dropped": []}


def tracking(folder, kind, warnings, rounds=3, **changes):
    return Tracking(
        {"fake": kind},
        folder,
        "prefed",
        "name",
        lambda: {"seed": 1},
        lambda: [record(number) for number in range(1, rounds + 1)],
        warnings.append,
        **changes,
    )


def test_a_tool_that_fails_is_warned_of_once_and_tried_again_at_the_end(tmp_path, fake):
    """Without an answer in rounds 1 to 3; at the end it answers, and receives all three and the summary."""
    warnings, fake.fails = [], {"log"}
    tool = tracking(tmp_path, fake, warnings)
    for number in (1, 2, 3):
        tool.on_round_end(record(number))
    assert fake.rounds == []
    assert warnings == [
        "[track] fake failed; the run continues: ConnectionError: no answer in log of http://…@host/"
    ]
    fake.fails = {"close"}
    tool.finish(SUMMARY, lambda: "<html>")
    tool.close(succeeded=True)
    assert (fake.rounds, len(fake.started), len(fake.got)) == ([1, 2, 3], 1, 1)
    assert len(warnings) == 1


@given(st.lists(st.tuples(st.sampled_from(["begin", "log", "finish", ""]), st.booleans()), max_size=12))
def test_every_round_is_logged_once_whatever_fails_and_stops(tmp_path_factory, course):
    """A law: at each round the tool may fail in one place and the process may be killed and started again. In
    the end each round was logged once, in order, in one run of the tool, and the summary once."""
    folder = tmp_path_factory.mktemp("run")
    kind, rounds, warnings = make_fake(), len(course) + 1, []
    tool = tracking(folder, kind, warnings, rounds)
    tool.on_run_begin(0, rounds)
    for number, (fails, killed) in enumerate(course, 1):
        kind.fails = {fails}
        tool.on_round_end(record(number))
        if killed:
            tool = tracking(folder, kind, warnings, rounds)
            tool.on_run_begin(number, rounds)
    kind.fails = set()
    tool.on_round_end(record(rounds))
    tool.finish({**SUMMARY, "rounds": rounds}, None)
    tool.finish({**SUMMARY, "rounds": rounds}, None)
    assert kind.rounds == list(range(1, rounds + 1))
    assert [got.rounds for got in kind.got] == [rounds]
    assert len({run.known for run in kind.started} - {None}) <= 1
    assert json.loads((folder / STATE).read_text())["fake"]["logged"] == rounds


def test_a_run_taken_back_is_logged_again_from_there(tmp_path, fake):
    """Peers go back to the last round that all of them have: here from 3 to 1."""
    tool = tracking(tmp_path, fake, [])
    for number in (1, 2, 3):
        tool.on_round_end(record(number))
    again = tracking(tmp_path, fake, [])
    again.on_run_begin(1, 3)
    again.on_round_end(record(2))
    assert fake.rounds == [1, 2, 3, 2]
    assert fake.started[-1].first == 2
    assert fake.started[-1].known == "id-1"


def test_a_damaged_note_is_a_warning_and_other_tools_keep_theirs(tmp_path, fake):
    (tmp_path / STATE).write_text("{")
    warnings = []
    tracking(tmp_path, fake, warnings).on_round_end(record(1))
    assert len(warnings) == 1
    assert warnings[0].startswith(f"[track] cannot read {tmp_path / STATE} (")
    assert warnings[0].endswith("): trackers will log a new run")
    assert fake.rounds == [1]
    other = {"known": "x", "logged": 7, "finished": 0}
    (tmp_path / STATE).write_text(json.dumps({"other": other}))
    tracking(tmp_path, fake, []).on_round_end(record(1))
    assert json.loads((tmp_path / STATE).read_text())["other"] == other


def aligning(folder, kind, epochs):
    return AlignmentTracking(
        {"fake": kind}, folder, "p", "n-align", lambda: {"align": {}}, lambda: epochs, lambda text: None
    )


def test_epochs_are_counted_over_generations(tmp_path, fake):
    """Two epochs in each of three generations. The process is killed after the fourth epoch was written and
    before it was logged; the end logs it and those after it, each once, and the summary once."""
    tool = aligning(tmp_path, fake, [])
    for number, done in ((1, 1), (1, 2), (2, 1)):
        tool.on_stage_begin(f"train-{number}", done - 1, 2)
        tool.on_stage_step(f"train-{number}", done, 2, {"loss": number + done / 4})
        tool.on_stage_step(f"completions-{number}", done, 2, {"tokens_per_second": 9.0})
    assert fake.rounds == [1, 2, 3]
    epochs = [{"round": k, "epoch": k, "loss": 0.5, "agreement": k / 8} for k in range(1, 7)]
    again = aligning(tmp_path, fake, epochs)
    again.on_stage_begin("train-3", 0, 2)
    summary = {"train": {"epochs": epochs, "kept": 6, "pairs": 4}, "seconds": 2.0}
    again.end(summary)
    again.end(summary)
    assert fake.rounds == [1, 2, 3, 4, 5, 6]
    (got,) = fake.got
    assert got.figures == {
        **{"summary/align/train/pairs": 4, "summary/align/train/kept": 6, "summary/align/loss": 0.5},
        **{"summary/align/agreement": 0.75, "summary/align/seconds": 2},
    }
    assert [run.known for run in fake.started] == [None, "id-1"]


def test_training_that_is_done_again_is_a_new_run_in_a_tool(tmp_path, fake):
    """A tool may refuse a step that it has already, as Weights & Biases does."""
    tool = aligning(tmp_path, fake, [])
    tool.on_stage_begin("train", 0, 2)
    tool.on_stage_step("train", 1, 2, {"loss": 0.5})
    again = aligning(tmp_path, fake, [])
    again.on_stage_begin("train", 0, 3)
    again.on_stage_step("train", 1, 3, {"loss": 0.5})
    assert [run.known for run in fake.started] == [None, None]
    assert fake.rounds == [1, 1]


def test_numbers_next_to_the_summary_of_a_logged_run(tmp_path, fake):
    """In the same run of the tool, in which no round is logged again and the end is kept."""
    tool = tracking(tmp_path, fake, [])
    for number in (1, 2, 3):
        tool.on_round_end(record(number))
    tool.finish(SUMMARY, None)
    before = json.loads((tmp_path / STATE).read_text())
    tracking(tmp_path, fake, []).add(3, {"judge/n/wins": 0.5})
    assert fake.rounds == [1, 2, 3]
    assert fake.started[-1].known == "id-1"
    assert (fake.got[-1].figures, fake.got[-1].rows) == ({"judge/n/wins": 0.5}, ())
    assert json.loads((tmp_path / STATE).read_text()) == before


@given(st.recursive(st.text() | st.booleans() | st.none(), lambda inner: st.dictionaries(st.text(), inner)))
def test_of_an_alignment_only_numbers_are_logged(other):
    """Whatever else the stages say, such as how many prompts clients hold, the figures are the same."""
    train = {"epochs": [{"epoch": 1, "loss": 0.5}], "kept": 1}
    said = {"prompts": {"kept": 2, "clients": 7, "other": other}, "tastes": {"clients": 3}, "policy": other}
    expected = {"prompts/kept": 2, "train/kept": 1, "loss": 0.5}
    assert alignment_figures({**said, "train": {**train, "other": other}}) == {
        f"summary/align/{name}": value for name, value in expected.items()
    }


def test_without_clients_the_settings_name_none(tmp_path, fake):
    """Neither sources that are named after clients, nor groups of clients, nor their files."""
    sources = {"ann": {"path": "/home/eve/ann.jsonl"}, "bob": {"path": "/home/eve/bob.jsonl"}}
    partition = {"by": "source", "groups": {"ann": ["x"]}}
    changes = {"settings": {"data": {"train": sources, "partition": partition}}, "fingerprint": {}}
    for clients, names in ((True, {"ann", "bob"}), (False, set())):
        run = write_run(tmp_path / str(clients), **changes)
        with (
            pytest.MonkeyPatch.context() as patch,
            tracked({"fake": fake}, TrackConfig(to="tensorboard", clients=clients), run, Callback(), str),
        ):
            patch.setattr(reader, "read_commit", lambda folder: reader.Commit(2, {}, {}))
        text = json.dumps(fake.started[-1].config)
        assert {name for name in ("ann", "bob") if name in text} == names
        assert "/home" not in text
        assert '"by": "source"' in text
        assert (bool(fake.got[-1].rows), bool(fake.got[-1].page)) == (clients, clients)


@pytest.mark.parametrize(
    ("summary", "name"),
    [
        ({"personal": {"gate": {"ann": {"0": 0.5}}}}, "gate"),
        ({"personal": {"gate": {"per_client": {"mean": 0.5}}}}, "gate"),
        ({"clients": {"mean": {"train": 3}}}, "clients"),
        ({"not_finite": {"ann": 3}}, "not_finite"),
        ({"prompts": {"first": "Why?"}}, "prompts"),
    ],
)
def test_what_is_a_clients_own_is_no_figure(summary, name):
    """Also where a client is called as a key of the files is."""
    assert not any(name in figure for figure in summary_figures({**SUMMARY, **summary}))


def test_the_names_in_a_file_are_those_of_the_tools():
    names = TrackConfig.model_fields["to"].description.partition(": ")[2].split(", ")
    assert names == TrackConfig(to=names).to == list(TRACKERS)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, tmp_path):
    """Also where the working directory has a folder of its name, which Python would import."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackerError, match=r"install it with pip install 'prefed\[wandb\]'"):
        trackers(["wandb"])
    monkeypatch.delitem(sys.modules, "wandb")
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(TrackerError, match=r"prefed\[wandb\]"):
        trackers(["wandb"])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def experiment(**changes):
    return Experiment.model_validate(
        {
            "data": {"train": "pairs.jsonl", "partition": {"by": "iid", "clients": 2}},
            "model": {"name": "tiny"},
            "method": {"name": "feddpo"},
            **changes,
        }
    )


def test_the_table_changes_no_digest():
    """So a run started without it, or by an earlier version, continues with it."""
    plain, got = experiment(), experiment(track={"to": "tensorboard", "project": "x"})
    assert "track" not in plain.tables()
    assert settings_digest(plain.tables()) == settings_digest(got.tables())
    assert Experiment.parse(to_toml(got)) == got
    assert got.track is not None
    assert got.track.to == ["tensorboard"]


def test_a_finished_run_can_be_logged_later(tmp_path, fake, monkeypatch):
    """All rounds, the summary, and a page that holds nothing but what may leave."""
    run = write_run(tmp_path / "run", fingerprint={})
    monkeypatch.setattr(reader, "read_commit", lambda folder: reader.Commit(2, {}, {}))
    config = TrackConfig(to="tensorboard", project="p", name="n")
    with tracked({"fake": fake}, config, run, Callback(), lambda path: f"page of {path.name}"):
        pass
    assert fake.rounds == [1, 2]
    (got,) = fake.got
    assert (got.rounds, got.page, len(got.rows)) == (2, "page of run", 3)
    assert (fake.started[0].project, fake.started[0].name, fake.closed) == ("p", "n", [True])
