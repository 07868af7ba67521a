"""The benchmark: one method in every table, the leaderboard's numbers, and what the tasks hold."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from commands import prefed_, sweep_command
from experiment_scripts import EXPERIMENTS, rows, script
from finished import small_place
from prefed.config import ConfigError
from prefed.config.experiment_table import load_table
from prefed.core import files
from prefed.methods import METHODS
from prefed.privacy.accountant import guarantee_of
from prefed.runs import sweep_child
from prefed.ui.pages.leaderboard import add, write_leaderboard
from prefed.ui.pages.sweep import keep
from preferences import jsonl

BENCH = {path.stem: path for path in sorted((EXPERIMENTS / "bench").glob("*.toml"))}
TASK = """\
title = "A task"
rates = [1e-3]
seeds = [1]

[base]
rounds = 1
method = { name = "feddpo", lr = 1e-3, local_steps = 2, batch_size = 2, beta = 0.2 }
model = { name = "model", lora = { rank = 2, targets = ["c_attn"] } }

[base.data]
train = "train.jsonl"
test = "test.jsonl"
partition = { by = "column", column = "worker" }
validation_fraction = 0.25
max_length = 64

[rows.feddpo]

[methods.scaffold]
rates = [0.3, 1]
set.method.local_steps = 1
"""
OWN = '''"""FedAvg."""

from prefed.methods import MethodKind
from prefed.methods.base import FedAvgBase, TrainingSettings, lora_parts
from prefed.methods.feddpo import Settings

SOURCE = "a test"
METHOD = MethodKind("own", "FedDPO again", module=__name__)
needs = lora_parts


def build(settings, layout, aggregator, rounds):
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    return fedavg.method("own", SOURCE, fedavg.exchange())
'''


# A method in place of a table's


def test_a_table_becomes_that_of_a_method(tmp_path):
    """The method's own row if the table has one, else the base's keys that the method has: FedSFT has no
    beta. Tables that extend this one have the same rows for methods."""
    path, over = tmp_path / "task.toml", tmp_path / "over.toml"
    path.write_text(TASK)
    over.write_text('title = "Over"\nextends = "task.toml"\n[base]\nrounds = 3\n[rows.feddpo]\n')
    for file, rounds in ((path, 1), (over, 3)):
        (feddpo,) = load_table(file).of_method("feddpo").cells(file).values()
        (fedsft,) = load_table(file).of_method("fedsft").cells(file).values()
        (scaffold,) = load_table(file).of_method("scaffold").cells(file).values()
        assert feddpo.experiment().method.settings.beta == 0.2
        assert fedsft.experiment().rounds == rounds
        settings = [cell.experiment().method.settings for cell in (feddpo, fedsft, scaffold)]
        assert [each.local_steps for each in settings] == [2, 2, 1]
        assert [cell.rates for cell in (feddpo, fedsft, scaffold)] == [(1e-3,), (1e-3,), (0.3, 1.0)]
    with pytest.raises(ConfigError, match=r"^--method: no method is called 'fedsf'; did you mean 'fedsft'"):
        load_table(path).of_method("fedsf")
    path.write_text(TASK + '[methods.local]\nsets = ["none"]\n')
    with pytest.raises(ConfigError, match=r"methods\.local\.sets: no set is called 'none'"):
        load_table(path)


# The leaderboard


def outcome(values, **more):
    """What a finished cell leaves, with these accuracies over the seeds."""
    worst = [value / 2 for value in values]
    return {
        **{"lr": 1e-3, "validation": {"0.001": 0.5, "0.003": 0.4}, "commits": ["abc1234"]},
        **{"reward_accuracy.mean": values, "reward_accuracy.worst": worst},
        **{"preference_accuracy.mean": worst, "newcomer_accuracy.mean": [], "newcomer_accuracy.worst": []},
        **{"bytes": [3_000_000] * len(values), "seconds": [7.0, 8.0, 9.0], **more},
    }


def test_the_leaderboard_has_means_and_intervals_over_seeds(tmp_path):
    """0.8, 0.82, 0.78: the mean is 0.8, s = 0.02 and t = 4.302653 with two degrees of freedom, so half of the
    interval is 4.302653 · 0.02 / √3 = 0.0497. 1, 1, 0.7 has mean 0.9 and s = 0.3 / √3; its half, 4.302653 ·
    0.1 = 0.430, ends at 1. Methods come at different times and are sorted; refused ones have a reason, and
    one that is run again replaces its row. Methods with equal cells share a row; a second accuracy equal to
    the first is left out. In a task with newcomers their accuracy leads."""
    assert math.isclose(4.302653 * 0.02 / math.sqrt(3), 0.0497, abs_tol=5e-5)

    def put(task, name, result):
        table = SimpleNamespace(title=f"The {task}", judge="reward_accuracy")
        definition = SimpleNamespace(name=name, text=f"`{name}`")
        add(tmp_path, SimpleNamespace(folder=Path(task), table=table, definition=definition), result)

    put("all", "local", outcome([0.5, 0.5, 0.5]))
    put("all", "fedprox", outcome([0.5, 0.5, 0.5]))
    put("all", "lore", outcome([0.6] * 3, **{"preference_accuracy.mean": [0.6] * 3}))
    put("all", "feddpo", {"refused": "the disk is full"})
    newcomers = {
        "newcomer_accuracy.mean": [1.0, 1.0, 0.7],
        "newcomer_accuracy.worst": [0.5] * 3,
        "bytes": [5e6],
    }
    put("new", "local", outcome([0.9] * 3, **newcomers))
    write_leaderboard(tmp_path)
    put("all", "feddpo", outcome([0.8, 0.82, 0.78]))
    put("new", "feddpo", {"refused": "it cannot"})
    put("new", "icl", {"refused": "icl cannot"})
    put("new", "ditto", {"refused": "ditto cannot"})
    page = write_leaderboard(tmp_path).read_text("utf-8")
    lines = page.splitlines()
    assert "| method | all | new | MB sent |" in lines
    assert "| `local` | 0.500 | 0.900 | 3.0 to 5.0 |" in lines
    assert "| `feddpo` | 0.800 | – | 3.0 |" in lines
    assert "Commits: abc1234." in lines
    at = lines.index("## all")
    assert lines[at + 2 : at + 9] == [
        "The all.",
        "",
        "| method | reward accuracy | preference accuracy | worst client | learning rate |",
        "| --- | --- | --- | --- | --- |",
        "| `feddpo` | 0.800 [0.750, 0.850] | 0.400 [0.375, 0.425] | 0.400 | ≤1e-3 |",
        "| `lore` | 0.600 [0.600, 0.600] |  | 0.300 | ≤1e-3 |",
        "| `local`, `fedprox` | 0.500 [0.500, 0.500] | 0.250 [0.250, 0.250] | 0.250 | ≤1e-3 |",
    ]
    at = lines.index("## new")
    assert lines[at + 6].startswith("| `local` | 0.900 [0.470, 1.000] |")
    assert [line for line in lines if line.startswith("-")] == [
        "- `feddpo`: – (it cannot)",
        "- `icl`, `ditto`: – (the method cannot)",
    ]
    assert "the disk is full" not in page


def add_and_write(out, cell, result):
    add(out, cell, result)
    write_leaderboard(out)


@pytest.mark.parametrize("add_", [add_and_write, lambda out, cell, result: keep(cell, ["a", "b"], result)])
@pytest.mark.parametrize("kind", [".json", ".md"])
def test_two_sweeps_into_one_folder_lose_no_row(tmp_path, monkeypatch, add_, kind):
    """The second adds its row after the first has read the rows and before it writes them, or their page."""
    whole, others = files.write, []

    def enter(name):
        definition = SimpleNamespace(name=name, text=name)
        table = SimpleNamespace(title="", judge="reward_accuracy", source="", figures="")
        cell = SimpleNamespace(folder=tmp_path / "task", table=table, definition=definition)
        result = outcome([0.5], method=name, text=name)
        add_(tmp_path, cell, result | {"baseline_accuracy.mean": [0.5], "baseline_accuracy.worst": [0.5]})

    def write(path, data, **how):
        if path.suffix == kind and not others:
            others.append(Thread(target=enter, args=("b",)))
            others[0].start()
            others[0].join(0.3)  # without the lock it ends here; with it, it waits for the first
        whole(path, data, **how)

    monkeypatch.setattr(files, "write", write)
    enter("a")
    others[0].join()
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())
    names = [row["method"] for row in rows] if isinstance(rows, list) else list(rows["task"]["methods"])
    assert names == ["a", "b"]
    (page,) = tmp_path.glob("*.md")
    assert all(f"| {name} | " in page.read_text() for name in names)


def test_a_method_of_prefed_and_one_of_a_file_enter(tmp_path, monkeypatch):
    """FedDPO and the same algorithm in a file have the same accuracies on a task, local none on a task with
    central noise, and a second call adds local to the first two. The file's results are not reused once the
    file has changed."""
    monkeypatch.setattr(sweep_child.CommandProcesses, "call", sweep_command)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    small_place(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "plain.toml").write_text(TASK)
    noise = 'title = "Noise"\nextends = "plain.toml"\n[base.privacy]\nkind = "central"\nclip = 1.0\n'
    noise += 'delta = 1e-3\nnoise_multiplier = 1.0\n[base.merge]\nweights = "uniform"\n[rows.feddpo]\n'
    (tmp_path / "noise.toml").write_text(noise)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    prefed_("sweep", "plain.toml", "--out", out, "--method", "feddpo", "--method", "./own.py")
    prefed_("sweep", "plain.toml", "noise.toml", "--out", out, "--method", "local")
    board = json.loads((out / "leaderboard.json").read_text())
    assert list(board["plain"]["methods"]) == ["feddpo", "own.py", "local"]
    ours, own, local = board["plain"]["methods"].values()
    assert (own["reward_accuracy.mean"], own["bytes"]) == (ours["reward_accuracy.mean"], ours["bytes"])
    assert local["bytes"][0] < ours["bytes"][0]
    assert local["seeds"] == [1]
    refused = board["noise"]["methods"]["local"]["refused"]
    assert refused.startswith("[privacy] kind = 'central': local does not support differential privacy")
    assert f"- `local`: – ({refused})" in (out / "leaderboard.md").read_text("utf-8")
    (tmp_path / "own.py").write_text(OWN + "# changed\n")
    error = prefed_("sweep", "plain.toml", "--out", out, "--method", "./own.py", code=1)
    assert "own.py has changed since. Move it away, or choose another --out" in error


def test_what_a_method_cannot_do_is_a_result_and_a_failure_is_none(tmp_path, monkeypatch):
    """DPO does not train on thumbs, which only a run finds out: a row with the reason, and exit code 0 next
    to another task, 1 without. What fails leaves the row as it is."""
    process = sweep_child.CommandProcesses.call

    async def command(processes, run, *words):
        called = process if run.out.parent.name == "thumbs" else sweep_command
        return await called(processes, run, *words)

    monkeypatch.setattr(sweep_child.CommandProcesses, "call", command)
    small_place(tmp_path)
    thumbs = [{"prompt": "Say:", "completion": f" yes {k}", "label": k % 2 == 0} for k in range(8)]
    jsonl(tmp_path / "thumbs.jsonl", [{**each, "worker": worker} for worker in "ab" for each in thumbs])
    (tmp_path / "plain.toml").write_text(TASK)
    over = 'title = "Thumbs"\nextends = "plain.toml"\n[base.data]\ntrain = "thumbs.jsonl"\n[rows.feddpo]\n'
    (tmp_path / "thumbs.toml").write_text(over)
    monkeypatch.chdir(tmp_path)
    words = ("--out", "out", "--method", "local")
    prefed_("sweep", "plain.toml", "thumbs.toml", *words)
    board = json.loads(Path("out/leaderboard.json").read_text())
    reason = board["thumbs"]["methods"]["local"]["refused"]
    assert reason.startswith("[method] objective 'dpo' trains on pairs, but the training data are thumbs")
    assert board["plain"]["methods"]["local"]["seeds"] == [1]
    error = prefed_("sweep", "thumbs.toml", *words, code=1)
    assert f"every cell is refused:\nthumbs local: {reason}" in error

    async def killed(processes, run, *words):
        raise sweep_child.CommandError("killed", run.side_file("log"), "")

    monkeypatch.setattr(sweep_child.CommandProcesses, "call", killed)
    shutil.rmtree("out/plain")
    assert "some cells failed:\nplain local: " in prefed_("sweep", "plain.toml", *words, code=1)
    assert json.loads(Path("out/leaderboard.json").read_text()) == board


def test_what_cannot_be_a_method_is_refused(tmp_path, monkeypatch):
    """A name, a file and a key that are not there, before anything runs."""
    monkeypatch.chdir(small_place(tmp_path))
    Path("plain.toml").write_text(TASK)

    def error(*words, code=1):
        return prefed_("sweep", "plain.toml", "--out", "out", *words, code=code)

    assert "no method is called 'feddqo'; did you mean 'feddpo'?" in error("--method", "feddqo")
    assert "./none.py: no such file" in error("--method", "./none.py")
    message = error("--method", "fedsft", "--set", "method.beta=1")
    assert "--set method.beta=1: method.beta: no such key" in message
    assert "without --only and --method" in error("--method", "local", "--seeds", "2", code=2)
    Path("other").mkdir()
    shutil.copy("plain.toml", "other")
    assert "two tables have the same file name" in error("other/plain.toml", "--method", "local", code=2)
    assert "two methods have the same name" in error("--method", "local", "--method", "local", code=2)
    assert not Path("out").exists()


def test_the_published_leaderboard_is_what_a_sweep_writes(tmp_path):
    """The page in the documentation is that of ``leaderboard.json``, in which every method has every task."""
    shutil.copy(EXPERIMENTS / "bench/leaderboard.json", tmp_path)
    tasks = json.loads((tmp_path / "leaderboard.json").read_text("utf-8"))
    assert set(tasks) <= set(BENCH)
    assert len({tuple(task["methods"]) for task in tasks.values()}) == 1
    page = EXPERIMENTS.parent / "docs/leaderboard.md"
    assert write_leaderboard(tmp_path).read_text("utf-8") == page.read_text("utf-8")


# The tasks


def pairs_of_a_visit(experiment, clients):
    """Pairs that a client's training sees in a visit; a selector asks about each in both orders."""
    name, settings = experiment.method.name, experiment.method.settings
    steps = settings.local_steps
    if name == "perfedavg":
        steps += settings.inner_steps
    elif name == "pfedme":
        steps *= settings.inner_steps
    elif name == "fedala":
        steps += settings.weight_steps
    elif name == "centralized":
        steps /= clients  # one visit for all
    steps += getattr(settings, "personal_steps", None) or 0
    return steps * settings.batch_size / (2 if experiment.method.kind.reads == "choice" else 1)


