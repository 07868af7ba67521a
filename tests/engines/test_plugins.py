"""Methods from outside the package: the same runs under every engine, and no code that nobody asked for."""

import json
import shutil
import sys
import threading
import tomllib
from importlib import import_module

import pytest
import tomli_w
from typer.testing import CliRunner

import federating
import outside
import peering
from commands import prefed_
from federating import Here, Within, closed, site_config
from finished import small_experiment
from prefed import Experiment, run
from prefed.config import ConfigError
from prefed.core import plugins
from prefed.data import DataError
from prefed.engines.backends import processes
from prefed.methods import METHODS
from prefed.networks.federation import site as site_module
from prefed.networks.federation.experiment import build_site_job, site_factory, started_experiment
from prefed.networks.federation.federate import Terms, federate
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import FederationError
from prefed.runs.build import job_factory
from prefed.runs.evaluate import evaluate
from prefed.runs.finished_run import RunError, read_run
from prefed.runs.loaded_run import load_run
from prefed.store import StoreError
from prefed.train.metrics import TABLE
from prefed.ui.cli import app
from workers import make_place

METHOD = outside.LG_FEDAVG
TRAP = "from pathlib import Path\nPath({!r}).touch()\n"


@pytest.fixture(scope="module")
def usual(place):
    """A run without code from outside."""
    return run(Experiment(**small_experiment(place)), place / "usual")


def forget():
    """As a new process, which knows only what is on disk."""
    for known in (plugins._allowed, *(r._loaded for r in plugins.REGISTRIES.values())):
        known.clear()
    plugins._package.cache_clear()
    plugins.entry_points.cache_clear()
    for name in [name for name in sys.modules if name.startswith(("prefed_file_", "lgpack"))]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def stranger(tmp_path, monkeypatch):
    """A user who has not named any code yet, and how to become another such user."""

    def become(name):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))
        (tmp_path / name).mkdir(exist_ok=True)
        forget()

    become("state")
    yield become
    become("state")


