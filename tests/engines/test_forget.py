"""Forgetting: the run equals, bit for bit, the one that never had the client, and nothing of it is left."""

import ctypes
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from benchmarks.same_numbers import digests

from commands import prefed_
from crashes import Crash
from finished import WORDY, found, rows_of, small_experiment, wordy_place
from prefed import Callback, ConfigError, Experiment, run
from prefed.align.judge import Verdict
from prefed.align.judge.names import ARGUMENTS
from prefed.core import files
from prefed.data import DataError, FederatedDataset
from prefed.runs import forget as forgetting
from prefed.runs.exports_log import read_copies, record_copy
from prefed.runs.finished_run import RunError
from prefed.runs.forget import forget, plan
from prefed.runs.labels import JUDGES
from prefed.runs.loaded_run import load_run
from prefed.store import CheckpointConfig, RunReader, StoreError
from toy import outcome

ALIGN = {"completions": 2, "max_new_tokens": 3, "temperature": 1.0, "lr": 1e-3, "epochs": 1, "batch_size": 4}
KEPT = {"rounds": 3, "cohort": {"size": 1}, "evaluate": {"every": 0}, "checkpoint": {"keep": "all"}}
NOISE = {"clip": 0.1, "noise_multiplier": 1.0, "delta": 1e-5, "draws": "seed"}
CASES = {
    "all take part": {"evaluate": {"text": 2}},
    "kept commits": {
        **KEPT,
        "rounds": 6,
        "method": {"name": "ditto", "lr": 0.01, "local_steps": 2, "batch_size": 4},
        "merge": {"optimizer": {"name": "fedadam", "lr": 0.01}},
    },
    "kept commits that count pairs": {**KEPT, "merge": {"weights": "mass"}},
    "kept commits with distributed noise": {
        **KEPT,
        "privacy": {"kind": "distributed", **NOISE},
        "merge": {"weights": "uniform"},
    },
    "settings name it, and the best round": {
        "data": {"flip": ["ann"], "duplicates": "drop_tested", "validation_fraction": 0.25},
        "stop": {"patience": 1},
        "evaluate": {"unseen": ["ann"], "every": 1},
        "merge": {"ranks": {"ann": 1}},
    },
    "alignment": {
        "method": {"name": "fedbis", "lr": 0.01, "local_steps": 1, "batch_size": 4},
        "align": {**ALIGN, "generations": 2, "client_judge": "bytes", "refresh": {"pairs": 4}},
    },
    "tastes": {
        "method": {"name": "fedvpa", "lr": 0.01, "local_steps": 1, "batch_size": 4},
        "model": {"variational": {"latent": 4, "widths": [16, 8]}},
        "align": {**ALIGN, "tastes": "posteriors", "generations": 2},
    },
    "noise from the seed": {"privacy": {"kind": "central", **NOISE}, "merge": {"weights": "uniform"}},
    "a rule and newcomers": {
        "method": {"name": "scaffold", "lr": 0.01, "local_steps": 1, "batch_size": 4},
        "merge": {"rule": "norm_clip", "max_norm": 0.05},
        "evaluate": {"unseen": ["bob"]},
    },
    "a fleet": {"fleet": {"server": "buffered", "buffer": 2}, "merge": {"late": "delta"}},
    "a graph": {"graph": {"name": "ring"}},
    "worker processes": {"engine": {"workers": 1, "threads": 1}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return wordy_place(tmp_path_factory.mktemp("place"))


def experiment(place, changes, **data):
    tree = small_experiment(place)
    for table, values in changes.items():
        tree[table] = {**tree.get(table, {}), **values} if isinstance(values, dict) else values
    tree["data"] |= data
    if "align" in tree:
        tree["align"] = {**tree["align"], "prompts": str(place / "prompts.jsonl")}
    return Experiment.model_validate(tree)


def left(path):
    """All that a run leaves, without clocks and certificates."""
    apart = ("forgotten/", "cache/reference/", "exports.jsonl")
    return {name: value for name, value in outcome(path).items() if not name.startswith(apart)}


class Bytes:
    """Judges by the sum of a text's bytes."""

    def __init__(self, argument, options):
        self.identity = {"client": options.taste}

    def compare(self, questions):
        for each in questions:
            yield Verdict(float(sum(each.first.encode()) > sum(each.second.encode())), "")


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", CASES)
def test_forget_is_never_had(place, tmp_path, name, monkeypatch):
    monkeypatch.setitem(JUDGES.builtin, "bytes", Bytes)
    monkeypatch.setitem(ARGUMENTS, "bytes", "")
    old, never, who, first = tmp_path / "run", tmp_path / "never", "ann", 1
    run(experiment(place, CASES[name]), old)
    if name.startswith("kept commits"):
        rounds = outcome(old)["rounds.jsonl"]
        visits = {c: min((r["round"] for r in rounds if c in r["cohort"]), default=0) for c in WORDY}
        first, who = max((number, client) for client, number in visits.items())
    run(experiment(place, CASES[name], exclude=[who]), never)
    texts = [*rows_of(place, "train", who), *rows_of(place, "test", who)]
    assert found(old, texts)
    planned = plan(old, [who])
    (certificate,) = forget(old, [who])
    apart = ("forgotten/",)
    numbers = {file: digest for file, digest in digests(old).items() if not file.startswith(apart)}
    assert numbers == digests(never)
    assert (old / "config.toml").read_text() == (never / "config.toml").read_text()
    assert not found(tmp_path, texts)
    configs = [*old.rglob("config.toml")]
    assert not any("run.forgetting" in path.read_text() for path in configs)
    assert len(configs) == (3 if name == "alignment" else 1)
    assert found(old, rows_of(place, "train", next(each for each in WORDY if each != who)))
    assert certificate == old / f"forgotten/{who}.json"
    content = files.loads_with_digest(certificate.read_bytes())
    before, after = content["digests"]["before"], content["digests"]["after"]
    assert after["data"] == RunReader(never).commit.fingerprint["data"] != before["data"]
    assert planned.after == (first - 1 if name == "kept commits" else 0)
    assert first > 1 or not name.startswith("kept commits")
    assert planned.why
    assert sorted(tmp_path.iterdir()) == [never, old]


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory):
    """A run, and the run that never had ann."""
    folder = tmp_path_factory.mktemp("runs")
    run(experiment(place, {}), folder / "old")
    run(experiment(place, {}, exclude=["ann"]), folder / "never")
    return folder


def test_excluded_rows_may_be_deleted(place, runs, tmp_path):
    """The run without the client is that of files without its rows; and resumes with such files."""
    for name in ("train", "test"):
        rows = [row for row in rows_of(place, name) if row["worker"] != "ann"]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "test")}
    run(experiment(place, {}, **paths), tmp_path / "run")
    apart = ("config.toml", "cache/data/", "checkpoint/COMMIT.json")
    a, b = (
        {name: value for name, value in left(path).items() if not name.startswith(apart)}
        for path in (tmp_path / "run", runs / "never")
    )
    assert a == b
    shutil.copytree(runs / "old", tmp_path / "copy")
    forget(tmp_path / "copy", ["ann"])
    longer = experiment(place, {"rounds": 3}, exclude=["ann"], **paths)
    assert len(run(longer, tmp_path / "copy", resume=True).rounds) == 3


