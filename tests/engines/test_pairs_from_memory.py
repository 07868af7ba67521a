"""Pairs passed to ``run`` from memory. Oracle: the run of the same pairs in files.

The copy in the run directory serves what comes after the run; rows are named by client and number.
"""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas
import pytest
from datasets import Dataset, DatasetDict

from commands import prefed_
from finished import small_experiment
from pages import blocks
from prefed import Callback, ConfigError, Experiment, run
from prefed.core import Key
from prefed.data import DataConfig, DataError, build_dataset
from prefed.methods import METHODS, MethodKind
from prefed.runs.pairs_from_memory import from_memory
from prefed.store import RunReader, RunWriter, StoreError
from preferences import jsonl, tokenizer
from toy import InterruptAt

METHOD = '''"""FedPer under another name."""

from prefed.methods import MethodKind, fedper

METHOD = MethodKind("own", "FedPer", personal=True, module=__name__)
SOURCE, Settings, needs, build = fedper.SOURCE, fedper.Settings, fedper.needs, fedper.build
'''


@pytest.fixture(scope="module")
def rows(place):
    """Split → rows."""
    splits = ("train", "test")
    return {n: [json.loads(line) for line in (place / f"{n}.jsonl").read_text().splitlines()] for n in splits}


def by_client(rows):
    return {name: [row for row in rows if row["worker"] == name] for name in ("left", "right")}


def experiment(place, **changes):
    """A personal method, and no sources. ``changes`` replace tables."""
    method = {"name": "fedper", "lr": 0.01, "local_steps": 3, "batch_size": 4}
    return Experiment(**small_experiment(place, **{"method": method, "data": {}, **changes}))


@pytest.fixture(scope="module")
def given(rows):
    """Split → client → rows."""
    return {role: by_client(own) for role, own in rows.items()}


@pytest.fixture(scope="module")
def of_files(place, given):
    """The run of a file for each split and client."""
    files = {role: {} for role in given}
    for role, clients in given.items():
        for name, own in clients.items():
            files[role][name] = str(jsonl(place / f"{role}-{name}.jsonl", own))
    run(experiment(place, data=files), place / "files")
    return outcome(place / "files")


@pytest.fixture(scope="module")
def of_rows(place, given):
    """The result of a run of lists."""
    return run(experiment(place), place / "rows", data=given)


def outcome(path):
    """All that a run computed: rounds, states of clients and server, and digests of data and model."""
    reader = RunReader(path)
    rounds = [{**record, "seconds": 0} for record in reader.rounds()]
    states = [reader.client(name) for name in ("left", "right")]
    states.append(reader.server())
    flat = [{name: group.flat.tolist() for name, group in state.tensors.items()} for state in states]
    summary = json.loads((path / "summary.json").read_text())
    same = {name: summary[name] for name in ("preference_accuracy", "loss", "bytes", "clients", "data")}
    return rounds, flat, same, dict(reader.commit.fingerprint)


def test_a_run_of_rows_is_the_run_of_files(of_files, of_rows):
    assert outcome(of_rows.path) == of_files


@pytest.mark.usefixtures("forked_workers")
def test_a_run_with_workers_is_resumed_with_the_same_pairs_only(place, given, of_files, tmp_path):
    """Interrupted before its first round, it takes other pairs. Interrupted in round 2 (each round has 2
    visits and 2 evaluations), it refuses a change, and the copy stays.
    """
    path, frames = tmp_path / "run", {}
    wrong = {"train": given["test"], "test": given["train"]}
    for role, clients in given.items():
        frames[role] = {name: pandas.DataFrame(own) for name, own in clients.items()}
    with pytest.raises(KeyboardInterrupt):
        run(experiment(place), path, data=wrong, callbacks=[Never()])
    assert (path / "data/train-1.jsonl").exists()
    with pytest.raises(KeyboardInterrupt):
        run(experiment(place), path, data=given, callbacks=[InterruptAt(5)])
    copies = {item.name: item.read_bytes() for item in (path / "data").iterdir()}
    changed = {**given, "train": {**given["train"], "left": given["train"]["left"][::-1]}}
    with pytest.raises(StoreError, match="data= changed since it started"):
        run(experiment(place), path, data=changed, resume=True)
    assert {item.name: item.read_bytes() for item in (path / "data").iterdir()} == copies
    run(experiment(place, engine={"threads": 1, "workers": 2}), path, data=frames, resume=True)
    assert outcome(path) == of_files


class Never(Callback):
    def on_run_begin(self, done, rounds):
        raise KeyboardInterrupt


