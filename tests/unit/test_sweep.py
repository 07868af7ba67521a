"""What carries out a table's cells: the rates that are tried, what is reused, what the printed table says."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest

from commands import prefed_, sweep_command
from finished import small_place
from forked import Command
from prefed.config import ConfigError, to_toml
from prefed.runs import sweep_child
from prefed.runs.start_or_resume import fitted
from prefed.runs.sweep import Sweep, check_cells, next_rate, sweep_cells
from prefed.runs.sweep_child import code_version, commits, run_in_process
from prefed.ui.pages.sweep import keep, rate
from preferences import jsonl
from waiting import WATCHDOG, until

ADAPTIVE = (1e-3, 3e-3, 9e-3)
ROWS = [{"prompt": f"Say {k}", "chosen": f" yes {k}", "rejected": f" no {k}"} for k in range(24)]
TOY = """\
title = "Toy"
rates = [1e-3, 3e-3, 9e-3]
further = {further}
seeds = [1, 2, 3]
{more}
[base]
rounds = 2
data = {{ train = "pairs.jsonl", partition = {{ by = "column", column = "persona" }} }}
model.name = "model"
method = {{ name = "feddpo", lr = 1e-3, local_steps = 5 }}
[rows]
{rows}
"""


def toy_cells(folder, *labels, further=2, more=""):
    """The cells of a table with one row a method, whose runs go into ``folder/toy``."""
    path = folder / "toy.toml"
    rows = "\n".join(f'{label}.set.method.name = "{label}"' for label in labels or ("local",))
    path.write_text(TOY.format(further=further, rows=rows, more=more))
    return sweep_cells(path, folder)


def health(loops):
    """Health of 20 answers of which this share loops."""
    shares = {"ends": 1.0, "empty": 0.0, "distinct_2": 0.9, "loops": loops}
    return {"answers": 20, **shares, "length": 9.0, "surprise": 1.0, "surprise_band": [0.5, 1.0]}


class Toy:
    """Carries no run out, but leaves what one leaves; its figures are a function of rate and seed."""

    def __init__(self, figure, commit="abc1234", head=False, loops=None):
        self.figure, self.commit, self.head, self.loops, self.calls = figure, commit, head, loops, []

    async def __call__(self, run):
        self.calls.append(run.out.name + (" test" if run.test else ""))
        mean = self.figure(run.experiment.method.settings.lr, run.experiment.seed)
        names = ["preference_accuracy", "reward_accuracy", "baseline_accuracy"]
        names += ["combined_accuracy", "explicit_accuracy"] if self.head else []
        figures = {name: {"mean": mean, "worst": mean / 2} for name in names}
        run.out.mkdir(parents=True, exist_ok=True)
        if not (run.out / "config.toml").exists():
            (run.out / "config.toml").write_text(to_toml(fitted(run.experiment)))
            (run.out / "commit").write_text(self.commit + "\n")
        rest = {"bytes": {"up": 1_000_000, "down": 2_000_000}, "seconds": 1.0}
        if self.loops is not None:
            base, own = (health(loops) for loops in (0.0, self.loops(run.experiment.method.settings.lr)))
            rest["text"] = {"base": base, "shared": own}
        (run.out / "summary.json").write_text(json.dumps({**figures, **rest}))
        if run.test:
            (run.out / "judged-test.json").write_text(json.dumps(figures))
        await asyncio.sleep(0)


def peak(at, slope=0.1):
    """A figure that is highest at one rate; seeds 2 and 3 are 0.02 above and below the first."""
    return lambda lr, seed: 0.8 - slope * (lr != at) - slope * abs(lr - at) + {1: 0, 2: 0.02, 3: -0.02}[seed]


def make(toy, cells, order=None, jobs=2):
    """Carry cells out; gives the sweep and the lines that it printed."""
    lines: list[str] = []
    order = order or [cell.definition.name for cell in cells]
    sweep = Sweep(jobs, lines.append, toy)
    asyncio.run(sweep.tables(cells, lambda cell, outcome: keep(cell, order, outcome)))
    return sweep, lines


# Which rates are tried


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
def test_rates_are_followed_until_the_best_lies_inside(best, further, tried):
    """The figure falls on both sides of ``best``, so the search ends with it between two worse ones unless
    ``further`` is used up before."""
    figure = {lr: -abs(tried.index(lr) - (tried.index(best) if best in tried else 99)) for lr in tried}
    figures = {lr: figure[lr] for lr in ADAPTIVE}
    while (lr := next_rate(figures, len(ADAPTIVE) + further)) is not None:
        figures[lr] = figure[lr]
    assert sorted(figures) == tried


def test_a_cell_that_no_rate_changes_is_followed_no_further():
    """All alike to the last digits is the rule, whatever the method; a tie of some is none, and the smaller
    of the best is taken, here one at the end."""
    alike = {1e-3: 0.5, 3e-3: 0.5, 9e-3: 0.5 + 1e-16}
    assert alike[9e-3] > alike[3e-3]
    assert next_rate(alike, 9) is None
    assert next_rate(dict.fromkeys(ADAPTIVE, 0.5), 9) is None
    assert rate({"lr": 1e-3, "validation": alike}) == ("any", "1e-3 to 9e-3, all alike")
    assert next_rate({1e-3: 0.6, 3e-3: 0.6, 9e-3: 0.5}, 9) == 3e-4
    assert next_rate({1e-3: 0.5, 3e-3: 0.6, 9e-3: 0.6}, 9) is None


def test_a_row_says_where_its_best_rate_lies():
    inside = {"lr": 3e-3, "validation": {"0.001": 0.5, "0.003": 0.6, "0.009": 0.5}}
    assert rate(inside) == ("3e-3", "1e-3 to 9e-3")
    assert rate({**inside, "lr": 9e-3}) == ("≥9e-3", "1e-3 to 9e-3")
    assert rate({"lr": 0.3, "validation": {0.3: 0.5}}) == ("0.3", "0.3")


# How a table is made


def test_a_table_is_made_cell_by_cell(tmp_path):
    """The first seed at three rates and one beyond, then the best with each seed, judged. The text: mean ±
    deviation of 0.8, 0.82 and 0.78 is 0.800 ± 0.020; halves for the worst client; 3 MB in all."""
    toy = Toy(peak(9e-3))
    _, lines = make(toy, toy_cells(tmp_path))
    first = [f"local-lr{lr}-seed1" for lr in ("0.001", "0.003", "0.009", "0.03")]
    assert toy.calls == [*first, *(f"local-lr0.009-seed{seed} test" for seed in (1, 2, 3))]
    assert lines[0] == "1 cell, 5 runs or more, 0 already finished"
    log = tmp_path / "toy/local-lr0.001-seed1.log"
    assert lines[1] == f"running local-lr0.001-seed1, log: {log}"
    assert "toy local lr 0.03: validation 0.698" in lines
    assert f"evaluating local-lr0.009-seed1, log: {tmp_path / 'toy/local-lr0.009-seed1.log'}" in lines
    assert lines[-1] == "finished toy local, 1 of 1 cells"
    table = (tmp_path / "toy.md").read_text().splitlines()
    assert table[0].split(" | ")[3:] == [
        *(
            "preference accuracy",
            "worst client",
            "reward accuracy",
            "worst reward accuracy",
            "MB sent",
            "commit |",
        )
    ]
    figures = "0.800 ± 0.020 | 0.400 ± 0.010"
    assert table[2:] == [
        f"| base model |  |  | {figures} |  |  |  |  |",
        f"| `local` | 9e-3 | 1e-3 to 3e-2 | {figures} | {figures} | 3.0 | abc1234 |",
    ]
    (row,) = json.loads((tmp_path / "toy.json").read_text())
    assert (row["lr"], row["seeds"], row["commits"]) == (9e-3, [1, 2, 3], ["abc1234"])
    assert list(row["validation"]) == ["0.001", "0.003", "0.009", "0.03"]
    assert statistics.mean(row["preference_accuracy.mean"]) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("broken", "best", "whole"), [(lambda lr: lr > 3e-3, 3e-3, "3 of 3"), (lambda lr: True, 9e-3, "0 of 3")]
)
def test_a_rate_that_breaks_text_is_not_selected_unless_all_do(tmp_path, broken, best, whole):
    _, lines = make(toy := Toy(peak(9e-3), loops=lambda lr: 0.5 * broken(lr)), toy_cells(tmp_path))
    assert f"local-lr{best}-seed3 test" in toy.calls
    assert "toy local lr 0.009: validation 0.800, but its text is broken" in lines
    (row,) = json.loads((tmp_path / "toy.json").read_text())
    assert (row["lr"], 9e-3 in row["broken"], len(row["health"])) == (best, True, 3)
    head, _, _, line = (tmp_path / "toy.md").read_text().splitlines()
    place = head.split(" | ").index("healthy text")
    assert line.split(" | ")[place] == whole


SEPARATE = """\
fedper.set.method = { name = "fedper", personal_lr = "{lr}" }
fedper.separate = ["personal_lr"]
"""


def separate_cells(folder, row=SEPARATE):
    """The cells of a table with a row whose personal rate is selected after the shared one."""
    toy_cells(folder)
    path = folder / "toy.toml"
    path.write_text(path.read_text().partition("[rows]")[0] + "[rows]\n" + row)
    return sweep_cells(path, folder)


class TwoRates(Toy):
    """Best at a learning rate of 3e-3 and, given any, at a personal rate of 0.027."""

    async def __call__(self, run):
        personal = run.experiment.method.settings.personal_lr
        self.figure = lambda lr, seed: 0.8 - 0.1 * (lr != 3e-3) - 0.01 * abs(math.log(personal / 0.027))
        await super().__call__(run)


def test_separate_rates_are_selected_one_after_the_other(tmp_path):
    """The personal rate follows the learning rate, 3e-3, then 1e-3, 9e-3 (three times lower and higher) and,
    while the best is the highest, 2.7e-2 rounded to 3e-2 and (3e-2)² / 9e-3 = 0.1, which is worse."""
    toy, cells = TwoRates(None), separate_cells(tmp_path)
    _, lines = make(toy, cells)
    first = [f"fedper-lr{lr}-seed1" for lr in ("0.001", "0.003", "0.009")]
    personal = [f"fedper-lr0.003-personal_lr{lr}-seed1" for lr in ("0.001", "0.009", "0.03", "0.1")]
    best = [f"fedper-lr0.003-personal_lr0.03-seed{seed} test" for seed in (1, 2, 3)]
    assert toy.calls == [*first, *personal, *best]
    assert lines[0] == "1 cell, 5 runs or more, 0 already finished"
    (row,) = json.loads((tmp_path / "toy.json").read_text())
    assert (row["lr"], list(row["validation"])) == (3e-3, ["0.001", "0.003", "0.009"])
    assert row["separate"]["personal_lr"]["value"] == 0.03
    assert list(row["separate"]["personal_lr"]["validation"]) == ["0.001", "0.003", "0.009", "0.03", "0.1"]
    assert rate(row) == ("3e-3, personal_lr 3e-2", "1e-3 to 9e-3, personal_lr 1e-3 to 0.1")
    toy.calls.clear()
    make(toy, cells)
    assert toy.calls == []


def test_a_separate_rate_that_stays_needs_no_further_run_of_its_own(tmp_path):
    row = SEPARATE.replace('"{lr}"', "0.03")
    make(toy := TwoRates(None), separate_cells(tmp_path, row))
    assert toy.calls[-3:] == [f"fedper-lr0.003-seed{seed} test" for seed in (1, 2, 3)]
    assert toy.calls[3:-3] == [f"fedper-lr0.003-personal_lr{lr}-seed1" for lr in ("0.01", "0.09")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (SEPARATE.replace('["personal_lr"]', '["personal_rl"]'), r"method\.personal_rl is no setting"),
        ('fedsdg.set.method.name = "fedsdg"\nfedsdg.separate = ["personal_lr"]', r"personal_lr is None"),
    ],
)
def test_a_separate_rate_that_does_not_exist_or_has_no_value_is_refused(tmp_path, row, message):
    with pytest.raises(ConfigError, match=message):
        check_cells(separate_cells(tmp_path, row))


def test_an_override_of_a_separate_rate_is_refused(tmp_path):
    separate_cells(tmp_path)
    with pytest.raises(ConfigError, match=r"method\.personal_lr is set by the sweep"):
        check_cells(sweep_cells(tmp_path / "toy.toml", tmp_path, ["method.personal_lr=0.1"]))


def test_a_table_takes_up_what_is_finished(tmp_path):
    """Given again it runs nothing; a run whose summary is gone, or whose commit is still under way, is
    carried out again alone, and so is an evaluation that lacks a figure of the run's."""
    toy, cells = Toy(peak(3e-3), head=True), toy_cells(tmp_path)
    make(toy, cells)
    before = (tmp_path / "toy.md").read_text()
    assert "combined accuracy | explicit accuracy" in before
    toy.calls.clear()
    _, lines = make(toy, cells)
    assert lines[0] == "1 cell, 5 runs or more, 5 already finished"
    assert toy.calls == []
    runs = tmp_path / "toy"
    (runs / "local-lr0.001-seed1/summary.json").unlink()
    (runs / "local-lr0.009-seed1.commits").write_text("abc1234\n")
    old = json.loads((runs / "local-lr0.003-seed2/judged-test.json").read_text())
    del old["combined_accuracy"]
    (runs / "local-lr0.003-seed2/judged-test.json").write_text(json.dumps(old))
    make(toy, cells)
    again = ["local-lr0.001-seed1", "local-lr0.009-seed1", "local-lr0.003-seed2 test"]
    assert toy.calls == again
    assert (tmp_path / "toy.md").read_text() == before