@pytest.fixture
def file(place, tmp_path):
    """An experiment file next to a method's file."""
    (tmp_path / "lg.py").write_text(METHOD)
    (tmp_path / "rule.py").write_text(RULE)
    text = tomli_w.dumps(small_experiment(place)).replace('name = "feddpo"', 'name = "./lg.py"')
    (tmp_path / "experiment.toml").write_text(text)
    return tmp_path / "experiment.toml"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a method, also as an entry point."""
    points = {"methods": "lgfedavg = lgpack.method:METHOD"}
    folder = outside.install(tmp_path / "site-packages", "lgpack", {"method.py": METHOD}, points)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("COLUMNS", "160")  # no cell of a table is cut
    return folder


def numbers(path):
    return {
        k: v
        for k, v in json.loads((path / "summary.json").read_text()).items()
        if k in ("preference_accuracy", "loss", "bytes")
    }


@pytest.fixture
def fresh_workers(forked_workers, monkeypatch):
    """Forked workers, which find nothing loaded or allowed, as new processes do."""
    serve = processes.serve

    def fresh(*handles):
        forget()
        serve(*handles)

    monkeypatch.setattr(processes, "serve", fresh)


def test_a_file_trains_evaluates_exports_and_compares(file, tmp_path, monkeypatch):
    """The method keeps the LoRA of block 0 on the client, so half the LoRA's parameters are sent. Commands
    load the file anew. What it prints, imported and when it builds the method, goes to standard error."""
    last = "    return fedavg.method"
    assert last in METHOD
    text = "print('imported')\n" + METHOD.replace(last, f"    print('built')\n{last}")
    (tmp_path / "lg.py").write_text(text)
    out = tmp_path / "run"
    prefed_("run", file, "--out", out)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["method"] == "lgfedavg"
    assert summary["parameters"]["communicated"] * 2 == summary["parameters"]["trainable"]
    code = summary["origin"]["code"]
    source = plugins._find(str(tmp_path / "lg.py"))
    assert code == {str(tmp_path / "lg.py"): {"place": source.place, "version": "", "sha256": source.digest}}
    other = tmp_path / "other"
    monkeypatch.chdir(tmp_path)
    for words in (
        ("export", out, "--out", tmp_path / "left", "--client", "left", "--card"),
        ("report", out),
        ("run", file, "--set", "method.blocks=0", "--out", other),
        ("compare", out, other),
    ):
        forget()
        prefed_(*words)
    assert "own lower blocks, shared upper blocks – LG-FedAvg (arXiv" in (out / "report.html").read_text()
    card = (tmp_path / "left/README.md").read_text()
    assert "| method | lgfedavg: own lower blocks, shared upper blocks |\n| source | LG-FedAvg (arXiv" in card
    forget()
    shown = CliRunner().invoke(app, ["evaluate", str(out), "--json"])
    assert json.loads(shown.stdout)["preference_accuracy"] == summary["preference_accuracy"]
    assert "imported\n" in shown.stderr
    assert "built\n" in shown.stderr


@pytest.mark.usefixtures("fresh_workers")
def test_every_way_to_name_it_is_one_method_in_every_process(file, package, tmp_path):
    run(Experiment.load(file), tmp_path / "direct")
    for name, workers in (("./lg.py:METHOD", 1), ("lgpack.method:METHOD", 0), ("lgfedavg", 1)):
        named = Experiment.load(file, [f"method.name={name}", f"engine.workers={workers}"])
        assert named.method.kind.title == "own lower blocks, shared upper blocks"
        out = tmp_path / name.strip("./")
        run(named, out)
        assert numbers(out) == numbers(tmp_path / "direct")
        code = read_run(out).summary["origin"]["code"]
        assert [own["version"] for own in code.values()] == ["" if name.startswith("./") else "1.5"]
        assert load_run(out).method.name == "lgfedavg"


def test_a_package_is_listed_and_its_settings_are_written_and_checked(package, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "own lower blocks, shared upper blocks" in prefed_("methods")
    prefed_("init", "lgfedavg")
    text = (tmp_path / "lgfedavg.toml").read_text()
    assert "# lower blocks whose LoRA each client keeps\n# blocks = 1\n" in text
    with pytest.raises(ConfigError, match=r"method.blocks = -1: should be greater than or equal to 0"):
        Experiment(**small_experiment(place, method={"name": "lgfedavg", "blocks": -1}))
    with pytest.raises(ConfigError, match=r"method.block: no such key; did you mean 'blocks'"):
        Experiment(**small_experiment(place, method={"name": "lgfedavg", "block": 1}))
    with pytest.raises(ConfigError, match=r"'lgfedvg'; did you mean 'lgfedavg'\?.*your own: ./FILE.py"):
        Experiment(**small_experiment(place, method="lgfedvg"))
    made = Experiment(**small_experiment(place, method=import_module("lgpack.method").METHOD))
    assert made.method.name == "lgfedavg"


def test_a_package_does_not_hide_another_or_prefed(package, place):
    """Two packages with one entry point, and one with the name of a method of prefed: the list says so, and
    methods without a source or whose module cannot be imported do not end it."""
    points = {
        "methods": "lgfedavg = other:METHOD\nditto = other:METHOD\nlone = other:LONE\nlazy = other:LAZY"
    }
    more = "LONE, LAZY = (MethodKind(name, '', module=f'other.{name}') for name in ('lone', 'lazy'))\n"
    modules = {"__init__.py": METHOD + more, "lone.py": "", "lazy.py": "import nothing_of_this_name\n"}
    outside.install(package, "other", modules, points)
    plugins.entry_points.cache_clear()
    with pytest.raises(ConfigError, match=r"'lgfedavg' is an entry point of several packages; name one"):
        Experiment(**small_experiment(place, method="lgfedavg"))
    assert Experiment(**small_experiment(place, method="ditto")).method.kind is METHODS.builtin["ditto"]
    assert Experiment(**small_experiment(place, method="other:METHOD")).method.kind.name == "lgfedavg"
    listed = " ".join(prefed_("methods").split())
    for text in (
        "lgfedavg 'lgfedavg' is an entry point",
        "other:METHOD not called ditto, which is a method of prefed",
        "does not define SOURCE, Settings, needs, build",
        "method 'lazy': other.lazy cannot be imported: ModuleNotFoundError: No module named",
    ):
        assert text in listed, text


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("./none.py", r"none.py: no such file"),
        ("./lg.py:OTHER", r"lg.py defines no OTHER"),
        ("./lg.py:SOURCE", r"lg.py:SOURCE is str, not a MethodKind"),
        ("./sourceless.py", r"method 'lgfedavg': /.*sourceless.py does not define SOURCE"),
        ("./nameless.py", r"'lgfedavg' is not one of prefed: write MethodKind\(…, module=__name__\)"),
        ("./broken.py", r"broken.py cannot be imported: ZeroDivisionError"),
        ("./exits.py", r"exits.py cannot be imported: SystemExit: 0"),
        ("./plain.py", r"method 'lgfedavg': Settings must derive from LocalSettings"),
        ("./next_to.py", r"No module named 'lg'; a file cannot import its neighbours, .*: prefed new method"),
        ("nopack.method:METHOD", r"no package is called 'nopack'; install it, or name a file"),
    ],
)
def test_what_is_wrong_is_named(name, problem, file, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "sourceless.py").write_text(
        METHOD.replace("SOURCE =", "PAPER =").replace("SOURCE,", "PAPER,")
    )
    (tmp_path / "nameless.py").write_text(METHOD.replace(", module=__name__", ""))
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "plain.py").write_text(METHOD.replace("Settings(LocalSettings)", "Settings"))
    (tmp_path / "next_to.py").write_text("from lg import METHOD\n")
    with pytest.raises(ConfigError, match=problem):
        Experiment.load(file, [f"method.name={name}"])


def test_a_package_may_import_its_neighbours(tmp_path, monkeypatch):
    """What a package misses is named, without the advice for a file, whatever is in the working directory."""
    text = {"method.py": "import lghelper\n" + METHOD}
    monkeypatch.syspath_prepend(outside.install(tmp_path / "site-packages", "lgneedy", text, {}))
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "lghelper.py").touch()
    monkeypatch.chdir(place)
    error = prefed_("init", "lgneedy.method:METHOD", code=2)
    assert "No module named 'lghelper'" in error
    assert "neighbours" not in error


def test_a_changed_file_is_named_on_resume_and_on_evaluation(file, tmp_path):
    run(Experiment.load(file), tmp_path / "run")
    (tmp_path / "lg.py").write_text(METHOD.replace("ge=0", "ge=1"))
    with pytest.raises(StoreError, match=r"cannot continue: /.*/lg.py changed since it started; restore it"):
        run(Experiment.load(file, ["rounds=4"]), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"run: /.*/lg.py changed since the run; restore it \(SHA-256"):
        load_run(tmp_path / "run")
    (tmp_path / "lg.py").write_text(METHOD)
    assert load_run(tmp_path / "run").method.name == "lgfedavg"


def test_a_changed_package_is_named(file, package, tmp_path):
    experiment = Experiment.load(file, ["method.name=lgfedavg"])
    run(experiment, tmp_path / "run")
    (package / "lgpack/more.py").write_text("MORE = 1\n")
    plugins._package.cache_clear()
    with pytest.raises(RunError, match="run: lgfedavg changed since the run"):
        load_run(tmp_path / "run")
    with pytest.raises(StoreError, match="lgfedavg changed since it started"):
        run(Experiment.load(file, ["method.name=lgfedavg", "rounds=4"]), tmp_path / "run", resume=True)


def test_an_absent_package_is_named(file, package, tmp_path):
    """By its name and version, which the summary has, and on resume by the method that it provides."""
    run(Experiment.load(file, ["method.name=lgfedavg"]), tmp_path / "run")
    plugins._package.cache_clear()
    plugins.entry_points.cache_clear()
    (package / "lgpack-1.5.dist-info/entry_points.txt").unlink()
    message = r"run: lgfedavg, from outside prefed, is not installed here; install lgpack 1\.5$"
    with pytest.raises(RunError, match=message):
        load_run(tmp_path / "run")
    with pytest.raises(StoreError, match="lgfedavg, from outside prefed, is not installed here; install the"):
        run(Experiment.load(file, ["method.name=feddpo"]), tmp_path / "run", resume=True)


# Objectives and merge rules.

LOSS = """
import torch
from prefed.train.losses import PairLoss

