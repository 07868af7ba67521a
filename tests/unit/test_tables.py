"""Tables of experiments: what a table's file may say."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from commands import prefed_
from prefed.config import ConfigError, Experiment
from prefed.config.experiment_table import load_cell, load_table

HERE = Path(__file__).resolve().parents[2] / "experiments"
TABLE = """\
title = "A table"
seeds = [1, 2]

[base]
rounds = 3
data.train = "pairs.jsonl"
data.partition = { by = "iid", clients = 2 }
model.name = "model"
method.name = "feddpo"
method.lr = 1e-3

[sets.many]
rounds = 9
data.partition.clients = 9

[sets.few]
data.partition.clients = 1

[sets.personal.method]
name = "fedper"
personal_lr = "{lr}"

[columns]
many = "Many"
few = "Few"

[rows.shared]
text = "FedAvg"
set.rounds = 5
paper = { many = "87.41±0.20", few = "63.98" }
clients.few = { client-0 = "63.98" }

[rows.personal]
sets = ["personal"]
"""


@pytest.fixture
def table(tmp_path):
    """A function that writes the table above, with one text replaced, and gives its path."""

    def write(old="", new="", name="table.toml"):
        assert old in TABLE
        path = tmp_path / name
        path.write_text(TABLE.replace(old, new) if old else TABLE)
        return path

    return write


# What a table's file may say


def test_a_cell_is_the_base_its_column_its_sets_and_its_own_settings(table):
    """Each laid over the one before: the column has 9 rounds, the row 5."""
    path = table()
    cells = load_table(path).cells(path)
    assert list(cells) == ["many/shared", "few/shared", "many/personal", "few/personal"]
    experiments = {name: cell.experiment() for name, cell in cells.items()}
    assert [each.rounds for each in experiments.values()] == [5, 5, 9, 3]
    assert [each.data.partition.clients for each in experiments.values()] == [9, 1, 9, 1]
    assert [cell.text for cell in cells.values()] == [
        *("Many, FedAvg", "Few, FedAvg", "Many, `personal`", "Few, `personal`")
    ]
    assert [cell.paper for cell in cells.values()] == ["87.41±0.20", "63.98", "", ""]
    assert [dict(cell.clients) for cell in cells.values()] == [{}, {"client-0": "63.98"}, {}, {}]


def test_a_setting_follows_the_rate(table):
    """``{lr}`` is the rate that the cell ends up with; a rate that is not set cannot be followed."""
    path = table()
    assert load_cell(path, "few/personal").method.settings.personal_lr == 1e-3
    moved = load_cell(path, "few/personal", ["method.lr=0.2", "rounds=4"])
    assert (moved.method.settings.lr, moved.method.settings.personal_lr, moved.rounds) == (0.2, 0.2, 4)
    with pytest.raises(ConfigError, match=r"cell few/personal: personal_lr = '\{lr\}' .* method\.lr"):
        load_cell(table("method.lr = 1e-3\n"), "few/personal")


def test_a_table_takes_over_what_it_does_not_say(table, tmp_path):
    """All but title and rows; base and sets are laid over, other keys replaced. No table extends itself."""
    table(name="under.toml")
    path = tmp_path / "over.toml"
    text = 'title = "Over"\nextends = "under.toml"\nseeds = [3]\n[base]\nrounds = 2\n[rows.only]\n'
    path.write_text(text)
    read = load_table(path)
    assert (read.seeds, list(read.columns), list(read.rows)) == ([3], ["many", "few"], ["only"])
    assert [cell.experiment().rounds for cell in read.cells(path).values()] == [9, 2]
    path.write_text(text.replace("under", "over"))
    with pytest.raises(ConfigError, match=r"over\.toml: extends itself, directly or through other tables$"):
        load_table(path)


def test_paths_are_taken_from_the_file_that_names_them(table, tmp_path):
    """A base elsewhere has its own folder; what a row sets is looked for next to the table."""
    (tmp_path / "base").mkdir()
    for place in ("base/pairs.jsonl", "test.jsonl"):
        (tmp_path / place).touch()
    head, _, rest = TABLE.partition("[base]\n")
    base, _, rest = rest.partition("[sets.many]")
    (tmp_path / "base/base.toml").write_text(base)
    path = tmp_path / "table.toml"
    path.write_text(f'{head}base = "base/base.toml"\n[sets.many]{rest}set.data.test = "test.jsonl"\n')
    data = load_cell(path, "few/personal").data
    assert (data.train.path, data.test.path) == (
        str(tmp_path / "base/pairs.jsonl"),
        str(tmp_path / "test.jsonl"),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = ", "seed = ", "seed: no such key; did you mean 'seeds'?"),
        ('sets = ["personal"]', 'sets = ["persona"]', "rows.personal.sets: no set is called 'persona'"),
        ('few = "Few"', 'fw = "Few"', "columns.fw: no set is called 'fw'; did you mean 'few'?"),
        ('few = "63.98"', 'fw = "63.98"', "rows.shared.paper: no column is called 'fw'; did you mean 'few'?"),
        ('paper = { many = "87.41±0.20", few = "63.98" }', 'paper = "1"', "rows.shared.paper: the table"),
        ('[columns]\nmany = "Many"\nfew = "Few"\n', "", "rows.shared.paper: the table has no columns"),
        ("[rows.shared]", "[rows.'a b']", "'a b' becomes a folder's name"),
        ("seeds = [1, 2]", 'judge = "luck"', "judge = 'luck': "),
    ],
)
def test_a_table_that_is_not_one_is_refused(table, old, new, message):
    path = table(old, new)
    with pytest.raises(ConfigError) as refused:
        load_table(path)
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)


def test_a_cell_that_is_no_experiment_is_named(table):
    path = table("set.rounds = 5", "set.method.lrr = 5")
    with pytest.raises(ConfigError, match=r"table\.toml, cell many/shared: method\.lrr: no such key"):
        load_cell(path, "many/shared")


# One cell by the command line


def test_a_table_is_run_by_its_cells(table, tmp_path):
    """Without --cell some of them are listed; a name that is close to one is suggested; one experiment has
    none."""

    def error(*words):
        result = prefed_(*words, code=1)
        return result

    path = table()
    for command in ("run", "data"):
        listed = error(command, path)
        assert "is a table of 4 cells (many/shared, few/shared, many/personal, few/personal)" in listed
        assert "--cell" in listed
        assert "no cell is called 'few/share'" in error(command, path, "--cell", "few/share")
    single = HERE / "personas/base.toml"
    for command in ("run", "data"):
        message = error(command, single, "--cell", "few/shared")
        assert "base.toml is one experiment, not a table; remove --cell few/shared" in message
    assert "base.toml is one experiment, not a table" in error("sweep", single)
    assert "no such file" in error("run", tmp_path / "none.toml", "--cell", "few/shared")


def test_every_experiment_file_loads(subtests):
    """Also those whose other tests are in ``experiments/tests``."""
    found = Counter()
    for path in sorted(HERE.rglob("*.toml")):
        with subtests.test(path.relative_to(HERE).as_posix()):
            tree = tomllib.loads(path.read_text("utf-8"))
            if {"rows", "extends"} & tree.keys():
                cells = load_table(path).cells(path)
                assert all(isinstance(cell.experiment(), Experiment) for cell in cells.values())
                found["cells"] += len(cells)
            else:
                assert isinstance(Experiment.load(path), Experiment)
                found["files"] += 1
    assert found["files"] >= 4
    assert found["cells"] > 300
