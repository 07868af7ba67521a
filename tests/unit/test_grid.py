"""A sweep over a grid: what a grid may say, what is run, what is chosen and by which pairs."""

from __future__ import annotations

import asyncio
import json

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from commands import prefed_, sweep_command
from finished import small_experiment, small_place, write_run
from prefed.config.grid import parse_grid, parse_seeds
from prefed.runs import sweep_child
from prefed.runs.start_or_resume import fitted
from prefed.runs.sweep import Sweep, check_cells, grid_cells
from prefed.ui.cli import app
from prefed.ui.pages.sweep import keep_grid, sentence
from preferences import jsonl

FILE = """\
seed = 5
rounds = 2
data = { train = "pairs.jsonl", validation_fraction = 0.2, partition = { by = "iid", clients = 2 } }
model.name = "model"
method = { name = "feddpo", lr = 1e-3, local_steps = 5 }
"""
NO_VALIDATION = ["--set", "data.validation_fraction=0"]
ROWS = [{"prompt": f"Say {k}", "chosen": f" yes {k}", "rejected": f" no {k}"} for k in range(24)]


@pytest.fixture
def path(tmp_path):
    """An experiment file, with its pairs and a folder for its model next to it."""
    jsonl(tmp_path / "pairs.jsonl", ROWS)
    (tmp_path / "model").mkdir()
    (tmp_path / "exp.toml").write_text(FILE)
    return tmp_path / "exp.toml"


class Toy:
    """Carries no run out, but leaves what one leaves; its accuracy is a function of the experiment."""

    def __init__(self, figure):
        self.figure, self.calls = figure, []

    async def __call__(self, run):
        self.calls.append(f"{run.out.name} {run.experiment.evaluate.split}" + (" test" if run.test else ""))
        mean = self.figure(run.experiment)
        if not run.finished:
            settings = fitted(run.experiment).tables()
            ends = {"ann": (0.4, 0.4, mean + 0.1), "bob": (0.4, 0.4, mean - 0.1)}
            write_run(run.out, ends, settings=settings, split=run.experiment.evaluate.split)
            (run.out / "commit").write_text("abc1234\n")
        if run.test:
            figures = {
                name: {"mean": mean - 0.05, "worst": mean - 0.2}
                for name in ("preference_accuracy", "baseline_accuracy")
            }
            (run.out / "judged-test.json").write_text(json.dumps(figures))
        await asyncio.sleep(0)


def sweep_of(path, *grid, seeds=(5,), figure=lambda experiment: 0.5, jobs=1, overrides=()):
    toy, lines = Toy(figure), []
    cells = grid_cells(path, parse_grid(grid, overrides), seeds, path.parent / "out/exp", overrides)
    return cells, Sweep(jobs, lines.append, toy), toy, lines


def lr(experiment):
    return experiment.method.settings.lr


# What a grid may say


def test_a_grid_is_every_combination():
    """Values as in TOML, bare words as texts; commas inside brackets, braces and quotes part nothing."""
    grid = [
        'model.lora.modules=["c_attn","c_proj"],["c_attn"]',
        'data.partition={by="iid",clients=2},{by = "iid", clients = 3}',
        "method.name=feddpo,'fedper'",
    ]
    combinations = parse_grid(grid)
    assert len(combinations) == 8
    assert combinations[0].values == {
        "model.lora.modules": ["c_attn", "c_proj"],
        "data.partition": {"by": "iid", "clients": 2},
        "method.name": "feddpo",
    }
    assert [each.values["method.name"] for each in combinations[:3]] == ["feddpo", "fedper", "feddpo"]
    assert len({each.name for each in combinations}) == 8
    assert [each.name for each in parse_grid([])] == ["run"]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5, unique=True))
def test_numbers_come_through_a_grid_as_they_are(numbers):
    """Each as itself, and with a folder of its own."""
    combinations = parse_grid([f"method.lr={','.join(map(repr, numbers))}"])
    assert [each.values["method.lr"] for each in combinations] == numbers
    assert len({each.name for each in combinations}) == len(numbers)