def loss(batch, *, beta, power):
    return torch.relu(1 - beta * batch.delta) ** power, {}

OBJECTIVE = PairLoss("powers", "nowhere", {"beta": 0.2, "power": 1.0}, function=loss)
"""
RULE = """
from prefed.merge.config import MergeRule
from prefed.merge.means_distances import weighted_mean

def rule(values, weights, share):
    return weighted_mean(values, weights) * share

MERGE_RULE = MergeRule(rule, {"share": 1.0}, least=2)
"""


@pytest.fixture
def parts(place, tmp_path):
    """An experiment with a loss and a rule of the user's own, and how to change it."""
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "rule.py").write_text(RULE)
    path = tmp_path / "experiment.toml"
    path.write_text(tomli_w.dumps(small_experiment(place)))
    return lambda *changes: Experiment.load(path, list(changes))


OBJECTIVE, RULE_NAME = "method.objective=./loss.py", "merge.rule=./rule.py"


@pytest.mark.usefixtures("forked_workers")
def test_an_objective_of_ones_own_is_trained_on(parts, tmp_path):
    """With power 1 and β = 0.2 it is the hinge loss, so the two runs are equal. With power 2 they are not.
    The default of β is the objective's, as for those of prefed."""
    asked = parts(OBJECTIVE, "engine.workers=1")
    assert asked.method.settings.beta == 0.2
    own = run(asked, tmp_path / "own").summary
    hinge = run(parts("method.objective=hinge", "method.beta=0.2"), tmp_path / "hinge").summary
    assert (own["loss"], own["preference_accuracy"]) == (hinge["loss"], hinge["preference_accuracy"])
    square = run(parts(OBJECTIVE, "method.objective_settings.power=2"), tmp_path / "square").summary
    assert square["loss"] != own["loss"]
    assert load_run(tmp_path / "own").method.name == "feddpo"
    (tmp_path / "loss.py").write_text(LOSS + "#")
    with pytest.raises(RunError, match=r"loss.py changed since the run"):
        load_run(tmp_path / "own")