@pytest.mark.parametrize("in_one_step", [True, False])
def test_killed_anywhere(runs, tmp_path, monkeypatch, in_one_step):
    """At any moment the folder is the old run or the new one, and the same call continues.

    The replay itself, which is a run, is a copy here.
    """
    before, after = left(runs / "old"), left(runs / "never")
    calls = {"left": 0}

    def crashing(real):
        def call(*arguments, **named):
            calls["left"] -= 1
            if calls["left"] == 0:
                raise Crash
            return real(*arguments, **named)

        return call

    def replayed(wanted, path, **named):
        if not (path / "summary.json").exists():
            shutil.rmtree(path)
            shutil.copytree(runs / "never", path)

    if not in_one_step:
        monkeypatch.setattr(ctypes, "CDLL", lambda *given, **named: None)

    def built(wanted, folder):
        shutil.copytree(runs / "never/cache/data", folder)
        return FederatedDataset.open(folder)

    monkeypatch.setattr(forgetting, "run_experiment", replayed)
    monkeypatch.setattr(forgetting, "build_data", built)
    for where, name in (
        (files, "write"),
        (files, "replace"),
        (files, "exchange"),
        (files, "sync"),
        (shutil, "rmtree"),
        (Path, "rename"),
    ):
        monkeypatch.setattr(where, name, crashing(getattr(where, name)))
    crashes, states = 0, set()
    for at in range(1, 100):
        calls["left"] = 0
        path = tmp_path / str(at) / "run"
        shutil.copytree(runs / "old", path)
        calls["left"] = at
        try:
            forget(path, ["ann"])
        except Crash:
            crashes += 1
            content = left(path) if path.exists() else None
            states.add("old" if content == before else "new" if content == after else "none")
            assert path.exists() or (path.parent / "run.forgetting/old").exists()
            if states <= {"old"} and (path.parent / "run.forgetting/request.json").exists():
                with pytest.raises(StoreError, match="forgetting 'ann' is not finished"):
                    forget(path, ["bob"])
            (certificate,) = forget(path, ["ann"])
            assert certificate.exists()
        assert left(path) == after
        assert [entry.name for entry in path.parent.iterdir() if any(entry.iterdir())] == ["run"]
        if calls["left"] > 0:
            break
    assert crashes > 10
    assert states == ({"old", "new"} if in_one_step else {"old", "new", "none"})


