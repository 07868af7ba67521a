"""What makes the README's tables: the rates that are tried, what is reused, what a table says, its data."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import prefed
import prefed.runs.run
from prefed.config import ConfigError, Experiment, to_toml

HERE = Path(__file__).resolve().parents[2] / "experiments"
DATA = [f"{stem}.{role}.jsonl.gz" for stem in ("personas", "hh_harmless") for role in ("train", "test")]
DATA += [f"opposed.{role}.jsonl.gz" for role in ("train", "validation", "test")]
ADAPTIVE, PLAIN = (1e-3, 3e-3, 9e-3), (0.3, 1.0, 3.0)


@pytest.fixture(scope="module", autouse=True)
def beside():
    """The scripts' folder, from which they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        yield
        for name in ("sweep", "tables"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def sweep(beside):
    import sweep

    return sweep


@pytest.fixture(scope="module")
def tables(beside):
    import tables

    return tables


@pytest.fixture(scope="module")
def every(tables, tmp_path_factory):
    """All tables of the folder, on empty files under the names that the experiments have."""
    folder = tmp_path_factory.mktemp("data")
    for name in DATA:
        (folder / name).touch()
    paths = sorted((HERE / "tables").glob("*.toml"))
    found = [tables.read(path, Path("out"), folders=[folder], reward=folder) for path in paths]
    return {table.name: table for table in found}


def row(sweep, folder, label="local", further=2, **changes):
    return sweep.Row(
        label,
        HERE / "personas/base.toml",
        folder / "toy",
        ADAPTIVE,
        further,
        (1, 2, 3),
        (f"method.name={label}",),
        **changes,
    )


class Toy:
    """Carries no run out, but leaves what one leaves; its figures are a function of rate and seed."""

    def __init__(self, figure, commit="abc1234", head=False):
        self.figure, self.commit, self.head, self.calls = figure, commit, head, []

    async def __call__(self, run):
        self.calls.append(run.out.name + (" test" if run.test else ""))
        experiment = Experiment.load(run.file, list(run.overrides))
        mean = self.figure(experiment.method.settings.lr, experiment.seed)
        names = ["preference_accuracy", "reward_accuracy", "baseline_accuracy"]
        names += ["combined_accuracy", "explicit_accuracy"] if self.head else []
        figures = {name: {"mean": mean, "worst": mean / 2} for name in names}
        run.out.mkdir(parents=True, exist_ok=True)
        if not (run.out / "config.toml").exists():
            (run.out / "config.toml").write_text(to_toml(experiment))
            (run.out / "commit").write_text(self.commit + "\n")
        rest = {"bytes": {"up": 1_000_000, "down": 2_000_000}, "seconds": 1.0}
        (run.out / "summary.json").write_text(json.dumps({**figures, **rest}))
        if run.test:
            (run.out / "judged-test.json").write_text(json.dumps(figures))
        await asyncio.sleep(0)


def peak(at, slope=0.1):
    """A figure that is highest at one rate; seeds 2 and 3 are 0.02 above and below the first."""
    return lambda lr, seed: 0.8 - slope * (lr != at) - slope * abs(lr - at) + {1: 0, 2: 0.02, 3: -0.02}[seed]


def make(tables, toy, rows, out, jobs=2):
    table = tables.Table("toy", "Toy", tuple(rows))
    said: list[str] = []
    maker = tables.Maker(jobs, toy, said.append)
    asyncio.run(maker.make([(table, tuple(rows))], out))
    return maker, said


# Which rates are tried


def test_a_sweep_looks_beyond_the_end_its_best_rate_lies_at(sweep):
    """As far again as the neighbour: 3e-3 next to 1e-3 leads to 9e-3, 1e-3 to a third; inside, to nothing.
    One digit is kept: 9e-3 squared over 3e-3 is 2.7e-2, which reads 3e-2, and then (3e-2)² / 9e-3 = 0.1."""
    assert sweep.beyond([1e-3, 3e-3], 3e-3) == 9e-3
    assert sweep.beyond([1e-3, 3e-3], 1e-3) == 3e-4
    assert sweep.beyond([1e-3, 3e-3, 9e-3], 9e-3) == 3e-2
    assert sweep.beyond([3e-2, 3e-3, 9e-3], 3e-2) == 0.1
    assert sweep.beyond([1e-3, 3e-4, 3e-3], 1e-3) is None
    assert sweep.beyond([1e-3], 1e-3) is None


@pytest.mark.parametrize(
    ("best", "further", "tried"),
    [
        (3e-3, 6, [1e-3, 3e-3, 9e-3]),
        (3e-2, 6, [1e-3, 3e-3, 9e-3, 3e-2, 0.1]),
        (3e-4, 6, [9e-5, 3e-4, 1e-3, 3e-3, 9e-3]),
        (0.1, 1, [1e-3, 3e-3, 9e-3, 3e-2]),
        (0.1, 0, [1e-3, 3e-3, 9e-3]),
    ],
)
def test_rates_are_followed_until_the_best_lies_inside(sweep, tmp_path, best, further, tried):
    """The figure falls on both sides of ``best``, so the row ends with it between two worse ones unless
    ``further`` is used up before."""
    asked, seen = row(sweep, tmp_path, further=further), {}
    figure = {lr: -abs(tried.index(lr) - (tried.index(best) if best in tried else 99)) for lr in tried}
    waiting = list(ADAPTIVE)
    while waiting:
        seen.update({lr: figure[lr] for lr in waiting})
        waiting = [lr for lr in [asked.following(seen)] if lr]
    assert sorted(seen) == tried


def test_a_row_that_no_rate_changes_is_followed_no_further(sweep, tmp_path):
    """All alike to the last digits is the rule, whatever the method; a tie of some is none, and the smaller
    of the best is taken, here one at the end."""
    asked = row(sweep, tmp_path)
    alike = {1e-3: 0.5, 3e-3: 0.5, 9e-3: 0.5 + 1e-16}
    assert alike[9e-3] > alike[3e-3]
    assert asked.following(alike) is None
    assert asked.following(dict.fromkeys(ADAPTIVE, 0.5)) is None
    assert sweep.chosen({"lr": 1e-3, "validation": alike}) == ("any", "1e-3 to 9e-3, all alike")
    assert asked.following({1e-3: 0.6, 3e-3: 0.6, 9e-3: 0.5}) == 3e-4
    assert asked.following({1e-3: 0.5, 3e-3: 0.6, 9e-3: 0.6}) is None


def test_a_row_says_where_its_best_rate_lies(sweep):
    inside = {"lr": 3e-3, "validation": {"0.001": 0.5, "0.003": 0.6, "0.009": 0.5}}
    assert sweep.chosen(inside) == ("3e-3", "1e-3 to 9e-3")
    assert sweep.chosen({**inside, "lr": 9e-3}) == ("9e-3", "1e-3 to 9e-3, best at the end")
    assert sweep.chosen({"lr": 0.3, "validation": {0.3: 0.5}}) == ("0.3", "0.3, best at the end")
    assert [sweep.short(lr) for lr in (3e-5, 0.0025, 0.03, 0.1, 3.0)] == [
        "3e-5",
        "2.5e-3",
        "3e-2",
        "0.1",
        "3",
    ]


# How a table is made


def test_a_table_is_made_row_by_row(tables, sweep, tmp_path):
    """The first seed at three rates and one beyond, then the best with each seed, judged. The text: mean ±
    deviation of 0.8, 0.82 and 0.78 is 0.800 ± 0.020; halves for the worst client; 3 MB in all."""
    toy, asked = Toy(peak(9e-3)), row(sweep, tmp_path)
    _, said = make(tables, toy, [asked], tmp_path)
    first = [f"local-lr{lr}-seed1" for lr in ("0.001", "0.003", "0.009", "0.03")]
    assert toy.calls == [*first, *(f"local-lr0.009-seed{seed} test" for seed in (1, 2, 3))]
    assert said[-1] == "toy local is done, 1 of 1 rows: test 0.800 ± 0.020"
    last = (tmp_path / "toy.md").read_text().splitlines()
    assert last[0].split(" | ")[3:] == [
        *("accuracy", "worst client", "reward accuracy", "worst client", "MB sent", "commit |")
    ]
    figures = "0.800 ± 0.020 | 0.400 ± 0.010"
    assert last[2:] == [
        f"| untouched model |  |  | {figures} |  |  |  |  |",
        f"| `local` | 9e-3 | 1e-3 to 3e-2 | {figures} | {figures} | 3.0 | abc1234 |",
    ]
    (kept,) = json.loads((tmp_path / "toy.json").read_text())
    assert (kept["lr"], kept["seeds"], kept["commits"]) == (9e-3, [1, 2, 3], ["abc1234"])
    assert list(kept["validation"]) == ["0.001", "0.003", "0.009", "0.03"]
    assert statistics.mean(kept["preference_accuracy.mean"]) == pytest.approx(0.8)


def test_a_table_takes_up_what_is_finished(tables, sweep, tmp_path):
    """Given again it runs nothing; a run whose summary is gone, or whose commit is still under way, is
    carried out again alone, and so is a judgement that lacks a figure of the run's."""
    toy, asked = Toy(peak(3e-3), head=True), row(sweep, tmp_path)
    make(tables, toy, [asked], tmp_path)
    before = (tmp_path / "toy.md").read_text()
    assert "with the reward head | reward head alone" in before
    toy.calls.clear()
    make(tables, toy, [asked], tmp_path)
    assert toy.calls == []
    runs = tmp_path / "toy"
    (runs / "local-lr0.001-seed1/summary.json").unlink()
    (runs / "local-lr0.009-seed1.begun").write_text("abc1234\n")
    old = json.loads((runs / "local-lr0.003-seed2/judged-test.json").read_text())
    del old["combined_accuracy"]
    (runs / "local-lr0.003-seed2/judged-test.json").write_text(json.dumps(old))
    make(tables, toy, [asked], tmp_path)
    again = ["local-lr0.001-seed1", "local-lr0.009-seed1", "local-lr0.003-seed2 test"]
    assert toy.calls == again
    assert (tmp_path / "toy.md").read_text() == before


def test_a_row_names_every_commit_of_its_runs(tables, sweep, tmp_path):
    """Also of those that lost: they had a part in the choice. A run from elsewhere may have none."""
    toy, asked = Toy(peak(3e-3)), row(sweep, tmp_path)
    make(tables, toy, [asked], tmp_path)
    (tmp_path / "toy/local-lr0.001-seed1/commit").write_text("bcd2345+\n")
    (tmp_path / "toy/local-lr0.003-seed3/commit").unlink()
    make(tables, toy, [asked], tmp_path)
    assert (tmp_path / "toy.md").read_text().splitlines()[-1].endswith("| abc1234, bcd2345+, unknown |")


def test_as_many_runs_as_jobs_are_under_way(tables, sweep, tmp_path):
    """Two, never three, and rows are finished in their order."""
    under_way, most = set(), []

    class Counted(Toy):
        async def __call__(self, run):
            under_way.add(run.out)
            most.append(len(under_way))
            await super().__call__(run)
            under_way.discard(run.out)

    asked = [row(sweep, tmp_path, label) for label in ("local", "feddpo", "fedprox", "fedbn")]
    _, said = make(tables, Counted(peak(3e-3)), asked, tmp_path)
    assert max(most) == 2
    assert [line.split()[1] for line in said if "is done" in line] == [each.label for each in asked]


def test_what_fails_is_told_and_the_other_rows_go_on(tables, sweep, tmp_path):
    """A later call for one row puts it beside those that are there, in the table's order."""

    class Breaks(Toy):
        async def __call__(self, run):
            if run.out.name == "feddpo-lr0.009-seed1":
                raise RuntimeError("no room")
            await super().__call__(run)

    asked = [row(sweep, tmp_path, label) for label in ("feddpo", "local")]
    maker, said = make(tables, Breaks(peak(3e-3)), asked, tmp_path)
    assert maker.failed == ["toy feddpo: no room"]
    assert "FAILED toy feddpo: no room" in said
    assert [each["method"] for each in json.loads((tmp_path / "toy.json").read_text())] == ["local"]
    table = tables.Table("toy", "Toy", tuple(asked))
    maker = tables.Maker(2, Toy(peak(3e-3)), said.append)
    asyncio.run(maker.make(tables.wanted([table], ["toy:feddpo"]), tmp_path))
    assert maker.failed == []
    assert [each["method"] for each in json.loads((tmp_path / "toy.json").read_text())] == ["feddpo", "local"]


def test_a_run_of_other_settings_is_not_reused(tables, sweep, tmp_path):
    """Another place of the same data is no other setting; a rate, a step more and a round less are."""
    asked = row(sweep, tmp_path)
    make(tables, Toy(peak(3e-3)), [asked], tmp_path)
    elsewhere = row(sweep, tmp_path).run(1e-3, 1)
    moved = (*elsewhere.overrides, "data.train=other.jsonl", "model.name=other", "engine.workers=2")
    sweep.Run(elsewhere.file, elsewhere.out, moved).check()
    other = sweep.Run(elsewhere.file, elsewhere.out, (*elsewhere.overrides, "method.local_steps=7"))
    with pytest.raises(
        ValueError, match=r"local-lr0\.001-seed1.*method\.local_steps is 5, not 7.*another --out"
    ):
        other.check()
    with pytest.raises(ConfigError, match="local_stops"):
        sweep.Run(elsewhere.file, tmp_path / "new", ("method.local_stops=7",)).check()


def test_a_process_that_fails_says_why(tables, sweep, tmp_path):
    """Its last line is in the error, and all that it printed is kept."""
    run = sweep.Run(tmp_path / "none.toml", tmp_path / "toy/none", ())
    with pytest.raises(RuntimeError, match=r"status 1: .*none\.toml: no such file"):
        asyncio.run(tables.process(run))
    assert "no such file" in (tmp_path / "toy/none.log").read_text()
    assert not run.out.exists()


# Which code made a run


def test_a_run_names_the_code_that_made_it_and_all_that_resumed_it(sweep, tmp_path, monkeypatch):
    """Killed under one commit and resumed under another it names both, each once, in this order."""
    asked = row(sweep, tmp_path).run(1e-3, 1)
    code = iter(["abc1234", "bcd2345", "bcd2345"])
    resumed: list[bool] = []

    def fake(experiment, out, *, resume):
        resumed.append(resume)
        out.mkdir(exist_ok=True)
        if len(resumed) < 3:
            raise KeyboardInterrupt
        (out / "summary.json").write_text("{}")

    monkeypatch.setattr(sweep, "code", lambda: next(code))
    monkeypatch.setattr(prefed.runs.run, "run", fake)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sweep.finished(asked)
        assert not asked.ready
    sweep.finished(asked)
    sweep.finished(asked)
    assert resumed == [False, True, True]
    assert sweep.commits(asked.out) == ["abc1234", "bcd2345"]
    assert asked.ready
    assert [path.name for path in asked.out.parent.iterdir()] == [asked.out.name]


def test_code_is_named_by_its_commit(sweep, tmp_path, monkeypatch):
    """With a + where a file that git knows differs; by its version where git does not know the package."""

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True
        )

    package = tmp_path / "prefed/__init__.py"
    package.parent.mkdir()
    package.write_text("")
    monkeypatch.setattr(sweep, "prefed", SimpleNamespace(__file__=str(package)))
    git("init", "-q")
    assert sweep.code().startswith("v")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "--short", "HEAD").stdout.strip()
    assert sweep.code() == head
    (tmp_path / "notes.txt").write_text("not git's")
    assert sweep.code() == head
    package.write_text("x = 1\n")
    assert sweep.code() == f"{head}+"