KIND = """
from dataclasses import dataclass
from typing import Any
import numpy as np
from prefed.train.feedback import Feedback
from prefed.train.losses import PairLoss

@dataclass
class Gains:
    gain: Any

    def metrics(self, beta, weight=1.0, jury=()):
        raised = float((self.gain > 0).mean())
        shares = dict.fromkeys(("preference_accuracy", "reward_accuracy"), raised)
        return {**shares, "baseline_accuracy": 0.0, "margin": float(self.gain.astype(float).mean())}

DEMONSTRATIONS = Feedback(
    "demonstrations",
    "use objective 'likelihood'",
    lambda tokens, rows: np.ones(len(rows), bool),
    lambda model, rows, outputs, reference, loss: outputs[:, 0],
    lambda model, rows, outputs, reference: Gains(outputs[:, 0] - reference[:, 0]),
)
plain = dict(needs_reference=False, needs_rejected=False)
OBJECTIVE = PairLoss(
    "likelihood", "nowhere", function=lambda batch: (-batch, {}), feedback=DEMONSTRATIONS, **plain
)
PAIRED = PairLoss("paired", "nowhere", function=lambda batch: (-batch.policy_chosen, {}), **plain)
"""


def test_a_kind_of_feedback_is_one_file_with_its_objective(parts, tmp_path):
    """Demonstrations read the chosen responses of pairs. The same loss on pairs gives the same model, and its
    shift of chosen responses is their margin. Evaluations, also of the finished run, have their metrics."""
    (tmp_path / "kind.py").write_text(KIND)
    own, pairs = (
        run(parts("method.objective=./kind.py" + name), tmp_path / f"run{name[1:]}")
        for name in ("", ":PAIRED")
    )
    assert own.server.tensors["model"].equal(pairs.server.tensors["model"])
    assert own.summary["margin"] == pytest.approx(pairs.summary["chosen_shift"], rel=1e-6)
    assert own.summary.keys() == pairs.summary.keys() - {
        row.name for row in TABLE.values() if row.of == "pairs"
    }
    again = evaluate(load_run(tmp_path / "run", data=True)).figures["margin"]["mean"]
    assert again == pytest.approx(own.summary["margin"], rel=1e-6)


def test_a_rule_of_ones_own_merges(parts, usual, tmp_path):
    """With share 1 it is the mean; with 0, every merged LoRA is 0, and the model is the base model."""
    own = run(parts(RULE_NAME), tmp_path / "own")
    assert own.server.tensors["model"].equal(usual.server.tensors["model"])
    none = run(parts(RULE_NAME, "merge.rule_settings.share=0"), tmp_path / "none")
    assert none.server.tensors["model"].norm() == 0 < usual.server.tensors["model"].norm()
    assert load_run(tmp_path / "none").record.summary["origin"]["code"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ([OBJECTIVE, "method.objective_settings.pwer=2"], "has no setting 'pwer'; did you mean 'power'"),
        (["method.objective=./rule.py"], "rule.py defines no OBJECTIVE"),
        (["method.objective=dppo"], r"unknown objective 'dppo'; did you mean 'dpo'\?.* \./FILE.py"),
        ([RULE_NAME, "merge.rule_settings.shre=2"], "has no setting 'shre'; it has: share"),
        ([RULE_NAME, "cohort.size=1"], "rule.py needs at least 2 uploads, got 1"),
        ([RULE_NAME, "merge.lora=fedex"], "needs the mean of the products BA"),
        (["merge.rule_settings.share=2"], "rule 'mean' has no setting 'share'; it has: none"),
    ],
)
def test_settings_of_parts_are_checked(changes, problem, parts, tmp_path):
    with pytest.raises(ConfigError, match=problem):
        run(parts(*changes), tmp_path / "run")