def test_pairs_of_a_client(place, tmp_path):
    """Two pairs, one by one, of a run of pairs from memory; the second certificate has a name of its own."""
    pairs = rows_of(place, "train", "bob")[:2]
    data = {name: rows_of(place, name) for name in ("train", "test")}
    settings = experiment(place, {})
    tables = settings.tables()
    of = {key: value for key, value in tables["data"].items() if key not in data}
    run(Experiment(**{**tables, "data": of}), tmp_path / "run", data=data)
    for number, row in enumerate(pairs):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        assert found(tmp_path / "run", [row])
        (certificate,) = forget(tmp_path / "run", ["bob"], str(tmp_path / "rows.jsonl"))
        assert certificate.name == ("bob.json", "bob-2.json")[number]
        assert not found(tmp_path / "run", [row])
    kept = [row for row in data["train"] if row not in pairs]
    run(Experiment(**{**tables, "data": of}), tmp_path / "never", data={**data, "train": kept})
    names = ("rounds.jsonl", "checkpoint/server@000002.safetensors", "data/train.jsonl", "data/test.jsonl")
    a, b = left(tmp_path / "run"), left(tmp_path / "never")
    assert {name: a[name] for name in names} == {name: b[name] for name in names}
    # config.toml names the folder of the run, so what comes after works.
    prefed_("evaluate", tmp_path / "run", "--split", "train")


def test_what_both_models_disclose(place, tmp_path):
    """The certificate's AUC are those of all pairs of scores, one by one, under the models that are left. It
    names an export that was made during the replay."""
    draw = np.random.default_rng(2)
    texts = ["".join(draw.choice(list("abcdef "), 12)) for _ in range(60)]
    rows = [
        {"prompt": t, "chosen": " up", "rejected": " down", "worker": WORDY[n % 2]}
        for n, t in enumerate(texts)
    ]
    for name, part in (("train", rows[:36]), ("test", rows[36:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "test")}
    run(experiment(place, {}, **paths), tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "old")

    class Exports(Callback):
        def on_round_end(self, record):
            record_copy(tmp_path / "run", "export", tmp_path / "late")

    (certificate,) = forget(tmp_path / "run", ["ann"], callbacks=[Exports()])
    assert str(tmp_path / "late") in certificate.read_text()
    old, models = load_run(tmp_path / "old", data=True), {}
    for name in ("old", "run"):
        models[name] = load_run(tmp_path / name).published_model

    def margins(split):
        found = [
            old.trainers.pair_trainer.score(models[name], getattr(old.trainers.dataset.clients["ann"], split))
            for name in models
        ]
        shifts = [scores.policy - scores.reference for scores in found]
        before, after = ([float(chosen - rejected) for chosen, rejected in each] for each in shifts)
        return {
            "before": before,
            "after": after,
            "difference": [a - b for a, b in zip(before, after, strict=True)],
        }

    inside, outside, disclosed = (
        margins("train"),
        margins("test"),
        json.loads(certificate.read_text())["disclosed"],
    )
    assert disclosed["pairs"] == [18, 12]
    for name in inside:
        above = [(a > b) + (a == b) / 2 for a in inside[name] for b in outside[name]]
        assert disclosed[name]["auc"] == pytest.approx(sum(above) / (18 * 12), abs=0.01)
    assert len({disclosed[name]["auc"] for name in inside}) == 3


def test_what_is_refused(place, runs, tmp_path, subtests):
    old = tmp_path / "old"
    shutil.copytree(runs / "old", old)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**rows_of(place, "train", "bob")[0], "chosen": " away"}) + "\n")
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows_of(place, "train", "bob")))
    for given, error, words in (
        ((["anna"],), RunError, "no client is called 'anna'; did you mean 'ann'"),
        (([],), RunError, "nothing to forget"),
        ((["ann", "bob"], str(rows)), RunError, "--rows takes the pairs of one client"),
        ((["bob"], str(rows)), DataError, r"rows.jsonl, row 1: not a pair of 'bob' in the run"),
        ((["bob"], str(mine)), DataError, "no training pair of 'bob' is left: forget the client"),
        ((["bob"], None, ["method.lr=1"]), ConfigError, "--set method.lr=1: only paths"),
    ):
        with subtests.test(words), pytest.raises(error, match=words):
            forget(old, *given[:2], overrides=given[2] if len(given) > 2 else ())
    assert not (tmp_path / "old.forgetting").exists()
    refresh = shutil.copytree(old, tmp_path / "x/align/generations/2/refresh")
    with pytest.raises(RunError, match=f"refresh continues the rounds of {tmp_path}/x: forget there"):
        forget(refresh, ["ann"])
    record_copy(refresh, "export", tmp_path / "adapter")
    record_copy(refresh, "page", refresh / "report.html")
    assert [row["to"] for row in read_copies(tmp_path / "x")] == [str(tmp_path / "adapter")]
    (old / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"notes.txt is not a file of the run"):
        forget(old, ["ann"])
    (old / "notes.txt").unlink()
    assert left(old) == left(runs / "old")
    moved = tmp_path / "moved.jsonl"
    settings = json.loads(json.dumps(experiment(place, {}).tables()))
    settings["data"]["train"]["path"] = str(moved)
    shutil.copy(place / "train.jsonl", moved)
    run(Experiment.model_validate(settings), tmp_path / "run")
    moved.unlink()
    with pytest.raises(DataError, match=r"moved.jsonl is missing; .* --set data.train.path=PATH"):
        forget(tmp_path / "run", ["ann"])
    forget(tmp_path / "run", ["ann"], overrides=[f"data.train.path={place / 'train.jsonl'}"])
    again = forget(tmp_path / "run", ["ann"])
    assert again == [tmp_path / "run/forgotten/ann.json"]
    drawn = experiment(place, {}, partition={"by": "iid", "clients": 3})
    run(drawn, tmp_path / "drawn")
    with pytest.raises(RunError, match="draws clients from the rows"):
        forget(tmp_path / "drawn", ["client-0"])
    forget(tmp_path / "drawn", [], str(mine))
    assert not found(tmp_path / "drawn", rows_of(place, "train", "bob"))
    with pytest.raises(ConfigError, match="exclude names clients"):
        experiment(place, {}, partition={"by": "iid", "clients": 3}, exclude=["client-0"])