def test_every_method_has_the_same_budget_of_pairs():
    """Two steps of 8 pairs in each of four or eight rounds; with privacy one of 4 in each of three. A method
    that cannot do a task is refused by name: without a server there is nobody late and no central noise."""
    refused = {}
    for task, path in BENCH.items():
        table = load_table(path)
        assert table.seeds == [42, 43, 44]
        for name in METHODS.builtin:
            (cell,) = table.of_method(name).cells(path).values()
            assert len(cell.rates) == (1 if name == "icl" else 3)
            try:
                experiment = cell.experiment("method.lr=0.01")
            except ConfigError:
                refused.setdefault(task, []).append(name)
                continue
            budget = {"private": (3, 4), "personas": (8, 16)}.get(task, (4, 16))
            visit = pairs_of_a_visit(experiment, 20 if task == "people" else 10)
            assert (experiment.rounds, visit) == budget, (task, name)
            assert getattr(experiment.method.settings, "personal_lr", 0.01) in (None, 0.01)
    assert refused == {
        "late": ["decdpo"],
        "private": [
            *("decdpo", "centralized", "local", "icl", "fedamp", "fedsdg", "fedbiscuit", "fedvpl", "fedvpa")
        ],
    }


def test_the_noise_gives_an_epsilon_of_five():
    """At most, and within 0.01, for a client that takes part in all three rounds."""
    pytest.importorskip("dp_accounting")
    (cell,) = load_table(BENCH["private"]).cells(BENCH["private"]).values()
    experiment = cell.experiment()
    guarantee = guarantee_of(experiment.privacy, 50, 50)
    assert 4.99 < guarantee.epsilon(experiment.rounds, experiment.privacy.delta) <= 5