# Formats, judges and trackers.

FORMAT = """
from prefed.data.sources.formats import Format, FORMATS

def convert(row):
    pair = {**row, "prompt": row["question"], "chosen": row["good"], "rejected": row["bad"]}
    return FORMATS["pairs"].convert(pair)

FORMAT = Format("mine", convert)
"""
JUDGE = '''
from prefed.align.judge import Verdict

class JUDGE:
    """It prefers the longer response."""
    def __init__(self, argument, options):
        self.identity = {"judge": "longer"}
    def compare(self, questions):
        for each in questions:
            yield Verdict(1.0 if len(each.first) > len(each.second) else 0.0, "")
'''
TRACKER = """
from pathlib import Path
from prefed.trackers.tools import Tracker

class TRACKER(Tracker):
    package, known = "json", "only"
    def __init__(self, run):
        self.file = Path(__file__).with_name("tracked.txt")
    def log(self, number, figures):
        self.file.open("a").write(f"{number} {figures['loss']}\\n")
    def finish(self, results):
        self.file.open("a").write("finished\\n")
    def close(self, *, succeeded):
        self.file.open("a").write(f"closed {succeeded}\\n")
"""


@pytest.mark.usefixtures("forked_workers")
def test_a_format_of_ones_own_reads_the_rows(parts, place, usual, tmp_path):
    """The same pairs under other columns. Reading changes no number, and workers read none again."""
    (tmp_path / "mine.py").write_text(FORMAT)
    names = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    for part in ("train", "test"):
        text = (place / f"{part}.jsonl").read_text()
        for name, other in names.items():
            text = text.replace(f'"{name}":', f'"{other}":')
        (tmp_path / f"{part}.jsonl").write_text(text)
    changes = [f"data.{part}={tmp_path / part}.jsonl" for part in ("train", "test")]
    own = run(parts(*changes, "data.format=./mine.py", "engine.workers=1"), tmp_path / "own")
    assert own.summary["loss"] == usual.summary["loss"]
    assert list(own.summary["origin"]["code"]) == [str(tmp_path / "mine.py")]
    shutil.rmtree(tmp_path / "own/cache")
    assert load_run(tmp_path / "own", data=True).clients == ("left", "right")
    with pytest.raises(DataError, match=r"unknown data format 'mien'.* \./FILE.py"):
        run(parts("data.format=mien"), tmp_path / "none")


def test_a_tracker_of_ones_own_logs_the_rounds(parts, tmp_path):
    (tmp_path / "log.py").write_text(TRACKER)
    result = run(parts("track.to=./log.py"), tmp_path / "run")
    got = (tmp_path / "tracked.txt").read_text().splitlines()
    assert got == [*(f"{r['round']} {r['loss']}" for r in result.rounds), "finished", "closed True"]
    with pytest.raises(ConfigError, match=r"no tracker is called 'tensorbord'; did you mean 'tensorboard'"):
        parts("track.to=tensorbord")


def test_a_judge_of_ones_own_judges(place, usual, tmp_path, monkeypatch):
    """It prefers the longer response. A response is compared with itself plus a word, so it always loses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "longer.py").write_text(JUDGE)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Case 1:", "answer": "word " * 200}))
    words = ("judge", place / "usual", "--prompts", "prompts.jsonl", "--against", "prompts.jsonl", "--judge")
    shown = json.loads(
        prefed_(*words, "./longer.py", "--column", "answer", "--max-new-tokens", "4", "--json")
    )
    assert (shown["win_rate"]["mean"], shown["judged"]) == (0.0, 1)
    assert "the judges are reward:FOLDER" in prefed_(*words, "longest", code=2)


METRIC = """
from prefed.train.metrics import Metric

def sure(scores):
    return scores.policy[:, 0] > scores.policy[:, 1] + 1e9 * (scores.lengths[:, 0] < 0)

