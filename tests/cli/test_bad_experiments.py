"""Experiment files, run directories and commands that cannot be: each ends with its message, and nothing else.

No case comes as far as a model: what is wrong is said before anything is loaded, computed or written.
"""

# ruff: noqa: E501 - one case a line
from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finished import write_run
from prefed.ui.cli import app

FILE = """\
rounds = 3
[data]
train = "pairs.jsonl"
partition = { by = "iid", clients = 3 }
[model]
name = "./model"
[method]
name = "feddpo"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "exp.toml").write_text(FILE)
    return tmp_path


def refused(*words: str, code: int = 1) -> str:
    """What ``prefed`` says on standard error, and that it says no more than a message."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, f"{result.output}{result.exception!r}"
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    if code == 1:
        assert result.stderr.startswith("error: ")
    return result.stderr


GROUPS = 'data.partition={{by="column",column="c",groups={{{}}}}}'
VALUES = {
    "unknown table": ("modell.name=x", "modell: no such key; did you mean 'model'?"),
    "unknown key": ("method.lrr=1", "method.lrr: no such key; did you mean 'lr'?"),
    "unknown key deep inside": ("model.lora.rnk=4", "model.lora.rnk: no such key; did you mean 'rank'?"),
    "unknown key of a partition": ("data.partition.client=4", "no such key; did you mean 'clients'?"),
    "unknown key of a source": ("data.train={path='x',formt='y'}", "data.train.formt: no such key"),
    "unknown key of another method": ("method.mu=1", "method.mu: no such key"),
    "text for a number": ("method.lr=fast", "method.lr = 'fast': should be a valid number"),
    "a list for a number": ("method.lr=[1]", "method.lr = [1]: should be a valid number"),
    "a table for a number": ("rounds={a=1}", "rounds: should be a valid integer"),
    "a number for a table": ("cohort=3", "cohort = 3: should be a table"),
    "a fraction for a whole number": ("seed=1.5", "seed = 1.5: should be a valid integer"),
    "true for a number": ("method.lr=true", "method.lr = True: should be a number"),
    "negative": ("method.lr=-1", "method.lr = -1: should be greater than 0"),
    "NaN": ("method.lr=nan", "method.lr = nan: should be a finite number"),
    "empty name": ("model.name=''", "model.name = '': should have at least 1 character"),
    "empty table of sources": ("data.train={}", "data.train: the table of sources"),
    "unknown method": ("method.name=fedpo", "no method is called 'fedpo'; did you mean 'feddpo'?"),
    "unknown merge rule": ("merge.rule=meen", "merge.rule = 'meen': should be 'mean', 'median'"),
    "unknown device": ("model.device=tpu", "model.device = 'tpu': should be one of 'auto'"),
    "partition without a kind": ("data.partition={clients=3}", "data.partition: "),
    "a control character in a client's name": (GROUPS.format('"a\\u001b[31m"=["x"]'), "U+001B"),
    "a client without a name": (GROUPS.format('""=["x"]'), "empty client name"),
    "an override without a value": ("nonsense", "--set nonsense: write key=value"),
    "an override through a value": ("data.train.path=x", "train is 'pairs.jsonl', not a table"),
    "an override with a broken key": ("a..b=1", "--set a..b=1: write key=value"),
}


def test_a_value_that_cannot_be(place: Path, subtests: pytest.Subtests) -> None:
    """The message has the option as it was given, the key and what would do."""
    for case, (override, expected) in VALUES.items():
        with subtests.test(case):
            message = refused("run", "exp.toml", "--set", override, "--out", "out")
            assert message.startswith(
                (f"error: --set {override}: ", f"error: exp.toml with --set {override}: ")
            )
            assert expected in message
            assert not (place / "out").exists()


CONFLICTS = {
    "size and fraction": (["cohort={size=2,fraction=0.5}"], "cohort: give size or fraction, not both"),
    "one source for each client": (["data.partition={by='source'}"], 'by = "source" requires train = {name'),
    "conflict by nothing": (["data.partition={by='conflict',clients=2}"], "needs either column"),
}  # fmt: skip


def test_settings_that_do_not_go_together(place: Path, subtests: pytest.Subtests) -> None:
    for case, (overrides, expected) in CONFLICTS.items():
        with subtests.test(case):
            words = [word for override in overrides for word in ("--set", override)]
            assert expected in refused("run", "exp.toml", *words, "--out", "out")
            assert not (place / "out").exists()


CONTENTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "exp.toml: data: missing"),
    "a text without quotes": (b"[method]\nname = feddpo\n", "(at line 2, column 8); texts need quotes"),
    "JSON": (b'{"rounds": 3}', "exp.toml is not TOML: "),
    "a key given twice": (FILE.encode() + b'name = "local"\n', "exp.toml is not TOML: Cannot overwrite a value"),
    "not UTF-8": (b"# caf\xe9\n" + FILE.encode(), "exp.toml: not UTF-8 text (byte 0xe9 on line 1)"),
}  # fmt: skip


def test_a_file_that_is_no_experiment(place: Path, subtests: pytest.Subtests) -> None:
    for case, (content, expected) in CONTENTS.items():
        with subtests.test(case):
            (place / "exp.toml").write_bytes(content)
            assert expected in refused("data", "exp.toml")


@pytest.mark.parametrize("content", ["\ufeff" + FILE, FILE.replace("\n", "\r\n")], ids=["BOM", "CRLF"])
def test_what_editors_on_windows_write_is_read(place: Path, content: str) -> None:
    """Both come as far as the data, which are not there."""
    (place / "exp.toml").write_bytes(content.encode())
    (place / "model").mkdir()
    assert "the folder is empty" in refused("data", "exp.toml")


