"""A run that logs to every installed tool, stopped and resumed: what each wrote, read back."""

from __future__ import annotations

import csv
import importlib.util
import json
import sqlite3
import struct
import sys
from pathlib import Path

import pytest

import toy
from commands import prefed_
from finished import small_experiment, write_run
from prefed import Experiment, run
from prefed.config import to_toml
from prefed.trackers.logged_metrics import client_table, round_figures, summary_figures
from prefed.trackers.tools import TRACKERS
from prefed.ui.pages.page import public_page
from toy import records

NEEDED = {**{name: [name] for name in TRACKERS}, "mlflow": ["mlflow", "sqlalchemy", "alembic"]}
INSTALLED = [name for name, packages in NEEDED.items() if all(map(importlib.util.find_spec, packages))]
ROUNDS = 3


@pytest.fixture(scope="module")
def got(place, tmp_path_factory):
    """The run directory of FedSDG, whose gates are private, interrupted in its second round and resumed."""
    if not INSTALLED:
        pytest.skip("no tracker is installed: pip install 'prefed[tensorboard]'")
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        for name in ("TRACKIO_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            patch.setenv(name, str(folder / name.lower()))
        tree = small_experiment(place, rounds=ROUNDS, track={"to": INSTALLED, "project": "wards"})
        tree["method"]["name"] = "fedsdg"
        with pytest.raises(KeyboardInterrupt):
            run(Experiment.model_validate(tree), folder / "run", callbacks=[toy.InterruptAt(6)])
        assert json.loads((folder / "run/track.json").read_text())[INSTALLED[0]]["logged"] == 1
        run(Experiment.model_validate(tree), folder / "run", resume=True, page=public_page)
    return folder / "run"


def needs(name):
    if name not in INSTALLED:
        pytest.skip(f"{name} is not installed: pip install 'prefed[{name}]'")


def summary_of(path):
    return json.loads((path / "summary.json").read_text())


def expected(path):
    """Round → its figures; and those of the summary."""
    return {record["round"]: round_figures(record) for record in records(path)}, summary_figures(
        summary_of(path)
    )


def known(path, name):
    state = json.loads((path / "track.json").read_text())[name]
    assert (state["logged"], state["finished"]) == (ROUNDS, ROUNDS)
    return state["known"]


def test_the_numbers_are_those_of_a_run_that_logs_to_no_tool(got, place, tmp_path):
    tree = small_experiment(place, rounds=ROUNDS)
    tree["method"]["name"] = "fedsdg"
    run(Experiment.model_validate(tree), tmp_path / "run")
    names = ("checkpoint/COMMIT.json", "adapters/shared/adapter_model.safetensors")
    commits = [json.loads((path / names[0]).read_text()) for path in (got, tmp_path / "run")]
    assert commits[0]["settings"] == commits[1]["settings"]
    assert commits[0]["digests"]["server"] == commits[1]["digests"]["server"]
    assert commits[0]["digests"]["clients"] == commits[1]["digests"]["clients"]
    assert (got / names[1]).read_bytes() == (tmp_path / "run" / names[1]).read_bytes()


def test_tensorboard(got):
    """By its own reader. Curves have each round once; a text has the clients and one the experiment."""
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(got / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    rounds, summary = expected(got)
    for name in rounds[1]:
        points = [(point.step, point.value) for point in events.Scalars(name)]
        assert points == [(n, pytest.approx(rounds[n][name], rel=1e-6)) for n in range(1, ROUNDS + 1)]
    for name, value in summary.items():
        assert [point.value for point in events.Scalars(name)] == [pytest.approx(value, rel=1e-6)]
    texts = {
        name: [t.tensor_proto.string_val[0].decode() for t in events.Tensors(f"{name}/text_summary")]
        for name in ("config", "clients")
    }
    assert '"name": "fedsdg"' in texts["config"][0]
    columns, rows = client_table(summary_of(got))
    head, _, *table = texts["clients"][0].splitlines()
    assert head == f"| {' | '.join(columns)} |"
    assert table == [f"| {' | '.join(map(str, row))} |" for row in rows]


def wandb_records(path):
    """The records in a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, part, block = path.read_bytes(), 7, b"", 1 << 15
    while at < len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def test_wandb(got):
    """Offline: two folders of one run, since it was stopped once."""
    needs("wandb")
    files = sorted((got / "wandb").glob(f"offline-run-*/run-{known(got, 'wandb')}.wandb"))
    assert len(files) == 2
    steps, summary, pages, named = {}, {}, [], set()
    for record in (record for path in files for record in wandb_records(path)):
        if record.HasField("run"):
            named.add((record.run.project, record.run.display_name))
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert config["method"]["name"] == "fedsdg"
        if record.HasField("history"):
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            steps.setdefault(row["_step"], {}).update(row)
        if record.HasField("summary"):
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        if record.HasField("artifact") and record.artifact.type == "report":
            pages += [Path(entry.local_path).read_text() for entry in record.artifact.manifest.contents]
    assert named == {("wards", "run")}
    rounds, figures = expected(got)
    assert {n: {k: row[k] for k in rounds[1]} for n, row in steps.items() if n in rounds} == rounds
    assert {name: summary[name] for name in figures} == figures
    (table,) = (got / "wandb").glob("offline-run-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert (content["columns"], content["data"]) == client_table(summary_of(got))
    assert pages == [public_page(got)]


def test_mlflow(got):
    """By its own client."""
    needs("mlflow")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{got.parent}/mlflow.db")
    identity = known(got, "mlflow")
    experiment = client.get_experiment_by_name("wards")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.info.run_name, found.info.status) == (identity, "run", "FINISHED")
    assert found.data.params["method.name"] == "fedsdg"
    assert found.data.params["rounds"] == str(ROUNDS)
    rounds, figures = expected(got)
    for name in rounds[1]:
        history = {m.step: m.value for m in client.get_metric_history(identity, name)}
        assert history == {n: rounds[n][name] for n in rounds}
    assert {name: found.data.metrics[name] for name in figures} == figures
    folder = Path(found.info.artifact_uri.removeprefix("file://"))
    columns, rows = client_table(summary_of(got))
    table = list(csv.reader((folder / "clients.csv").open()))
    assert table == [columns, *([str(value) for value in row] for row in rows)]
    assert (folder / "report.html").read_text() == public_page(got)


def test_trackio(got):
    """By the database that it keeps."""
    needs("trackio")
    name = known(got, "trackio")
    with sqlite3.connect(got.parent / "trackio_dir/wards.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        configs = database.execute("select run_name, config from configs").fetchall()
    assert {row[0] for row in rows} == {name}
    merged = {}
    for _, step, metrics in rows:
        merged.setdefault(step, {}).update(json.loads(metrics))
    rounds, figures = expected(got)
    assert {n: {k: merged[n][k] for k in rounds[n]} for n in rounds} == rounds
    assert {k: merged[ROUNDS][k] for k in figures} == figures
    columns, table = client_table(summary_of(got))
    shown = merged[ROUNDS]["clients"]["_value"]
    assert [[row[column] for column in columns] for row in shown] == table
    assert [json.loads(config)["method"]["name"] for _, config in configs] == ["fedsdg"]
    blobs = (got.parent / "trackio_dir/artifacts").rglob("*")
    assert public_page(got) in [path.read_text() for path in blobs if path.is_file()]


def test_nothing_private_is_in_what_the_tools_wrote(got):
    """Not a word of a prompt or a response, and no gate of a client, which the run directory does hold."""
    assert json.loads((got / "checkpoint/personal.json").read_text())["gate"]["left"]
    assert "personal" in summary_of(got)
    own = {path for name in ("cache", "checkpoint", "adapters") for path in (got / name).rglob("*")}
    written = [path for path in got.parent.rglob("*") if path.is_file() and path not in own]
    texts = {path: path.read_bytes() for path in written}
    for words in (b"Case 1", b" we go", b'"gate": {"left"', b"gates</h"):
        assert [path for path, data in texts.items() if words in data] == []


def test_a_tool_that_fails_ends_no_run(place, tmp_path):
    """TensorBoard's folder cannot be made, as a file is in its place: one warning, and the run is whole."""
    needs("tensorboard")
    from prefed.core import Callback

    texts = []

    class Warned(Callback):
        def on_warning(self, text):
            texts.append(text)

        def on_round_end(self, record):
            (tmp_path / "run/tensorboard").write_text("in the way")

    tree = small_experiment(place, rounds=1, track={"to": "tensorboard"})
    result = run(Experiment.model_validate(tree), tmp_path / "run", callbacks=[Warned()])
    assert result.summary["rounds"] == 1
    (text,) = (text for text in texts if "loss" not in text and "method.objective" not in text)
    assert text.startswith("[track] tensorboard failed; the run continues: ")


def test_a_page_for_tools_has_nothing_of_the_private_folders(tmp_path):
    """The page of prefed report quotes a judge's responses and the gates, and this one does not."""
    from prefed.runs.finished_run import read_run
    from prefed.ui.pages.page import render

    gates = {"gate": {"ann": {"0": 0.51, "1": 0.52}}}
    path = write_run(tmp_path / "run", personal=gates)
    judged = path / "judge/n"
    judged.mkdir(parents=True)
    summary = {
        **{"name": "n", "judge": "reward:model", "model": "feddpo", "against": "base", "note": ""},
        **{"win_rate": {"mean": 0.625, "low": 0.5, "high": 0.75}, "wins": 0.5, "length_controlled": None},
        **{"ties": 2, "judged": 8, "failed": 1},
    }
    (judged / "summary.json").write_text(json.dumps(summary))
    verdict = {"row": 0, "prompt": "a secret prompt", "text": "ours", "against": "theirs", "result": "win"}
    (judged / "verdicts.jsonl").write_text(json.dumps(verdict) + "\n")
    whole, public = render(read_run(path)), public_page(path)
    assert "a secret prompt" in whole
    assert "a secret prompt" not in public
    assert "0.52" in whole
    assert "0.52" not in public
    assert "feddpo" in public
    assert "ann" in public


def test_a_tool_that_is_missing_is_an_error_before_the_run(place, tmp_path, monkeypatch):
    """By ``--track`` too; no run directory is made."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    file = tmp_path / "first.toml"
    file.write_text(to_toml(Experiment.model_validate(small_experiment(place))))
    out = tmp_path / "run"
    got = prefed_("run", file, "--out", out, "--track", "wandb", code=1)
    assert "[track] to = 'wandb': cannot import its package" in got
    assert "install it with pip install 'prefed[wandb]', or remove 'wandb'" in got
    assert not out.exists()