METRIC = Metric("sure", sure)
WRONG = Metric("margin", sure)
"""


@pytest.mark.usefixtures("forked_workers")
def test_a_metric_of_ones_own_is_in_every_evaluation(parts, tmp_path):
    """No length is below 0, so it is the preference accuracy, of each client."""
    (tmp_path / "sure.py").write_text(METRIC)
    asked = parts("evaluate.metrics=['./sure.py']", "engine.workers=2")
    run(asked, tmp_path / "run")
    record = read_run(tmp_path / "run")
    assert record.summary["sure"] == record.summary["preference_accuracy"]
    assert record.rounds[0]["evaluation"]["sure"] == record.rounds[0]["evaluation"]["preference_accuracy"]
    assert record.figures["sure"].name == "sure"
    shown = json.loads(prefed_("evaluate", tmp_path / "run", "--json"))
    assert shown["sure"] == record.summary["sure"]
    with pytest.raises(ConfigError, match="'margin' cannot name a metric"):
        parts("evaluate.metrics=['./sure.py:WRONG']")


def test_files_reach_another_machine_with_the_run(parts, tmp_path):
    """A worker elsewhere gets copies under other paths, and it refuses other code than the parent's."""
    (tmp_path / "lg.py").write_text(METHOD)
    asked = parts("method.name=./lg.py", "merge.rule=./rule.py")
    run(asked, tmp_path / "run")
    factory = job_factory(asked, tmp_path / "run/cache")
    there = tmp_path / "there"
    there.mkdir()
    for name, path in factory.shipped.items():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, there / name)
    (tmp_path / "lg.py").unlink()
    (tmp_path / "rule.py").unlink()
    plugins._allowed.clear()
    assert factory.build(there).method.name == "lgfedavg"
    other = next(there.glob("*.py"))
    other.write_bytes(other.read_bytes() + b"#")
    plugins._allowed.clear()
    with pytest.raises(ConfigError, match="not the same version as where the run started"):
        factory.build(there)


# A stranger's directory. Each of these commands ends with an error and runs nothing; the user's own run is
# the positive control.

OPENING = (
    "evaluate {run}",
    "export {run} --out {out}",
    "report {run}",
    "compare {run} {run}",
    "run {run}/config.toml --out {out}",
    "run {run}/config.toml --out {run} --resume",
    "init {run}/none.toml",
    "data {run}/config.toml",
)


def trapped(run, name, digest):
    """Rewrite a run as an attacker would: it names a file of its own, with that file's digest."""
    config = (run / "config.toml").read_text()
    before = next(line for line in config.splitlines() if "lg.py" in line).split('"')[1]
    (run / "config.toml").write_text(config.replace(before, name))
    commit = json.loads((run / "checkpoint/COMMIT.json").read_text())
    commit.pop("digest")
    commit["settings"] = None
    commit["fingerprint"] = {k: v for k, v in commit["fingerprint"].items() if not k.startswith("code of")}
    commit["fingerprint"][f"code of {name}"] = digest
    (run / "checkpoint/COMMIT.json").write_text(json.dumps(commit))
    for path in run.glob("checkpoint/COMMIT-*.json"):
        path.unlink()


def test_a_strangers_run_executes_nothing(file, tmp_path, stranger, monkeypatch):
    """Its trap is in the run's folder, next to it, or reached through /proc or a link."""
    run(Experiment.load(file), tmp_path / "own")
    assert load_run(tmp_path / "own").method.name == "lgfedavg"
    monkeypatch.chdir(tmp_path)
    mark, theirs = tmp_path / "executed", tmp_path / "run"
    for number, (spot, name) in enumerate(
        (
            ("run/evil.py", tmp_path / "run/evil.py"),
            ("evil.py", tmp_path / "evil.py"),
            ("run/evil.py", "/proc/self/cwd/run/evil.py"),
            ("run/evil.py", tmp_path / "run/link.py"),
        )
    ):
        shutil.rmtree(theirs, ignore_errors=True)
        shutil.copytree(tmp_path / "own", theirs)
        (tmp_path / spot).write_text(METHOD + TRAP.format(str(mark)))
        (theirs / "link.py").symlink_to(tmp_path / spot)
        trapped(theirs, str(name), plugins._find(str(tmp_path / spot)).digest)
        stranger(f"new{number}")
        for each in OPENING:
            words = each.format(run=theirs, out=tmp_path / "out").split()
            result = CliRunner().invoke(app, words)
            assert not mark.exists(), (name, each)
            if words[0] in ("evaluate", "export", "run", "data"):
                assert result.exit_code != 0
                message = "is code from outside prefed that you have not used on this machine"
                assert message in result.output, (name, each)
        # The trap works: whoever names it runs it.
        plugins.allow(str(name))
        assert METHODS[str(name)].title
        mark.unlink()