def test_names_of_folders_are_safe_and_distinguish_combinations():
    """A number is written in one way; a text that cannot be a folder's name becomes a digest; keys with the
    same end are written out."""
    assert [each.name for each in parse_grid(["method.lr=1e-3,0.01"])] == ["lr0.001", "lr0.01"]
    first, second = parse_grid(['model.name="a/b","a:b"'])
    assert first.name != second.name
    assert first.name.startswith("a-b-")
    assert "/" not in first.name
    (both,) = parse_grid(["method.lr=0.1", "align.lr=0.2"])
    assert both.name == "method.lr0.1-align.lr0.2"


def test_what_no_grid_can_be_made_of_is_refused_before_anything_runs(path, tmp_path, subtests):
    for words, message in (
        (["--grid", "method.lrr=1e-4,1"], "--grid method.lrr=1e-4: method.lrr: no such key; did you mean"),
        (["--grid", "method.lr=1,fast"], "--grid method.lr=fast: method.lr = 'fast': should be"),
        (["--grid", 'model.lora.modules=["a"'], "write key=value,value"),
        (["--grid", "method.lr=1e-4,0.0001"], "--grid method.lr=1e-4,0.0001: 0.0001 is repeated"),
        (["--grid", "method.lr=1", "--grid", "method.lr=2"], "--grid method.lr=2: method.lr already appears"),
        (["--grid", "method.lr=1,2", "--set", "method.lr=3"], "method.lr is also set by --set; remove one"),
        (["--grid", "engine.workers=1,2"], "engine.workers=1,2: [engine] does not affect results"),
        (["--grid", "evaluate.split=test,validation"], "a sweep always selects on validation pairs"),
        (["--grid", "seed=1,2"], "set seeds with --seeds"),
        (["--seeds", "0"], "--seeds 0: write a number of seeds, e.g. --seeds 3, or distinct seeds"),
        (["--seeds", "1,1"], "--seeds 1,1: write a number of seeds"),
        (["--seeds", "2", "--set", "seed=3"], "--set seed=3: seed is set by the sweep; use --seeds"),
        (["--grid", "rounds=1,2", "--set", "evaluate.split=test"], "evaluate.split is set by the sweep"),
        (["--grid", "rounds=1,2", *NO_VALIDATION], "set data.validation or"),
    ):
        with subtests.test(words=words, message=message):
            result = prefed_("sweep", path, "--out", tmp_path / "out", *words, code=1)
            assert message in result
            assert not (tmp_path / "out").exists()


# What is run and what is chosen


def test_the_best_on_validation_pairs_is_chosen_and_judged_on_test_pairs(path):
    """Every rate with every seed on validation pairs, and only then the best one on test pairs. At 0.01 the
    seeds have 0.5 and 0.7, whose mean of 0.6 is above 0.55 twice."""
    figures = {
        (0.001, 5): 0.55,
        (0.001, 6): 0.55,
        (0.01, 5): 0.5,
        (0.01, 6): 0.7,
        (0.1, 5): 0.2,
        (0.1, 6): 0.3,
    }
    cells, sweep, toy, lines = sweep_of(
        path, "method.lr=0.001,0.01,0.1", seeds=(5, 6), figure=lambda e: figures[lr(e), e.seed], jobs=2
    )
    check_cells(cells)
    (chosen,) = asyncio.run(sweep.grid(cells))
    names = [f"lr{rate}-seed{seed}" for rate in (0.001, 0.01, 0.1) for seed in (5, 6)]
    assert toy.calls == [
        *(f"{name} validation" for name in names),
        *(f"{name} validation test" for name in names[2:4]),
    ]
    assert lines[0] == "3 combinations, 2 seeds, 6 runs, 0 already finished"
    assert chosen.cell.combination.name == "lr0.01"
    assert sentence(chosen) == (
        "lr0.01 (method.lr = 0.01) was selected from 3 combinations. It has the highest preference accuracy "
        "on validation pairs, mean over clients and 2 seeds: 0.600 ± 0.141. "
        "The runner-up is lr0.001: 0.550 ± 0.000."
    )
    got, page = keep_grid(cells, [chosen])
    (kept,) = json.loads(got.read_text())["chosen"]
    assert (kept["name"], kept["settings"]) == ("lr0.01", {"method.lr": 0.01})
    assert kept["validation"]["lr0.1"] == {"5": 0.2, "6": 0.3}
    assert kept["test"]["preference_accuracy"]["6"]["mean"] == pytest.approx(0.65)
    text = page.read_text()
    assert "lr0.01 (method.lr = 0.01) was selected from 3 combinations." in text
    assert "0.550 ± 0.141 over 2 seeds" in text
    assert '<tr class="chosen">' in text