def test_as_many_runs_as_jobs_are_under_way(tmp_path):
    """Two, never three, and cells are finished in their order."""
    under_way, most = set(), []

    class Counted(Toy):
        async def __call__(self, run):
            under_way.add(run.out)
            most.append(len(under_way))
            await super().__call__(run)
            under_way.discard(run.out)

    cells = toy_cells(tmp_path, "local", "feddpo", "fedprox", "fedbn")
    _, lines = make(Counted(peak(3e-3)), cells)
    assert max(most) == 2
    assert [line.split()[2].rstrip(",") for line in lines if line.startswith("finished ")] == [
        each.definition.name for each in cells
    ]


def test_what_fails_is_named_and_the_other_cells_go_on(tmp_path):
    """A later call for one cell puts it next to the existing ones, in the table's order."""

    class Breaks(Toy):
        async def __call__(self, run):
            if run.out.name == "feddpo-lr0.009-seed1":
                raise RuntimeError("no room")
            await super().__call__(run)

    cells = toy_cells(tmp_path, "feddpo", "local")
    sweep, lines = make(Breaks(peak(3e-3)), cells)
    assert sweep.failed == {"toy feddpo": "toy feddpo"}
    assert sweep.refused == {}
    assert "FAILED toy feddpo: no room" in lines
    assert [each["method"] for each in json.loads((tmp_path / "toy.json").read_text())] == ["local"]
    sweep, _ = make(Toy(peak(3e-3)), cells[:1], ["feddpo", "local"])
    assert sweep.failed == {}
    assert [each["method"] for each in json.loads((tmp_path / "toy.json").read_text())] == ["feddpo", "local"]