LOOKING = (
    "data {file}",
    "run {file} --dry-run",
    "run {file} --dry-run --device cuda:80GB",
    "privacy {file} --clients 4",
    "doctor {file}",
)


@pytest.mark.parametrize("setting", ["method.name", "method.objective", "merge.rule", "data.format"])
def test_looking_at_a_file_executes_nothing_and_remembers_nothing(setting, parts, tmp_path, stranger):
    """The file is somebody else's. Its code is named with its digest; a run that cannot load it does not
    allow it, and one that can does, so that from then on it is loaded."""
    mark, trap = tmp_path / "executed", tmp_path / "evil.py"
    good = {"method.name": METHOD, "method.objective": LOSS, "merge.rule": RULE, "data.format": FORMAT}
    trap.write_text(TRAP.format(str(mark)) + "1 / 0\n")
    parts()
    table, _, key = setting.partition(".")
    tree = tomllib.loads((tmp_path / "experiment.toml").read_text())
    tree.setdefault(table, {})[key] = "./evil.py"
    (tmp_path / "theirs.toml").write_text(tomli_w.dumps(tree))

    def look(words):
        shown = CliRunner().invoke(app, words.format(file=tmp_path / "theirs.toml").split())
        return shown.exit_code, " ".join(shown.output.split())

    for content in (trap.read_text(), TRAP.format(str(mark)) + good[setting]):
        trap.write_text(content)
        digest = plugins._find(str(trap)).digest
        for words in LOOKING:
            code, output = look(words)
            assert code, words
            assert "evil.py is code from outside prefed that you have not used on this machine" in output
            assert digest in output
            assert not mark.exists(), words
    if setting == "data.format":
        return  # it reads other columns: tested above
    trap.write_text(TRAP.format(str(mark)) + "1 / 0\n")
    assert look(f"run {{file}} --out {tmp_path / 'failed'}")[0]
    assert mark.exists()
    mark.unlink()
    assert look("data {file}")[0]
    assert not mark.exists()
    trap.write_text(good[setting])
    code, output = look(f"run {{file}} --out {tmp_path / 'run'}")
    assert not code, output
    stranger("state")
    code, output = look("data {file}")
    assert not code, output


def test_init_allows_code_of_any_kind_that_loads(tmp_path, monkeypatch):
    """A run of somebody else's may name an objective. What cannot be loaded is not allowed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "broken.py").write_text(LOSS + "1 / 0\n")
    assert "loss.py is allowed on this machine" in prefed_("init", "./loss.py")
    assert "ZeroDivisionError" in prefed_("init", "./broken.py", code=2)
    assert [*plugins._remembered()] == [str(tmp_path / "loss.py")]


def test_a_known_digest_chooses_the_users_own_file(file, tmp_path, stranger):
    """A run that was moved is read with the user's copy of the code, wherever the record says that it is."""
    run(Experiment.load(file), tmp_path / "run")
    stranger("laptop")
    (tmp_path / "lg.py").rename(tmp_path / "copy.py")
    with pytest.raises(RunError, match=r"`prefed init \./FILE.py` loads and allows it"):
        load_run(tmp_path / "run")
    prefed_("init", str(tmp_path / "copy.py"), "--out", tmp_path / "copy.toml")
    assert load_run(tmp_path / "run").method.name == "lgfedavg"


def test_an_installed_package_that_a_strangers_run_names_is_not_imported(file, package, tmp_path, stranger):
    run(Experiment.load(file, ["method.name=lgpack.method:METHOD"]), tmp_path / "run")
    stranger("new")
    with pytest.raises(RunError, match="that you have not used on this machine"):
        load_run(tmp_path / "run")
    assert "lgpack" not in sys.modules
    prefed_("init", "lgpack.method:METHOD", "--out", tmp_path / "copy.toml")
    assert load_run(tmp_path / "run").method.name == "lgfedavg"


def test_validation_alone_loads_no_code(file, tmp_path):
    """Tables from elsewhere are validated by these; only the user's own file and call allow code."""
    name = str(tmp_path / "lg.py")
    tables = small_experiment(tmp_path, method=name)
    for validate in (Experiment.model_validate, lambda t: Experiment.from_tables(t, "there")):
        with pytest.raises(ConfigError, match="it is code from outside prefed that may not be loaded here"):
            validate(tables)
    assert Experiment(**tables).method.kind.name == "lgfedavg"