def test_a_run_goes_on_from_its_own_copy(place, given, of_files, tmp_path):
    """``config.toml`` names the copy, so the rows are not needed again."""
    with pytest.raises(KeyboardInterrupt):
        run(experiment(place), tmp_path / "run", data=given, callbacks=[InterruptAt(5)])
    run(Experiment.load(tmp_path / "run/config.toml"), tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == of_files


def test_clients_are_a_table(of_rows):
    """Each client has 8 training and 4 test pairs; the metrics are those of the summary."""
    table = of_rows.clients
    assert list(table.index) == ["left", "right"]
    assert table[["train", "validation", "test"]].to_numpy().tolist() == [[8, 0, 4], [8, 0, 4]]
    metrics = [name for name in table if name not in ("train", "validation", "test")]
    assert {"preference_accuracy", "shared_accuracy", "reward_accuracy"} <= set(metrics)
    for name in metrics:
        assert table[name].to_dict() == of_rows.summary[name]["per_client"]


def test_the_copy_is_private_and_serves_later_commands(of_rows, tmp_path):
    """Only its owner can read it. It replaces ``cache/``, which may be deleted."""
    path = of_rows.path
    modes = {item.name: oct(item.stat().st_mode & 0o777) for item in (path / "data").iterdir()}
    assert modes == {f"{role}-{k}.jsonl": "0o600" for role in ("train", "test") for k in (1, 2)}
    assert oct((path / "data").stat().st_mode & 0o777) == "0o700"
    shutil.rmtree(path / "cache")
    shown = json.loads(prefed_("evaluate", path, "--json"))
    assert shown["preference_accuracy"] == of_rows.summary["preference_accuracy"]
    prefed_("report", path)
    prefed_("export", path, "--out", tmp_path / "left", "--client", "left")
    assert list(tmp_path.glob("left/*.safetensors"))


def test_the_example_of_the_page_runs(place, rows, tmp_path, monkeypatch, capsys):
    """Of each client's 8 pairs a quarter is tested, and the table of clients is printed."""
    text = (Path(__file__).resolve().parents[2] / "docs/python.md").read_text("utf-8")
    (code,) = (block for block in blocks(text, "python") if "votes.csv" in block)
    pandas.DataFrame(rows["train"]).to_csv(tmp_path / "votes.csv", index=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    exec(code.replace("distilbert/distilgpt2", str(place / "model")), {})
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in shown[-2:]] == [["left", "6", "2"], ["right", "6", "2"]]


FORMS = {"list": list, "Dataset": Dataset.from_list, "DataFrame": pandas.DataFrame}
COLUMN = {"partition": {"by": "column", "column": "worker"}}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_each_form_are_read_as_files(form, place, rows, given, tmp_path):
    """Bit for bit, all files of the cache: clients with and without splits, and a column that names them."""
    make = FORMS[form]
    splits = {role: make(own) for role, own in rows.items()}
    clients = {name: make(own) for name, own in given["train"].items()}
    files = {name: str(jsonl(tmp_path / f"{name}.jsonl", own)) for name, own in given["train"].items()}
    paths = {role: str(place / f"{role}.jsonl") for role in rows}
    fractions = {"test_fraction": 0.25, "validation_fraction": 0.125}
    for number, (data, sources, settings) in enumerate(
        [
            (DatasetDict(splits) if form == "Dataset" else splits, paths, COLUMN),
            (splits["train"], {"train": paths["train"]}, {**COLUMN, **fractions}),
            (clients, {"train": files}, fractions),
        ]
    ):
        made = build(data, tmp_path / f"rows{number}", **settings)
        source = DataConfig(**sources, **settings)
        oracle = build_dataset(source, tokenizer(), Key(0), tmp_path / f"files{number}")
        assert made.fingerprint == oracle.fingerprint
        # All arrays and texts; the manifests, which name the sources, are JSON.
        folders = tmp_path / f"rows{number}/cache/data", tmp_path / f"files{number}"
        one, other = (
            {item.name: item.read_bytes() for item in folder.iterdir() if item.suffix != ".json"}
            for folder in folders
        )
        assert one == other
    # Of 8 pairs an eighth and a quarter.
    assert {tuple(sizes) for sizes in made.sizes.values()} == {(5, 1, 2)}


def bad(kind):
    """Rows of ann with something wrong in the third."""
    wrong = {
        "empty": {"prompt": "Q", "chosen": "  ", "rejected": " no"},
        "number": {"prompt": 3, "chosen": " yes", "rejected": " no"},
        "text": "Q",
        "bytes": {"prompt": "Q", "chosen": b"yes", "rejected": " no"},
        "key": {("prompt", 1): "Q", "chosen": " yes", "rejected": " no"},
    }
    good = [{"prompt": f"Q{k}", "chosen": " yes", "rejected": " no"} for k in range(4)]
    return [*good[:2], wrong[kind], *good[2:]]


MESSAGES = {
    "empty": "chosen is empty",
    "number": "prompt must be text or a list of messages, not a number",
    "text": "a row must be an object with named columns, not a string",
    "bytes": "a value of type bytes cannot be written as JSON",
    "key": "keys must be str, int, float, bool or None, not tuple",
}


def build(data, folder, **settings):
    """Write and read rows as a run does before it loads the model."""
    made = Experiment(data=settings, model={"name": "none"}, method="feddpo")
    with RunWriter(folder) as writer, from_memory(made, data, writer) as ready:
        return build_dataset(ready.data, tokenizer(), Key(0), folder / "cache" / "data")


@pytest.mark.sample
@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (lambda rows: {"ann": rows, "ben": bad("empty")[:2]}, "data['ann'], row 3: "),
        (lambda rows: {"train": {"ann": rows}}, "data['train']['ann'], row 3: "),
        (lambda rows: {"train": {"ann": bad("empty")[:2]}, "test": {"ann": rows}}, "data['test']['ann']"),
    ],
)
def test_bad_rows_are_named_by_client_and_number(kind, layout, named, tmp_path):
    with pytest.raises(DataError) as caught:
        build(layout(bad(kind)), tmp_path / "run")
    assert named in str(caught.value)
    assert MESSAGES[kind] in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ([{"prompt": "Q"}], ConfigError, "set partition, e.g."),
        ({"train": [], "valid": []}, ConfigError, "keys 'train', 'valid': it needs 'train', and"),
        ({"a": "a.jsonl"}, TypeError, r"data\['a'\] must be a datasets.Dataset.*not str; for a file, set"),
        (5, TypeError, "^data must be a datasets.Dataset, a pandas.DataFrame or a list of dicts, not int;"),
        ({"a": []}, DataError, r"data\['a'\]: there are no rows; add some, or remove this source"),
        ({3: [], "3": []}, ConfigError, "two clients are called '3'"),
        ({None: []}, TypeError, "a client's name must be text or a whole number, not None"),
        ({"a\tb": []}, ConfigError, r"contains the control character U\+0009"),
        (
            {"a": pandas.DataFrame([["Q", " a", " b"]], columns=["prompt", "chosen", "chosen"])},
            DataError,
            r"data\['a'\]: two columns have the same name",
        ),
    ],
)
def test_what_cannot_be_data_is_refused(data, error, words, tmp_path):
    with pytest.raises(error, match=words):
        build(data, tmp_path / "run")