def test_the_plan_and_the_command(runs, place, tmp_path):
    old, out = tmp_path / "old", tmp_path / "elsewhere"
    shutil.copytree(runs / "old", old)
    prefed_("export", old, "--client", "bob")
    prefed_("export", old, "--out", out)
    prefed_("report", old)
    prefed_("report", old, "--out", tmp_path / "page.html")
    # A run of the exported model, which was exported in turn, and one whose settings name something similar.
    for run_, model, copy in (
        ("child", out, "far"),
        ("other", f"{out}2", "no"),
        ("grandchild", "child", "no"),
    ):
        (tmp_path / run_).mkdir()
        (tmp_path / run_ / "config.toml").write_text(f'name = "{tmp_path / model}"\n')
        record_copy(tmp_path / run_, "export", tmp_path / copy)
    printed = [" ".join(line.split()) for line in prefed_("forget", old, "--client", "ann").splitlines()]
    for start in (
        f"{old}: forget 'ann' (4 training pairs, 0 validation, 2 test)",
        "replay 2 rounds from the start: every client takes part",
        "made again cache",
        "made again adapters/shared",
        "deleted adapters/client-bob",
        "deleted report.html",
        f"not reached {out}",
        f"not reached {place / 'train.jsonl'}",
        f"not reached {tmp_path / 'page.html'} page of",
        f"not reached {tmp_path / 'child'} its settings name old: start it again",
        f"not reached {tmp_path / 'far'} export of",
        f"not reached {tmp_path / 'grandchild'} its settings name child: start it again",
        "nothing was changed",
    ):
        assert any(line.startswith(start) for line in printed), start
    assert not any(str(tmp_path / "other") in line for line in printed)
    done = prefed_("forget", old, "--client", "ann", "--yes").splitlines()[-1]
    assert done == f"certificate: {old}/forgotten/ann.json"
    assert not (old / "adapters/client-bob").exists()
    content = json.loads((old / "forgotten/ann.json").read_text())
    assert ("not reached", str(out)) in [(each["action"], each["where"]) for each in content["descendants"]]
    assert "no client is called 'zoe'" in prefed_("forget", old, "--client", "zoe", code=1)


def test_log_keeps_few_and_replays_at_most_twice():
    """For any first visit f of n rounds there is a kept commit before it, or the start, from which at most
    2 (n - f + 1) rounds are replayed; and a commit that was dropped is not needed later."""
    rule = CheckpointConfig(keep="log")
    before: set[int] = set()
    for last in range(1, 200):
        kept = {number for number in range(1, last + 1) if rule.keeps(number, last)}
        assert kept <= before | {last}
        assert len(kept) <= 2 * last.bit_length() + 1
        before = kept
        for first in range(1, last + 1):
            start = max((number for number in kept if number < first), default=0)
            assert last - start <= 2 * (last - first + 1)