# What the tables hold


def test_every_row_of_every_table_is_a_valid_experiment(every):
    """At each of its rates and seeds, into a folder of its own; three seeds, rates in steps of three."""
    assert sorted(every) == ["fedpdpo", "harmless", "opposed", "opposed-ppo", "opposed-sgd", "personas"]
    folders: list[Path] = []
    for table in every.values():
        assert table.missing == ()
        for each in table.rows:
            assert each.seeds == (42, 43, 44)
            assert each.further >= 4
            for lr in each.rates:
                run = each.run(lr, 42)
                experiment = Experiment.load(run.file, list(run.overrides))
                assert (experiment.method.settings.lr, experiment.seed) == (lr, 42)
                assert (experiment.evaluate.split, experiment.engine.threads) == ("validation", 1)
                folders.append(run.out)
                personal = getattr(experiment.method.settings, "personal_lr", lr)
                assert personal in (None, lr)  # None: as lr
                assert run.out == Path("out") / table.name / f"{each.label}-lr{lr:g}-seed42"
    assert len(set(folders)) == len(folders)


def test_rates_begin_where_the_kind_of_step_says(every):
    """AdamW at 1e-3, 3e-3, 9e-3; plain gradient steps at 0.3, 1, 3; PPO and harmlessness lower."""
    for table in every.values():
        for each in table.rows:
            settings = Experiment.load(each.file, list(each.run(1e-3, 42).overrides)).method.settings
            if settings.optimizer == "sgd":
                assert each.rates == PLAIN
            elif table.name == "opposed-ppo":
                assert each.rates == (1e-4, 3e-4, 1e-3)
            else:
                assert each.rates == ((3e-4, 1e-3, 3e-3) if table.name == "harmless" else ADAPTIVE)