def test_a_run_without_data_says_how_to_pass_some(place, tmp_path):
    with pytest.raises(ConfigError, match="no data: pass data= to run, or set data"):
        run(experiment(place), tmp_path / "run")


def test_a_frame_is_read_as_its_parquet_file(tmp_path):
    """Missing values, dates, categories, an index, numbers and dialogues as arrays, as pandas reads them."""
    frame = pandas.DataFrame(
        {
            "prompt": [[{"role": "user", "content": f"Q{k}"}] for k in range(6)],
            "chosen": [f" yes {k}" for k in range(6)],
            "rejected": [f" no {k}" for k in range(6)],
            "margin": np.array([0.1, np.nan, 3, 1e-9, np.nan, 2], np.float32),
            "worker": pandas.Categorical(["a", "b"] * 3),
            "number": np.arange(6),
            "note": ["x", None, pandas.NA, "y", "z", "x"],
            "day": pandas.to_datetime(["2024-01-01", None] * 3),
        },
        index=range(5, 11),
    )
    frame.to_parquet(tmp_path / "pairs.parquet")
    read = pandas.read_parquet(tmp_path / "pairs.parquet")
    assert isinstance(read["prompt"].iloc[0], np.ndarray)
    source = DataConfig(train=str(tmp_path / "pairs.parquet"), **COLUMN)
    expected = build_dataset(source, tokenizer(), Key(0), tmp_path / "tokens").fingerprint
    table = Dataset.from_parquet(source.train.path)
    for name, rows in {"made": frame, "read": read, "set": table}.items():
        assert build(rows, tmp_path / name, **COLUMN).fingerprint == expected


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A file with a method, imported as a script imports its neighbour."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/ownmethod.py").write_text(METHOD)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield import_module("ownmethod")
    del sys.modules["ownmethod"]


@pytest.mark.usefixtures("forked_workers")
def test_a_method_object_runs_as_its_file_does(module, place, given, of_files, tmp_path):
    """FedPer under another name, in two workers and evaluated in this process."""
    method = {"name": module.METHOD, "lr": 0.01, "local_steps": 3, "batch_size": 4}
    made = experiment(place, method=method, engine={"threads": 1, "workers": 2})
    assert made.method.name == f"{tmp_path / 'code/ownmethod.py'}:METHOD"
    result = run(made, tmp_path / "run", data=given)
    assert outcome(tmp_path / "run")[:3] == of_files[:3]
    shown = json.loads(prefed_("evaluate", tmp_path / "run", "--json"))
    assert shown["preference_accuracy"] == result.summary["preference_accuracy"]


def test_objects_are_named_by_where_they_are(module, monkeypatch):
    """One of prefed by its name, one in a package by its module; what no other process finds is refused."""
    small = {"model": {"name": "none"}}
    assert Experiment(method=METHODS["fedper"], **small).method.name == "fedper"
    assert Experiment(method={"name": METHODS["fedper"], "lr": 0.5}, **small).method.settings.lr == 0.5
    notebook = MethodKind("lost", "of a notebook or the main script", module="__main__")
    monkeypatch.setattr("__main__.LOST", notebook, raising=False)
    for lost in (
        notebook,
        MethodKind("lost", "made in a function", module="ownmethod"),
        MethodKind("lost", "without a module"),
    ):
        with pytest.raises(ConfigError, match=r"method 'lost' must be a variable in a file.*e.g. to lost.py"):
            Experiment(method=lost, **small)
