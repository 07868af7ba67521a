"""What is printed before a run. A dry run has the run's counts and nearly its bytes, and writes nothing."""

import json
import re
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import tomli_w
import torch
from typer.testing import CliRunner

import prefed.runs.answers
import prefed.runs.dry_run
import prefed.runs.rounds
import prefed.train.generation
import toy
from finished import small_experiment
from prefed import Experiment, run
from prefed.core import Callback
from prefed.core.files import WriteError
from prefed.core.wire import encode
from prefed.engines import RoundError, Task
from prefed.runs.dry_run import Trial, dry_run, steps_of
from prefed.testing import QuadraticTrainer
from prefed.train.generation import Completion
from prefed.ui.cli import app


def experiment(place, **changes):
    return Experiment.model_validate(small_experiment(place, **changes))


CASES = {
    "feddpo": {},
    "every second round evaluated": {"rounds": 4, "evaluate": {"every": 2}},
    "fedpdpo": {"method": {"name": "fedpdpo", "lr": 0.01, "local_steps": 3, "batch_size": 4}},
    "fedbiscuit": {
        "rounds": 5,
        "method": {
            "name": "fedbiscuit", "lr": 0.01, "local_steps": 2, "batch_size": 4, "selectors": 2,
            "warmup_rounds": 2, "regroup_every": 2,
        },
    },
    "decdpo": {"method": {"name": "decdpo", "lr": 0.01, "local_steps": 3, "batch_size": 4}},
    "gradients": {
        "method": {"name": "fedala", "lr": 0.01, "local_steps": 3, "batch_size": 4},
        "evaluate": {"diagnose": 2},
    },
    "a gradient of gradients": {"method": {"name": "perfedavg", "variant": "hf", "local_steps": 2}},
    "a late fleet": {"rounds": 3, "fleet": {"max_delay": 1}, "cohort": {"size": 1}},
}  # fmt: skip


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_what_it_predicts_is_what_the_run_has(place, tmp_path, changes):
    """The run is the oracle: clients, pairs and parameters are equal. Its messages differ in the digits of a
    few numbers: bytes are within 3 in 100. The disk is what the run's directory holds at most."""
    asked = experiment(place, **changes)
    before = sorted(tmp_path.rglob("*"))
    found = dry_run(asked, tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before
    held = 0

    class Held(Callback):
        def on_round_end(self, record):
            nonlocal held
            folders = ("checkpoint", "cache")
            paths = [p for folder in folders for p in (tmp_path / "run" / folder).rglob("*") if p.is_file()]
            held = max(held, sum(path.stat().st_size for path in paths if path.suffix != ".json"))

    summary = run(asked, tmp_path / "run", callbacks=[Held()]).summary
    log = (tmp_path / "run/run.log").read_text()
    assert f"round {asked.rounds}/{asked.rounds}  loss " in log
    assert "Case" not in log  # as every prompt begins
    alike = "the selectors differ only in the order of their batches"
    assert (alike in log) == (asked.method.name == "fedbiscuit")
    assert found.method == summary["method"]
    assert (found.rounds, found.clients["train"]) == (summary["rounds"], len(summary["clients"]))
    assert found.clients["evaluated"] == len(summary["preference_accuracy"]["per_client"])
    for split in ("train", "validation", "test"):
        assert found.pairs[split] == sum(sizes[split] for sizes in summary["clients"].values())
    assert found.parameters == summary["parameters"]
    for way in ("up", "down"):
        assert found.bytes[way] == pytest.approx(summary["bytes"][way], rel=0.03)
        assert found.bytes_per_round[way] == pytest.approx(found.bytes[way] / found.rounds, abs=0.5)
    assert held <= found.disk["cache"] + found.disk["checkpoint"] <= 3 * held
    adapters = [p.stat().st_size for p in (tmp_path / "run/adapters").rglob("*.safetensors")]
    assert found.disk["adapters"] == pytest.approx(sum(adapters), rel=0.4)
    assert found.timed["client"] in summary["clients"]
    assert found.timed["steps"] > 0
    assert found.seconds > 0


class Clock:
    """A clock that only trainers move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("feddpo", {"local_steps": 50}, 5 + 2 * 50),
        ("feddpo", {"local_steps": 2}, 5 + 2 * 2),
        ("feddpo", {"local_steps": 1}, 5 + 2),
        ("feddpo", {"local_steps": None, "local_epochs": 7}, None),
        ("ditto", {"local_steps": 40}, 2 * (5 + 2 * 40)),
        ("pfedme", {"local_steps": 30, "inner_steps": 4}, None),
    ],
)
def test_a_visit_is_as_long_as_its_phases(monkeypatch, method, settings, expected):
    """A phase here takes 5 s and 2 s a step. From 1 and 3 timed steps that is found again for any number, and
    for every phase of a visit, though of many like ones only the first is run. The oracle runs them all."""
    clock, ran = Clock(), []
    monkeypatch.setattr(prefed.runs.dry_run.time, "perf_counter", clock)

    class Slow(QuadraticTrainer):
        def train(self, tensors, phase):
            steps = steps_of(phase, self.size)
            clock.now += 5 + 2 * steps
            ran.append(steps)
            return super().train(tensors, phase)

    class Trainers(toy.ToyTrainers):
        def trainer(self, client, now, key, ownership):
            return Slow(client, self.data[client], now, key, ownership, self.initial)

    options = toy.options(method=method, settings=settings)
    job = toy.Job(Trainers(options), toy.real_method(options), 7, 4)
    client = job.members[0]
    (exchange,) = job.method.exchanges
    message = encode(exchange.send(job.method.init_server(job.trainers.initial), client, job.round(1)))
    task = Task("visit", client, 1, exchange.name, message)
    seconds, result = Trial(job, 1).task(task)
    assert not result.withheld
    assert max(ran) <= 3
    ran.clear()
    with toy.InProcess(job, toy.MemoryStates()) as backend:
        list(backend.run([task]))
    assert seconds == sum(5 + 2 * steps for steps in ran)
    assert expected in (None, seconds)


def test_answers_take_as_long_as_in_the_run(place, tmp_path, monkeypatch):
    """Here a batch takes 5 s and 2 s a token of its longest answer, and every answer has the maximum length.
    The oracle is the run: its models answer two prompts of ``[report]`` after rounds 1, 2, 4 and 5, and three
    held-out ones after rounds 2, 4 and 5."""
    clock, written = Clock(), []

    def slow(backbone, tensors, prompts, how, keys, tastes):
        clock.now += 5 + 2 * how.max_tokens
        written.extend(prompts)
        return [Completion([7] * how.max_tokens, None) for _ in prompts]

    monkeypatch.setattr(prefed.runs.dry_run.time, "perf_counter", clock)
    monkeypatch.setattr(prefed.train.generation, "complete_batch", slow)
    for module in (prefed.runs.answers, prefed.train.generation):
        monkeypatch.setattr(module, "surprises", lambda backbone, prompts, given: [1.0] * len(given))
    method = {"name": "fedper", "lr": 0.01, "local_steps": 1, "batch_size": 4}
    asks = {"evaluate": {"every": 2, "text": 3}, "report": {"prompts": ["Up?", "Down it goes?"]}}
    asked = experiment(place, method=method, rounds=5, **asks)
    found = dry_run(asked, tmp_path / "run")
    clock.now = 0.0
    written.clear()
    run(asked, tmp_path / "run")
    assert found.answers == {"number": len(written), "tokens": 64}
    assert found.seconds_per_round["answers"] * 5 == pytest.approx(clock.now)


REFUSED = {
    "cohort": ({"cohort": {"size": 9}}, r"\[cohort\] size = 9, but only 2 clients"),
    "model": ({"model": {"name": "none"}}, "none"),
    "rule": ({"merge": {"rule": "krum", "liars": 1}}, r"\[merge\] rule = 'krum' cannot merge"),
    "stack": ({"engine": {"stack": 2}, "fast": False}, "stack = 2 .*: training uses the plain path"),
    "devices": ({"engine": {"devices": ["cuda:7"]}}, "cuda:7"),
    "device": ({"device": "cuda"}, r"\[model\] device = 'cuda' is not available"),
    "report": ({"report": {"prompts": ["Case 1:"], "clients": ["nobody"]}}, "nobody"),
    "decdpo": ({"method": "decdpo", "merge": {"lora": "fedex"}}, "'fedex' needs a server, .* use 'fedit'"),
    "noise": (
        {
            "privacy": {"kind": "local", "clip": 1.0, "noise_multiplier": 1.0, "delta": 0.1},
            "merge": {"weights": "uniform"},
        },
        "needs the package dp-accounting",
    ),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_run_refuses_it_refuses_in_the_same_words(place, tmp_path, monkeypatch, changes, message):
    """Also what a run finds out late: when its first round begins, or in a worker. No failed start leaves
    a directory."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    own = {key: value for key, value in changes.items() if key in ("fast", "device")}
    model = {**small_experiment(place)["model"], **own}
    asked = experiment(place, **{"model": model, **{k: v for k, v in changes.items() if k not in own}})
    words = []
    for start in (dry_run, run):
        with pytest.raises((ValueError, OSError, RuntimeError), match=message) as caught:
            start(asked, tmp_path / "run")
        words.append(str(caught.value))
    assert words[0] == words[1]
    assert not list(tmp_path.iterdir())


def test_a_start_that_fails_after_its_commit_leaves_nothing(place, tmp_path, monkeypatch):
    """The backend starts after round 0 is committed."""
    monkeypatch.setattr(prefed.runs.rounds, "_backend", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(experiment(place), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_said(place, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(WriteError, match=r"not enough disk .*: the run needs [\d.]+ kB, and 1\.0 kB is free"):
        dry_run(experiment(place), tmp_path / "deep/run")


def test_an_upload_that_would_not_be_merged_is_said(place, tmp_path):
    """A learning rate at which the first visit ends in NaN."""
    settings = {"name": "feddpo", "lr": 1e30, "local_steps": 3, "batch_size": 4}
    with pytest.raises(RoundError, match="the upload of client 'left' in 'train' cannot be merged: "):
        dry_run(experiment(place, method=settings), tmp_path / "run")


def test_the_command_prints_and_writes_nothing(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "exp.toml").write_text(tomli_w.dumps(small_experiment(place)))
    result = CliRunner().invoke(app, ["run", "exp.toml", "--dry-run"])
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "feddpo, 2 rounds → runs/exp-feddpo-seed3"
    assert lines[1] == "clients     2 train, 2 per round; 2 evaluated"
    assert lines[2] == "pairs       16 for training, 0 for validation, 8 for testing"
    assert lines[-1] == "no problems found; nothing was written"
    assert "estimated from 3 steps of client 'left' and 4 evaluated pairs" in result.stdout
    result = CliRunner().invoke(app, ["run", "exp.toml", "--dry-run", "--json"])
    content = json.loads(result.stdout)
    whole = asdict(dry_run(experiment(place), tmp_path / "run"))
    clocked = {"seconds", "seconds_per_round", "peak_memory_mb", "disk"}
    assert {k: v for k, v in content.items() if k not in clocked} == {
        k: v for k, v in whole.items() if k not in clocked
    }
    result = CliRunner().invoke(app, ["run", "exp.toml", "--dry-run", "--quiet"])
    assert len(result.stdout.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["exp.toml"]


def test_a_run_that_is_there(place, tmp_path, monkeypatch):
    """By default a dry run warns in the run's words, since it writes nothing. They name the settings that
    differ, apart from those without effect on results; ``--out`` names a directory for the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "exp.toml").write_text(tomli_w.dumps(small_experiment(place)))
    prefed = CliRunner().invoke
    assert prefed(app, ["run", "exp.toml", "--quiet"]).exit_code == 0
    path = "runs/exp-feddpo-seed3"
    there = f"{path} already contains a run: resume it (--resume, or resume=True), or choose another --out; "
    there += "that run has "
    same, lr = there + "the same settings\n", ["--set", "method.lr=0.5", "--set", "engine.workers=2"]
    other = there + "other settings (run → given):\n  method.lr: 0.01 → 0.5\n"
    for words, text in (([], same), (lr, other)):
        refused = prefed(app, ["run", "exp.toml", *words])
        assert (refused.exit_code, refused.stderr) == (1, f"error: {text}")
        named = prefed(app, ["run", "exp.toml", *words, "--dry-run", "--out", path])
        assert (named.exit_code, named.stderr) == (1, f"error: {text}")
    tried = prefed(app, ["run", "exp.toml", "--dry-run", "--quiet"])
    assert tried.exit_code == 0
    assert tried.stderr.startswith(f"warning: {same}")


def test_the_data_as_json(place, tmp_path, monkeypatch):
    """What each client holds, by hand: rows go to the two workers in turn, 16 to train on and 8 to test on,
    and none is left out. The terminal's table has the same numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "exp.toml").write_text(tomli_w.dumps(small_experiment(place)))
    result = CliRunner().invoke(app, ["data", "exp.toml", "--json"])
    content = json.loads(result.stdout)
    held = {
        each["id"]: [each[split] for split in ("train", "validation", "test")] for each in content["clients"]
    }
    assert held == {"left": [8, 0, 4], "right": [8, 0, 4]}
    counts = content["row_counts"]
    assert (counts["read"], counts["kept"], sum(counts.values())) == (24, 24, 48)
    assert content["gini"] == 0
    shown = CliRunner().invoke(app, ["data", "exp.toml", "--quiet"]).stdout
    for each in content["clients"]:
        assert re.search(rf"{each['id']} .* 8 .* 0 .* 4 .*{each['token_distance']:.2f}", shown)
    assert [path.name for path in tmp_path.iterdir()] == ["exp.toml"]