def test_the_clients_are_what_their_task_says(tmp_path):
    """24, 16 and 32 pairs of each; the first three of ten personas lie in training and are not evaluated;
    three of ten are twins with swapped pairs, among newcomers half; nobody is validated on a newcomer."""
    personas = (
        "politically-liberal",
        "risk-averse",
        "interest-in-sports",
        "interest-in-math",
        "agreeableness",
    )
    pairs = [
        {"prompt": "Say:", "chosen": f" yes {name} {k}", "rejected": f" no {name} {k}", "persona": name}
        for name in (*personas, "a", "b", "c", "d", "e")
        for k in range(200)
    ]
    file = jsonl(tmp_path / "pairs.jsonl", pairs)
    script("bench/prepare.py", file, file, "--out", tmp_path)

    def clients(task, role):
        """Client → its pairs."""
        found: dict[str, list[tuple[str, str]]] = {}
        for row in rows(tmp_path / f"{task}.{role}.jsonl.gz"):
            found.setdefault(row["client"], []).append((row["chosen"], row["rejected"]))
        return found

    sizes = {"train": 24, "validation": 16, "test": 32}
    for role, size in sizes.items():
        for task in ("personas", "opposed", "tastes"):
            assert [len(own) for own in clients(task, role).values()] == [size] * 10
    honest, lying = clients("personas", "train"), clients("liars", "train")
    swapped = {name for name in honest if lying[name] == [(no, yes) for yes, no in honest[name]]}
    assert swapped == {"a", "agreeableness", "b"}
    assert all(lying[name] == honest[name] for name in honest.keys() - swapped)
    for role in ("validation", "test"):
        assert clients("liars", role) == {
            k: v for k, v in clients("personas", role).items() if k not in swapped
        }
    for task, twins in (("opposed", 5), ("tastes", 3), ("newcomers", 7)):
        own = {client: set(pairs) for client, pairs in clients(task, "train").items()}
        reversed_ = [{(no, yes) for yes, no in pairs} for pairs in own.values()]
        assert sum(pairs in reversed_ for pairs in own.values()) == 2 * twins
    names = [set(clients("newcomers", role)) for role in sizes]
    assert names[0] == names[2]
    assert names[0] - names[1] == {f"new-0{k}" for k in range(4)}
    assert [len(clients("private", role)) for role in sizes] == [50] * 3