def test_a_file_that_is_not_to_be_had(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "absent.toml: no such file; `prefed init METHOD --out absent.toml" in refused("run", "absent.toml")
    (place / "folder.toml").mkdir()
    assert "folder.toml: cannot be read: " in refused("run", "folder.toml")

    def denied(path: Path, *more: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    # Whoever runs the tests may be allowed to read everything.
    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "exp.toml: cannot be read: " in refused("run", "exp.toml")


def broken(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


def foreign(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()
    (run / "letter.txt").touch()


DIRECTORIES: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "report of a file": (lambda run: (run.parent / "x").touch(), ["report", "x"], "x"),
    "report of a summary in bytes": (lambda run: (run / "summary.json").write_bytes(b"\xff"), ["report", "run"], "summary.json is damaged"),
    "report into a folder": (lambda run: (run.parent / "x").mkdir(), ["report", "run", "--out", "x"], "x"),
    "compare of one twice": (lambda run: None, ["compare", "run", "./run"], "give at least two different runs"),
    "export of no checkpoint": (lambda run: None, ["export", "run"], "run: cannot read checkpoint/, which contains the model: run contains no run: run/checkpoint/COMMIT.json is missing"),
    "init over a file": (lambda run: (run.parent / "local.toml").touch(), ["init", "local"], "local.toml exists; choose another --out, or --force"),
    "init over a folder": (lambda run: (run.parent / "x").mkdir(), ["init", "local", "--out", "x", "--force"], "x is a folder; choose another --out"),
    "run into a file": (lambda run: (run.parent / "x").touch(), ["run", "exp.toml", "--out", "x"], "x is a file, not a folder; choose another --out"),
    "run into foreign files": (lambda run: foreign(run), ["run", "exp.toml", "--out", "run"], "run is not empty and contains 'letter.txt' instead of a run; choose another"),
    "resume of foreign files": (lambda run: foreign(run), ["run", "exp.toml", "--out", "run", "--resume"], "run is not empty and contains 'letter.txt' instead of a run; choose another"),
    "resume of rounds without a checkpoint": (lambda run: None, ["run", "exp.toml", "--out", "run", "--resume"], "run has no checkpoint/, which is needed to continue the run"),
    "resume of rounds without a commit": (lambda run: (run / "checkpoint/LOCK").touch(), ["run", "exp.toml", "--out", "run", "--resume"], "run is damaged: it has rounds, but run/checkpoint/COMMIT.json is missing; restore it, or start a new run with"),
    "resume of nothing": (lambda run: run.rename(run.parent / "other"), ["run", "exp.toml", "--out", "run", "--resume"], "run contains no run to resume (runs next to it: other)"),
    "example over pairs": (lambda run: (run.parent / "pairs.jsonl").touch(), ["init", "local", "--example"], "pairs.jsonl exists; choose an --out in another folder, or --force to replace it"),
    "resume of broken settings": (lambda run: (broken("config.toml", "a =")(run), (run / "checkpoint/LOCK").touch(), (run / "rounds.jsonl").unlink()), ["run", "exp.toml", "--out", "run", "--resume"], "run/config.toml is damaged: "),
}  # fmt: skip


def test_a_directory_that_will_not_do(
    place: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for case, (prepare, words, expected) in DIRECTORIES.items():
        with subtests.test(case):
            run = write_run(place / case / "run")
            shutil.copy(place / "exp.toml", place / case)
            monkeypatch.chdir(place / case)
            (run / "checkpoint").mkdir()
            prepare(run)
            assert expected in refused(*words)


USAGE = {
    "no file": (["run"], "Missing argument"),
    "push of two": (["push", "run", "a/b", "--client", "a", "--selector", "0"], "give --client or --selector, not both"),
    "a licence without a card": (["export", "run", "--license", "mit"], "add --card"),
    "the aligned model of a selector": (["push", "run", "a/b", "--aligned", "--selector", "0"], "give --selector or --aligned, not both"),
    "the aligned model of the best round": (["export", "run", "--aligned", "--round", "best"], "round; remove --round best"),
    "a grid of one cell": (["sweep", "exp.toml", "--seeds", "2", "--only", "x"], "without --only"),
    "a judge of no grid": (["sweep", "t.toml", "--judge", "reward_accuracy"], "--judge requires --grid"),
    "evaluate both ways": (["evaluate", "run", "--split", "test", "--test", "a.jsonl"], "give --split or --test FILE"),
    "everyone of nothing": (["evaluate", "run", "--everyone"], "--everyone requires --test FILE"),
    "no such judge": (["judge", "run", "--judge", "utilty", "--prompts", "a"], "did you mean 'utility'?"),
    "export of two": (["export", "run", "--client", "a", "--selector", "0"], "give --client or --selector, not both"),
    "collect of nothing": (["collect"], "give --model NAME"),
    "theory of no graph": (["theory", "--graph", "rng"], "no such graph; did you mean 'ring'?"),
    "try to resume": (["run", "exp.toml", "--dry-run", "--resume"], "give --dry-run or --resume, not both"),
}  # fmt: skip


def test_a_command_that_is_none(place: Path, subtests: pytest.Subtests) -> None:
    """What can be seen to be wrong from the words alone ends with 2."""
    for case, (words, expected) in USAGE.items():
        with subtests.test(case):
            assert expected in refused(*words, code=2)
            assert [path.name for path in place.iterdir()] == ["exp.toml"]