def test_a_run_of_other_settings_is_not_reused(tmp_path):
    """The same data in another place is the same setting; one more step or an unknown key is not."""
    (cell,) = toy_cells(tmp_path)
    make(Toy(peak(3e-3)), [cell])

    def first(*overrides):
        return sweep_cells(cell.definition.path, tmp_path, overrides)[0].planned()[0]

    first("data.train=other.jsonl", "model.name=other", "engine.workers=2").check()
    with pytest.raises(ValueError, match=r"local-lr0\.001-seed1.*method\.local_steps is 5, not 7.*another"):
        first("method.local_steps=7").check()
    with pytest.raises(ConfigError, match="local_stops"):
        first("method.local_stops=7")


# A run in a process


FAKE = """
import os, pathlib, signal, sys, time, types
sys.platform = "a system where nothing is imported before the fork"
sys.modules["prefed.ui.cli"] = types.SimpleNamespace(main=lambda: main_(sys.argv))
"""
"""Before :data:`sweep_child.START`: ``main_`` is called instead of ``prefed``."""


def with_processes(work):
    async def act():
        async with sweep_child.CommandProcesses() as processes:
            return await work(processes)

    return asyncio.run(act())


def as_command(monkeypatch, text):
    monkeypatch.setattr(sweep_child, "START", f"{FAKE}{dedent(text)}{sweep_child.START}")