def test_opposed_clients_get_the_same_steps_under_every_method(every):
    """Four optimiser steps (FedALA: three, and one of its weights; eighty at once for the pooled twenty
    clients) of eight pairs a round, at a constant rate; in FedPDPO's table also its paper's eight."""
    opposed = [table for name, table in every.items() if name.startswith("opposed") or name == "fedpdpo"]
    seen = set()
    for name, each in ((table.name, each) for table in opposed for each in table.rows):
        twice = name == "fedpdpo" and each.label.endswith("-4")
        method = Experiment.load(each.file, list(each.run(1e-3, 42).overrides)).method
        settings, name = method.settings, method.name
        seen.add(name)
        assert (settings.batches(), settings.schedule) == ((8, 1), "constant")
        steps = settings.local_steps
        if name in ("fedpdpo", "fedrep", "ditto"):
            steps += settings.personal_length()[0]
        elif name == "perfedavg":
            steps *= 1 + settings.inner_steps
        elif name == "pfedme":
            steps *= settings.inner_steps
        elif name == "fedala":
            assert settings.weight_steps == settings.first_weight_steps == 1
            steps += settings.weight_steps
        assert steps == (80 if name == "centralized" else 8 if twice else 4), name
    assert len(seen) == 15


def test_fedpdpo_is_taken_apart_under_both_budgets(every):
    """Each variant differs from the full method in its parts alone, whatever the budget; with neither part it
    is FedRep (tests/laws/test_personal_laws.py), whose runs the other tables have."""
    found = {}
    for each in every["fedpdpo"].rows:
        method = Experiment.load(each.file, list(each.run(1e-3, 42).overrides)).method
        if method.name == "fedrep":
            found[each.label] = (False, False)
            continue
        assert (method.name, method.settings.personal_head) == ("fedpdpo", True)
        parts = (method.settings.bottleneck, method.settings.reward_head)
        bounds = (method.settings.scale_least, method.settings.scale_most)
        found[each.label] = (*parts, *(bounds if parts[1] else ()))
    variants = {
        "full": (True, True, 0.1, 10),
        "letter": (True, True, 0, 0),
        "no-bottleneck": (False, True, 0.1, 10),
        "no-reward-head": (True, False),
        "neither": (False, False),
    }
    assert found == {f"{name}-{steps}": parts for name, parts in variants.items() for steps in (2, 4)}