def test_of_equal_ones_the_first_is_taken(path):
    cells, sweep, *_ = sweep_of(path, "method.lr=0.01,0.001")
    (chosen,) = asyncio.run(sweep.grid(cells))
    assert chosen.cell.combination.name == "lr0.01"
    assert "They are equal, so the one given first was selected." in sentence(chosen)


def test_other_data_are_no_matter_of_choice(path):
    """A rate is chosen for each of them; with nothing to choose runs are judged as their file says."""
    grid = ("data.partition.clients=2,3", "method.lr=0.001,0.01")
    cells, sweep, *_ = sweep_of(path, *grid, figure=lambda e: lr(e) * (-1) ** e.data.partition.clients)
    chosen = asyncio.run(sweep.grid(cells))
    assert [each.cell.combination.name for each in chosen] == ["clients2-lr0.01", "clients3-lr0.001"]
    assert sentence(chosen[1]).startswith("With data.partition.clients=3: clients3-lr0.001")
    assert " Its method.lr is at the end of the range tried" in sentence(chosen[1])
    cells, sweep, toy, _ = sweep_of(path, grid[0], seeds=(5, 6), overrides=("data.validation_fraction=0",))
    check_cells(cells)
    assert asyncio.run(sweep.grid(cells)) == []
    assert all(call.endswith("test") and "validation" not in call for call in toy.calls)


def test_seeds_alone_end_in_a_page(path):
    """Nothing is chosen of one combination."""
    cells, sweep, toy, _ = sweep_of(path, seeds=parse_seeds("3", 5), jobs=2)
    assert asyncio.run(sweep.grid(cells)) == []
    assert toy.calls == ["run-seed5 test", "run-seed6 test", "run-seed7 test"]
    _, page = keep_grid(cells, [])
    assert "1 case with 3 seeds" in page.read_text()
    assert "was selected" not in page.read_text()


def test_nothing_is_chosen_where_a_run_failed(path):
    """The others continue and have their page."""

    def figure(experiment):
        if lr(experiment) == 0.01:
            raise RuntimeError("no room")
        return 0.5

    cells, sweep, _, lines = sweep_of(path, "method.lr=0.001,0.01,0.1", figure=figure)
    assert asyncio.run(sweep.grid(cells)) == []
    assert list(sweep.failed) == ["lr0.01-seed5"]
    assert "FAILED lr0.01-seed5: no room" in lines
    _, page = keep_grid(cells, [])
    assert "2 runs side by side" in page.read_text()


def test_a_grid_on_a_small_model(tmp_path, monkeypatch):
    """Two rates, each a real run: one is judged on test pairs, and the same command again takes all as it is.
    The commands of a run's own process are called here, as starting Python takes longer than they do."""
    monkeypatch.setattr(sweep_child.CommandProcesses, "call", sweep_command)
    place = small_place(tmp_path)
    file = place / "exp.toml"
    file.write_text(tomli_w.dumps(small_experiment(place, rounds=1)))
    words = ["sweep", str(file), "--grid", "method.lr=1e-4,1e-2", "--out", str(place / "o"), "--jobs", "1"]
    words += ["--set", "data.validation_fraction=0.25"]
    result = prefed_(*words)
    runs = sorted(each.name for each in (place / "o/exp").iterdir())
    assert runs == ["lr0.0001-seed3", "lr0.01-seed3"]
    summaries = {name: json.loads((place / "o/exp" / name / "summary.json").read_text()) for name in runs}
    assert {summary["split"] for summary in summaries.values()} == {"validation"}
    means = {name: summary["preference_accuracy"]["mean"] for name, summary in summaries.items()}
    (chosen,) = json.loads((place / "o/exp.json").read_text())["chosen"]
    assert means[f"{chosen['name']}-seed3"] == max(means.values())
    assert chosen["validation"] == {name.removesuffix("-seed3"): {"3": mean} for name, mean in means.items()}
    judged = [name for name in runs if (place / "o/exp" / name / "judged-test.json").exists()]
    assert judged == [f"{chosen['name']}-seed3"]
    assert str(place / "o/exp.html") in result
    again = CliRunner().invoke(app, words)
    assert "2 already finished" in again.stdout
    assert "begins" not in again.stdout