def test_a_process_that_fails_says_why(tmp_path, monkeypatch):
    """Its last line is in the error, and all that it printed is kept."""
    says = 'print("round 1/2", file=sys.stderr, flush=True); sys.exit("error: no model")'
    as_command(monkeypatch, f"def main_(words): {says}")
    run = toy_cells(tmp_path)[0].planned()[0]
    with pytest.raises(sweep_child.CommandError, match=r"status 1: error: no model") as failed:
        with_processes(partial(run_in_process, run))
    assert failed.value.refusal == "no model"
    assert run.side_file("log").read_text() == "round 1/2\nerror: no model\n"
    assert not run.finished


def test_commands_of_one_process_share_nothing_but_imports(tmp_path, monkeypatch):
    """A command's globals, output and crash do not affect the next one. 70,000 characters are more than a
    pipe holds, and than a line may have in asyncio."""
    as_command(
        monkeypatch,
        """
        count = 0
        def main_(words):
            global count
            count += 1
            print(count, os.getppid(), words[1], "x" * 70_000)
            if words[1] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    run = sweep_child.SweepRun(None, tmp_path / "run")

    async def three(processes):
        first = await processes.call(run, "first")
        with pytest.raises(sweep_child.CommandError, match="status -9: killed by signal 9"):
            await processes.call(run, "dies")
        last = await processes.call(run, "last")
        processes._idle[0].kill()
        with pytest.raises(sweep_child.CommandError, match="status -9: killed by signal 9"):
            await processes.call(run, "never")
        return first, last

    first, last = (each.decode().split() for each in with_processes(three))
    assert [first, last] == [["1", first[1], word, "x" * 70_000] for word in ("first", "last")]


def test_a_process_that_cannot_start_says_why(tmp_path, monkeypatch):
    """As where a library is broken: the error and the log have its last words, not the terminal."""
    monkeypatch.setattr(sweep_child, "START", "raise ImportError('broken peft')")
    run = toy_cells(tmp_path)[0].planned()[0]
    with pytest.raises(sweep_child.CommandError, match="status 1: ImportError: broken peft"):
        with_processes(partial(run_in_process, run))
    assert run.side_file("log").read_text().endswith("ImportError: broken peft\n")


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is imported before the fork")
@pytest.mark.parametrize("build", ["", "import torch.version; torch.version.cuda = '13.0'"])
def test_a_process_is_ready_for_a_fork(build):
    """A thread would be missing in the fork, and locks that it held would stay locked. A GPU that a library
    has asked for, as bitsandbytes does, would be lost in it."""
    shown = "print(len(os.listdir('/proc/self/task')), 'peft' in sys.modules)\nsys.exit()\nfor line in"
    code = f"{build}\n{sweep_child.START.replace('for line in', shown)}"
    words = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run(words, capture_output=True, text=True, env=environment).stdout == f"1 {not build}\n"


def test_a_command_runs_nothing_of_the_working_directory(tmp_path, monkeypatch):
    """A ``json.py`` or ``typer.py`` next to the user's data is theirs, and no library's."""
    for name in ("json", "typer", "peft"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(99)\n")
    monkeypatch.chdir(tmp_path)
    run = sweep_child.SweepRun(None, tmp_path / "run")
    assert b"feddpo" in with_processes(lambda processes: processes.call(run, "methods"))


@pytest.mark.parametrize("ends", ["killed", "interrupted"])
def test_a_command_ends_with_its_parent(tmp_path, monkeypatch, ends):
    """Also where the parent is killed without a chance to report it. One that is interrupted waits for it."""
    as_command(
        monkeypatch,
        f"""
        def main_(words):
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
            try:
                signal.signal(signal.SIGTERM, signal.default_int_handler)
                time.sleep({WATCHDOG})
            except KeyboardInterrupt:
                time.sleep(0.2)
                pathlib.Path({str(tmp_path / "stopped")!r}).touch()
        """,
    )
    parent = f"""
        import asyncio, pathlib, signal
        from types import SimpleNamespace
        from prefed.runs import sweep_child as child
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        child.START = {sweep_child.START!r}
        out, log = pathlib.Path("x"), pathlib.Path({str(tmp_path / "log")!r})
        run = SimpleNamespace(out=out, side_file=lambda ending: log)
        asyncio.run(child.CommandProcesses().call(run, "run"))
    """
    pid = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", dedent(parent)], stderr=subprocess.DEVNULL) as process:
        until(lambda: (pid.exists() and pid.read_text()) or process.poll() is not None, "the command's start")
        process.kill() if ends == "killed" else process.terminate()
    number = int(pid.read_text())
    if ends == "interrupted":
        assert (tmp_path / "stopped").exists()
    until(lambda: not alive(number), "the command's end")


def alive(pid):
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_names_the_code_that_made_it_and_all_that_resumed_it(tmp_path, monkeypatch):
    """Killed under one commit and resumed under another it names both, each once, in this order."""
    run = toy_cells(tmp_path)[0].planned()[0]
    names = iter(["abc1234", "bcd2345", "bcd2345"])
    resumed: list[bool] = []

    async def fake(self, run, *words):
        resumed.append("--resume" in words)
        run.out.mkdir(exist_ok=True)
        if len(resumed) < 3:
            raise KeyboardInterrupt
        (run.out / "summary.json").write_text("{}")

    monkeypatch.setattr(sweep_child, "code_version", lambda: next(names))
    monkeypatch.setattr(sweep_child.CommandProcesses, "call", fake)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            with_processes(partial(run_in_process, run))
        assert not run.ready

    async def twice(processes):
        await run_in_process(run, processes)
        await run_in_process(run, processes)

    with_processes(twice)
    assert resumed == [False, True, True]
    assert commits(run.out) == ["abc1234", "bcd2345"]
    assert run.ready
    assert [path.name for path in run.out.parent.iterdir()] == [run.out.name]


def test_code_is_named_by_its_commit(tmp_path):
    """With a + where a file that git knows differs; by its version where git does not know the package."""

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True
        )

    package = tmp_path / "prefed/__init__.py"
    package.parent.mkdir()
    package.write_text("")
    git("init", "-q")
    assert code_version(package.parent).startswith("v")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "--short", "HEAD").stdout.strip()
    assert code_version(package.parent) == head
    (tmp_path / "notes.txt").write_text("not git's")
    assert code_version(package.parent) == head
    package.write_text("x = 1\n")
    assert code_version(package.parent) == f"{head}+"


# The command


def test_what_is_not_there_is_named_before_anything_runs(tmp_path):
    """A cell, a file, and an option of the table that is misspelt; nothing is written."""
    toy_cells(tmp_path, "local", "feddpo")
    table = tmp_path / "toy.toml"

    def error(*words):
        result = prefed_("sweep", table, "--out", tmp_path / "out", *words, code=1)
        return result

    assert f"{table}: no cell matches 'locl'; did you mean 'local'?" in error("--only", "locl")
    message = error("--only", "lo*")
    assert f"not found: pairs.jsonl ({table}, cell local; looked in {tmp_path} and " in message
    assert "); set the path with --set, or prepare the files as described in the README" in message
    assert "no/such/model (" in error("--set", "model.name=no/such/model")
    for override in ("seed=3", "method.lr=3"):
        assert f"--set {override}: {override.partition('=')[0]} is set by the sweep" in error(
            "--set", override
        )
    data = jsonl(tmp_path / "there.jsonl", ROWS)
    message = error("--set", f"data.train={data}")
    assert all(word in message for word in (str(table), "'local'", "validation pairs", "data.validation"))
    split = jsonl(tmp_path / "split.jsonl", [{**row, "split": "validation"} for row in ROWS])
    check_cells(sweep_cells(table, tmp_path, [f"data.train={split}"]))
    assert "--set method.lrr=1: method.lrr: no such key; did you mean 'lr'?" in error("--set", "method.lrr=1")
    text = table.read_text()
    table.write_text(text.replace('"feddpo"', '"feddqo"'))
    wrong = error()
    assert f"{table}, cell feddpo: method: no method is called" in wrong
    assert "--set" not in wrong
    table.write_text(text.replace("further = 2", "farther = 2"))
    assert "farther: no such key; did you mean 'further'?" in error()
    assert not (tmp_path / "out").exists()
    table.unlink()
    assert "toy.toml: no such file; `prefed init METHOD" in error()


def test_a_sweep_stops_with_its_runs_and_goes_on(tmp_path, monkeypatch):
    """Stopped by SIGTERM during a run, it leaves no process behind. The same command then finishes, and the
    run that was stopped names its code. The second time, the commands of runs are called in this process."""
    toy_cells(small_place(tmp_path), further=0)
    table = tmp_path / "toy.toml"
    text = table.read_text().replace("[1, 2, 3]", "[1]").replace("[1e-3, 3e-3, 9e-3]", "[1e-3]")
    table.write_text(text)
    data = jsonl(tmp_path / "pairs.jsonl", ROWS)
    sets = [f"data.train={data}", f"model.name={tmp_path / 'model'}", "data.test_fraction=0.2"]
    sets += [
        "data.validation_fraction=0.2",
        "data.max_length=64",
        "method.local_steps=1",
        'data.partition={by="iid", clients=2}',
    ]
    words = ["sweep", str(table), "--out", str(tmp_path / "out")]
    words += [word for each in sets for word in ("--set", each)]
    process = Command(tmp_path / "errors.txt", *words)
    run = tmp_path / "out/toy/local-lr0.001-seed1"
    until((run / "checkpoint").exists, "the first checkpoint")
    code, errors = process.send(signal.SIGTERM)
    assert (code, "the same command continues from here" in errors) == (130, True), errors

    async def command(self, run, *words):
        commands.append(words[0])
        return await sweep_command(self, run, *words)

    commands = []
    monkeypatch.setattr(sweep_child.CommandProcesses, "call", command)
    again = prefed_(*words)
    assert commands == ["run", "evaluate"]
    assert "finished toy local, 1 of 1 cells" in again
    assert {path.name for path in run.parent.iterdir()} - {"reference"} == {run.name}
    assert json.loads((run / "judged-test.json").read_text())["preference_accuracy"]["mean"] >= 0
    assert len(commits(run)) == 1