def test_data_are_looked_for_by_name(tables, tmp_path):
    """In the folders that are given, then beside the experiment; what is set by hand is left alone."""
    (tmp_path / "opposed.train.jsonl.gz").touch()
    file = HERE / "personas/opposed.toml"
    overrides, missing = tables.sources(file, [tmp_path / "none", tmp_path], {"data.test"})
    assert overrides == [f'data.train="{tmp_path}/opposed.train.jsonl.gz"']
    assert missing in ({}, {"validation": HERE / "personas/opposed.validation.jsonl.gz"})


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("further = 6", "farther = 6", "farther, further: missing or unknown"),
        ('judge = "reward_accuracy"', 'judge = "luck"', "judge = 'luck' is none of"),
        ('label = "local"', 'name = "local"', "row 3: unknown: name"),
        ('label = "local"', 'label = "feddpo"', "row 3: it needs a label of its own"),
    ],
)
def test_a_table_that_is_not_one_is_refused(tables, tmp_path, old, new, said):
    text = (HERE / "tables/harmless.toml").read_text()
    assert old in text
    path = tmp_path / "tables/odd.toml"
    path.parent.mkdir()
    path.write_text(text.replace(old, new).replace("hh_harmless/", f"{HERE}/hh_harmless/"))
    with pytest.raises(tables.TableError, match=said) as refused:
        tables.read(path, tmp_path)
    assert str(path) in str(refused.value)


def test_what_is_asked_for_and_not_there_is_named(tables, tmp_path):
    with pytest.raises(tables.TableError, match=r"there is no opposed:fedpro; there are: .*opposed:fedprox"):
        tables.wanted([tables.read(HERE / "tables/opposed.toml", tmp_path)], ["opposed:fedpro"])
    args = SimpleNamespace(model=None, overrides=[], data=[], reward=tmp_path / "none", only=["opposed-ppo"])
    with pytest.raises(tables.TableError, match=r"no .*none.*: prepare\.py, opposed\.py and reward\.py"):
        tables.opened(SimpleNamespace(**vars(args), out=tmp_path))