def test_peers_run_it(package, tmp_path):
    place = peering.make_place(tmp_path)
    tables = peering.experiment(place, graph={"name": "complete"}).tables()
    asked = Experiment(**tables | {"rounds": 1, "method": {**METHOD_TABLE, "name": "lgfedavg"}})
    for ended in peering.peers(tmp_path / "run", [asked] * 3):
        assert ended.status == 0, ended.text
    assert read_run(tmp_path / "run/peer-0").summary["method"] == "lgfedavg"


# Sites. The package is installed there; the site's operator decides whether a hub may ask for it.


@pytest.fixture
def ward(tmp_path, monkeypatch):
    monkeypatch.setattr(site_module, "Worker", Here)
    return make_place(tmp_path)


def over_sites(ward, tmp_path, name, before=lambda site, request: None, **limits):
    """The run of two sites, and the same one in one process; ``before`` each call to a site."""
    asked = Experiment(
        **federating.experiment(ward, "feddpo", rounds=1).tables() | {"method": METHOD_TABLE | {"name": name}}
    )
    sites = {
        f"site-{client}": Site(site_config(ward, tmp_path, client, limits={"rounds": 5, **limits}))
        for client in ("w0", "w1")
    }
    try:
        terms = Terms("wards", tuple(sites), wait=0.0)
        return asked, federate(asked, tmp_path / "over", Within(sites, before), terms)
    finally:
        closed(sites)


METHOD_TABLE = {"lr": 0.01, "local_steps": 2, "batch_size": 4}


def test_a_site_uses_only_the_code_that_its_operator_allows(package, ward, tmp_path):
    """The hub has allowed it for itself, in this process, which does not allow it at a site."""
    point, written = "lgfedavg", "lgpack.method:METHOD"
    for name, limits in (
        (point, {}),
        (written, {"code": ["other.module:METHOD"]}),
        (written, {"code": [point]}),
    ):
        with pytest.raises(FederationError, match="it is code from outside prefed that may not be loaded"):
            over_sites(ward, tmp_path, name, **limits)
    _, summary = over_sites(ward, tmp_path, written, code=[written])
    assert summary["method"] == "lgfedavg"
    assert list(summary["origin"]["code"]) == [written]


def test_a_site_refuses_code_that_differs_from_the_hubs(package, ward, tmp_path):
    """The source changes between the hub's reading it and a site's. A site refuses before it reports its
    clients, and nothing trains. A site whose source changes after it has joined refuses to continue, as does
    its training process, which reads the source anew."""
    source, seen = package / "lgpack/method.py", []

    def install(text):
        source.write_text(text)
        plugins._package.cache_clear()
        return plugins._package("lgpack").digest

    once = threading.Lock()  # both sites are asked at the same time

    def another(site, request):
        with once:
            if not seen:
                seen.append(install(METHOD + "# another"))

    hubs = install(METHOD)
    with pytest.raises(FederationError) as caught:
        over_sites(ward, tmp_path, "lgfedavg", another, code=["lgfedavg"])
    message = " ".join(str(caught.value).split())
    assert seen[0] != hubs
    assert (
        f"lgfedavg from lgpack: the hub has 1.5 (SHA-256 {hubs}) and this site 1.5 (SHA-256 {seen[0]}): "
        "install the same version at hub and site, and restart the site"
    ) in message
    assert not list(tmp_path.glob("site-*/runs/*/*"))

    install(METHOD)
    over_sites(ward, tmp_path, "lgfedavg", code=["lgfedavg"])
    (order,) = (tmp_path / "site-w0/runs").glob("*/order.json")
    known = json.loads(order.read_text())
    config = site_config(ward, tmp_path, "w0", limits={"code": ["lgfedavg"]})
    experiment = started_experiment(known, config)
    factory = site_factory(experiment, tmp_path / "cache", tmp_path, known["names"], known["members"])
    assert build_site_job(factory.text).method.name == "lgfedavg"
    install(METHOD + "# upgraded")
    with pytest.raises(ConfigError, match=f"lgfedavg from lgpack: the hub has 1.5 .SHA-256 {hubs}"):
        started_experiment(known, config)
    with pytest.raises(ConfigError, match="not the same version as where the run started: lgfedavg"):
        build_site_job(factory.text)


def test_a_hubs_file_is_not_read_at_a_site(file, ward, tmp_path):
    with pytest.raises(FederationError, match="it is code from outside prefed that may not be loaded here"):
        over_sites(ward, tmp_path, str(tmp_path / "lg.py"))
